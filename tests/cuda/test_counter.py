"""On a GPU: weights made of a counter have the bits that a CPU gives them, wherever a chunk begins."""
from __future__ import annotations

import pytest
import torch

from vime.weights import counter
from vime.weights.manifest import digest_of
from vime.weights.raw import same_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mean, scale", [(0.0, 1.0), (1.0, 0.1), (0.0, 6144**-0.5), (-0.3, 0.0)])
def test_the_bits_of_a_cpu(dtype: torch.dtype, mean: float, scale: float) -> None:
    for name, first, count in (("a.weight", 0, 1 << 20), ("b.weight", 2**33 - 5, 4097), ("c", 2**40 + 1, 1)):
        here = counter.elements(name, first, count, mean, scale, dtype, "cuda")
        assert same_bits(here.cpu(), counter.elements(name, first, count, mean, scale, dtype)), (name, first)


def test_a_tensor_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = counter.tensor("model.layers.3.mlp.experts.7.up_proj.weight", (300, 1111), 0.0, 0.02, torch.bfloat16, "cuda")
    monkeypatch.setattr(counter, "CHUNK", 9999)
    assert same_bits(whole.cpu(), counter.tensor("model.layers.3.mlp.experts.7.up_proj.weight", (300, 1111), 0.0, 0.02, torch.bfloat16))


@pytest.mark.parametrize("size", [0, 1, 63, (32 << 20) - 1, 32 << 20, (64 << 20) + 3])
def test_a_digest_is_that_of_the_bytes_on_a_cpu(size: int) -> None:
    x = counter.elements("x", 0, size, 0.0, 1.0, torch.bfloat16, "cuda")
    assert digest_of(x) == digest_of(x.cpu()) and digest_of(x) == digest_of(x.clone())
    if size:
        x[size // 2] = 3.0
        assert digest_of(x) == digest_of(x.cpu())
