"""Run by ``test_lanes.py`` under TRITON_INTERPRET=1."""
from __future__ import annotations

import os

import pytest
import torch

from alignment.digest import device_digest
from vime.weights import lanes
from vime.weights.lanes_triton import lanes as kernel

assert os.environ.get("TRITON_INTERPRET") == "1"


def ours(value: torch.Tensor) -> str:
    return lanes.finish([lanes.begun(value)])[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (33, 7), (9001,)])
def test_the_same_text_as_the_definition(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randint(0, 250, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert ours(value) == device_digest(value)


def test_views_of_any_stride_and_offset() -> None:
    value = torch.randn(64, 66, generator=torch.Generator().manual_seed(1)).bfloat16()
    for view in (value.t(), value[:, 1:], value[3:, ::2], value.reshape(-1)[1:], value.reshape(-1)[1:2]):
        assert ours(view) == device_digest(view) == ours(view.contiguous())


def test_many_are_begun_before_the_first_is_finished() -> None:
    values = [torch.arange(n, dtype=torch.float32) for n in (0, 3, 5000)]
    under_way = [lanes.begun(value) if len(value) != 3 else device_digest(value) for value in values]
    assert lanes.finish(under_way) == [device_digest(value) for value in values] and lanes.finish([]) == []


def test_one_bit_and_one_exchange_change_it() -> None:
    value = torch.randn(8, 700, generator=torch.Generator().manual_seed(2))
    seen = {ours(value), ours(value.flip(0)), ours(value.reshape(700, 8))}
    flipped = value.clone()
    flipped.view(torch.int32)[7, 699] ^= 1
    assert len(seen | {ours(flipped)}) == 4


def test_positions_past_the_first_four_billion_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of more than 16 GiB: the number of its first word is given, the definition gets its arange shifted."""
    first, words = (1 << 32) - 5, torch.randint(-(1 << 31), 1 << 31, (11,), generator=torch.Generator().manual_seed(3)).int()
    out = torch.zeros(4, dtype=torch.int64)
    kernel[(1,)](words, out, len(words), first, BLOCK=16)
    plain = torch.arange
    monkeypatch.setattr(torch, "arange", lambda a, b, **options: plain(a + first, b + first, **options))
    assert lanes.finish([lanes.Begun("int32", (11,), 44, out)]) == [device_digest(words)]
