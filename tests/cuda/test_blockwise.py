"""On a GPU: block FP8. Quantised values as on a CPU, bit for bit; rows alone; float64; experts as one by one; the ordinary backward."""
from __future__ import annotations

import pytest
import torch

from vime import ops
from vime.ops.cuda import blockwise, quantise

ROWS = (1, 2, 3, 7, 17, 63, 64, 65, 128, 200)


def normal(*size: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*size, device="cuda", generator=torch.Generator(device="cuda").manual_seed(seed)) * scale).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows, width", [(256, 512), (300, 300), (4096, 6144)])
def test_weights_are_quantised_as_on_a_cpu(dtype: torch.dtype, rows: int, width: int) -> None:
    w = normal(rows, width, dtype=dtype) * normal(rows, 1, seed=2, dtype=dtype)
    w[:128, :128] = 0
    for block_N in (None, ops.row_blocks([rows // 2, rows - rows // 2])):
        q, scale, block = quantise.quantise_weights(w[None], None if block_N is None else block_N.cuda())
        want, want_scale = ops.quantise_weight_blocks(w.cpu(), block_N)
        assert torch.equal(q[0].cpu().view(torch.uint8), want.view(torch.uint8)) and torch.equal(scale[block].cpu(), want_scale)
    xq, sx = ops.quantise_blocks(w)
    want, want_scale = ops.quantise_blocks(w.cpu())
    assert torch.equal(xq.cpu().view(torch.uint8), want.view(torch.uint8)) and torch.equal(sx.cpu(), want_scale)


@pytest.mark.parametrize("rows, width", [(256, 512), (300, 300), (24576, 6144), (6144, 16384)])
def test_a_row_does_not_see_the_others(rows: int, width: int) -> None:
    x, w = normal(400, width), normal(rows, width, seed=2, scale=width**-0.5)
    whole = ops.linear_fp8(x, w)
    for size in ROWS:
        for first in (0, 5, 100):
            assert torch.equal(ops.linear_fp8(x[first:first + size], w), whole[first:first + size]), (size, first)
    xq, sx = ops.quantise_blocks(x)
    wq, sw = ops.quantise_weight_blocks(w)
    exact = ops.dequantise_blocks(xq, sx, torch.float32).double() @ (
        wq.double() * sw.double().repeat_interleave(128, 1)[:, :width]).t()
    error = float((ops.linear_fp8(x.float(), w.float()).double() - exact).norm() / exact.norm())
    print(f"{rows}x{width}: {error:.1e} of the sum is what the tensor cores leave out")
    assert error < 1e-3 and float((whole.double() - exact).norm() / exact.norm()) < 5e-3


@pytest.mark.parametrize("experts, hidden, ffn, top_k", [(16, 256, 128, 4), (16, 6144, 2048, 8)])
def test_experts_at_once_and_one_by_one(experts: int, hidden: int, ffn: int, top_k: int) -> None:
    x, up = normal(300, hidden), normal(experts, 2 * ffn, hidden, seed=2, scale=hidden**-0.5)
    down = normal(experts, hidden, ffn, seed=3, scale=ffn**-0.5)
    ids = torch.rand(300, experts, device="cuda", generator=torch.Generator(device="cuda").manual_seed(4)).argsort(1)[:, :top_k]
    blocks = ops.row_blocks([ffn, ffn]).cuda(), ops.row_blocks([hidden]).cuda()
    whole = ops.expert_rows(x, ids, up, down, blocks)
    for size in (1, 5, 64, 130):
        assert torch.equal(ops.expert_rows(x[9:9 + size], ids[9:9 + size], up, down, blocks), whole[9:9 + size]), size
    for e in range(0, experts, 5):
        rows = (ids == e).nonzero()
        one = ops.linear_fp8(ops.silu_and_mul(ops.linear_fp8(x[rows[:, 0]], up[e], None, blocks[0])), down[e], None, blocks[1])
        assert torch.equal(one, whole[rows[:, 0], rows[:, 1]]), e


def test_the_backward_is_that_of_the_ordinary_layer() -> None:
    found = []
    for multiply in (ops.linear, ops.linear_fp8):
        x, w = normal(130, 512).requires_grad_(), normal(384, 512, seed=2).requires_grad_()
        found.append(torch.autograd.grad(multiply(x, w), (x, w), normal(130, 384, seed=3)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_nan_comes_out() -> None:
    x, w = normal(3, 256), normal(128, 256, seed=2)
    x[1, 200] = float("nan")
    assert ops.linear_fp8(x, w).isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_quantised_in_one_launch_as_by_the_composite(dtype: torch.dtype) -> None:
    x = normal(333, 6144, dtype=dtype) * torch.logspace(-9, 9, 333, device="cuda")[:, None].to(dtype)
    x[0, :128], x[3, 5], x[4, 200] = 0.0, float("nan"), float("inf")
    for part in (x, x[:1], x[7:72]):
        q, scale = quantise.quantise_rows(part)
        want, want_scale = ops.quantise_blocks(part)
        assert torch.equal(scale, want_scale) and torch.equal(q.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("rows, width", [(2048, 6144), (24576, 6144), (6144, 16384)])
def test_deep_gemm_and_triton_give_the_same_bits(rows: int, width: int) -> None:
    """So either may serve: on data whose blocks differ much in size, and with NaN."""
    w = normal(rows, width, seed=2, scale=width**-0.5) * torch.logspace(-3, 3, rows, device="cuda")[:, None].bfloat16()
    x = normal(700, width) * torch.logspace(-4, 4, width, device="cuda").bfloat16()
    weight = quantise.quantise_weights(w[None], None)
    whole = blockwise._by_triton(x, weight)
    for first, size in ((0, 1), (3, 17), (100, 64), (5, 129), (0, 700)):
        assert torch.equal(blockwise._by_deep_gemm(x[first:first + size].clone(), weight), whole[first:first + size]), (first, size)
    found = blockwise.route(w)
    print(f"{rows}x{width}: {found}")
    assert found.kernel == "deep_gemm", found
    assert torch.equal(ops.linear_fp8(x, w), whole)
    x[3, 1] = float("nan")
    assert blockwise._by_deep_gemm(x, weight).isnan().any(1).nonzero()[:, 0].tolist() == [3]


@pytest.mark.parametrize("rows, width", [(384, 512), (24576, 6144)])
def test_a_kept_weight_gives_the_same_bits_and_a_graph_sees_it_renewed(rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantise, "_kept", {})
    x, w, blocks = normal(65, width), normal(rows, width, seed=2, scale=width**-0.5), ops.row_blocks([rows // 2, rows // 2]).cuda()
    want = ops.linear_fp8(x, w, None, blocks)
    ops.keep_quantised("w", w, blocks)
    monkeypatch.setattr(blockwise, "quantise_weights", lambda *_: pytest.fail("quantised in the product"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.linear_fp8(x, w, None, blocks)
    graph.replay()
    assert torch.equal(y, want) and torch.equal(ops.linear_fp8(x, w, None, blocks), want)
    w.data.copy_(normal(rows, width, seed=9))
    assert ops.stale_quantised("cuda") == ["w"] and ops.refresh_quantised("cuda") == ["w"] and not ops.stale_quantised("cuda")
    graph.replay()
    monkeypatch.undo()
    assert torch.equal(y, ops.linear_fp8(x, w.clone(), None, blocks)) and not torch.equal(y, want)


def test_kept_experts_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantise, "_kept", {})
    x, up, down = normal(70, 256), normal(16, 256, 256, seed=2, scale=1 / 16), normal(16, 256, 128, seed=3, scale=1 / 11)
    ids = torch.rand(70, 16, device="cuda", generator=torch.Generator(device="cuda").manual_seed(4)).argsort(1)[:, :4]
    blocks = ops.row_blocks([128, 128]).cuda(), ops.row_blocks([256]).cuda()
    want = ops.expert_rows(x, ids, up, down, blocks)
    for name, weight, block in (("up", up, blocks[0]), ("down", down, blocks[1])):
        ops.keep_quantised(name, weight, block)
    monkeypatch.setattr(blockwise, "quantise_weights", lambda *_: pytest.fail("quantised in the product"))
    assert torch.equal(ops.expert_rows(x, ids, up, down, blocks), want)
