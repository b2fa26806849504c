"""Which of several kernels with the same bits runs on CUDA: what decides, without a device."""
from __future__ import annotations

import pytest
import torch

from vime.ops.cuda import blockwise, gemm, grouped

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(grouped, "_same_bits", {})
    monkeypatch.setattr(blockwise, "_routes", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.mark.parametrize("agree", [True, False])
def test_small_tiles_serve_few_rows_where_they_give_the_same_bits(agree, monkeypatch):
    tiles = []

    def multiply(x, weight, source, target, ends, tile):
        tiles.append(tile["BM"])
        return torch.full((len(source), weight.shape[1]), 0.0 if agree else float(tile["BM"]))

    monkeypatch.setattr(grouped, "_multiply_experts", multiply)
    weight = torch.zeros(4, 16, 32, dtype=BF16)
    small, wide = grouped._FEW[BF16]["BM"], grouped._TILE[BF16]["BM"]

    def tile_of(count: int, weight_ENK: torch.Tensor = weight) -> int:
        rows = torch.zeros(count, dtype=torch.int64)
        grouped.grouped_linear(torch.zeros(1, weight_ENK.shape[2], dtype=weight_ENK.dtype), weight_ENK, rows, rows, torch.full((4,), count))
        return tiles[-1]

    assert tile_of(4 * grouped._FEW_ROWS) == (small if agree else wide)
    assert tiles[:2] == [wide, small]  # the two were compared first, once
    asked = len(tiles)
    assert tile_of(1) == (small if agree else wide) and len(tiles) == asked + 1
    assert tile_of(4 * grouped._FEW_ROWS + 1) == wide
    assert tile_of(1, weight.float()) == grouped._TILE[torch.float32]["BM"]


@pytest.mark.parametrize(("deep", "want", "reason"), [
    ("same", "deep_gemm", ""), ("other", "triton", "other bits at M = [65, 65]"), ("missing", "triton", "RuntimeError: no nvcc")])
def test_deep_gemm_serves_a_shape_only_where_it_gives_the_same_bits(deep, want, reason, monkeypatch):
    """Proven once a process, and whatever VIME_PROOFS says: the shape is served either way."""
    monkeypatch.setenv("VIME_PROOFS", "require")
    proofs = []

    def by_deep_gemm(x, weight):
        proofs.append(len(x))
        if deep == "missing":
            raise RuntimeError("no nvcc")
        y = by_triton(x, weight)
        return y.index_fill_(1, torch.tensor([3]), 7.0) if deep == "other" and len(x) == 65 else y

    def by_triton(x, weight):
        return torch.full((len(x), 64), 1.0)

    monkeypatch.setattr(blockwise, "_by_triton", by_triton)
    monkeypatch.setattr(blockwise, "_by_deep_gemm", by_deep_gemm)
    monkeypatch.setattr(blockwise, "quantise_weights", lambda weight, block: None)
    monkeypatch.setattr(blockwise, "_LARGE", 64 * 128)
    weight = torch.zeros(64, 128, dtype=BF16)
    found = blockwise.route(weight)
    assert found.kernel == want and reason in found.reason
    asked = len(proofs)
    assert asked >= (1 if deep == "missing" else len(blockwise.PROOF_ROWS)) and blockwise.route(weight) is found and len(proofs) == asked
    proofs.clear()
    most = blockwise.PROOF_ROWS[-1]
    for rows in (1, most, most + 1):  # no more rows than were proven
        blockwise.linear_fp8(torch.zeros(rows, 128, dtype=BF16), weight, None)
    assert proofs == ([1, most] if want == "deep_gemm" else [])


def test_what_deep_gemm_does_not_take_is_not_offered_to_it(monkeypatch):
    monkeypatch.setattr(blockwise, "_prove", lambda *_: pytest.fail("it was"))
    for weight in (torch.zeros(64, 128, dtype=BF16), torch.zeros(1 << 12, 1 << 11), torch.zeros(1 << 12, (1 << 11) + 64, dtype=BF16),
                   torch.zeros((1 << 12) + 32, 1 << 11, dtype=BF16)):
        assert blockwise.route(weight).kernel == "triton"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    found = blockwise.route(torch.zeros(1 << 12, 1 << 11, dtype=BF16))
    assert found.kernel == "triton" and "capture" in found.reason


def test_blocks_that_start_at_each_tensor_are_told_from_plain_ones():
    from vime.ops import row_blocks

    assert blockwise._plain_blocks(None) and blockwise._plain_blocks(row_blocks([256, 130]))
    odd = row_blocks([130, 256])
    assert not blockwise._plain_blocks(odd) and not blockwise._plain_blocks(odd)


@pytest.mark.parametrize(("rows", "width"), [(160, 6144), (576, 1536)])
def test_the_data_of_a_proof_show_another_order(rows, width):
    """A sum of two halves along K against one sum, which large sums rounded to bf16 hide nearly everywhere."""
    generator = torch.Generator().manual_seed(1)
    sample = torch.randn(rows, width, dtype=BF16, generator=generator)

    def sums(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(a), len(w))
        for k in range(0, a.shape[1], 16):
            total = total + a[:, k:k + 16].float() @ w[:, k:k + 16].float().t()
        return total

    def differing(a: torch.Tensor, w: torch.Tensor) -> int:
        half = width // 2
        return int((sums(a, w).to(BF16) != (sums(a[:, :half], w[:, :half]) + sums(a[:, half:], w[:, half:])).to(BF16)).sum())

    a, w = gemm.cancelling(32, sample, 3)
    assert a.dtype == w.dtype == BF16 and w.shape == sample.shape and a.shape == (32, width)
    assert differing(a, w) > 0.05 * 32 * rows
    assert differing(torch.randn(32, width, dtype=BF16, generator=generator), sample) < 0.002 * 32 * rows
