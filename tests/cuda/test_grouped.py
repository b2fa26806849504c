"""On a GPU: products by head and by expert: a row alone as among others, against float64, and the trainer's form as the engine's."""
from __future__ import annotations

import pytest
import torch

from vime import ops
from vime.ops.cuda import grouped

ROWS = (1, 2, 3, 7, 15, 16, 17, 63, 64, 65, 127, 130, 500)


def normal(*size: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*size, device="cuda", generator=torch.Generator(device="cuda").manual_seed(seed)) * scale).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor, bound: float = 4e-3) -> None:
    assert float((got.double() - want).norm() / want.norm()) < bound


@pytest.mark.parametrize("heads, nope, v, rank", [(4, 32, 32, 256), (64, 192, 256, 512)])
def test_a_token_does_not_see_the_others(heads: int, nope: int, v: int, rank: int) -> None:
    kv_b = normal(heads, nope + v, rank, seed=3, scale=rank**-0.5)
    for weight in (kv_b[:, :nope].transpose(1, 2), kv_b[:, nope:]):
        x = normal(700, heads, weight.shape[2])
        whole = ops.linear_heads(x, weight)
        close(whole, torch.einsum("thk,hnk->thn", x.double(), weight.double()))
        for size in ROWS:
            for first in (0, 1, 31, 150):
                assert torch.equal(ops.linear_heads(x[first:first + size], weight), whole[first:first + size]), (size, first)


def test_gradients_of_heads() -> None:
    x, w = normal(300, 8, 192).requires_grad_(), normal(8, 512, 192, seed=2, scale=0.1).requires_grad_()
    dy = normal(300, 8, 512, seed=3)
    found = [torch.autograd.grad(ops.linear_heads(x, w), (x, w), dy) for _ in range(3)]
    close(found[0][0], torch.einsum("thn,hnk->thk", dy.double(), w.double()))
    close(found[0][1], torch.einsum("thn,thk->hnk", dy.double(), x.double()))
    assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(found[0], again, strict=True))


@pytest.mark.parametrize("experts, hidden, ffn, top_k", [(16, 128, 64, 4), (32, 6144, 2048, 8)])
def test_a_row_does_not_see_how_many_its_expert_got(experts: int, hidden: int, ffn: int, top_k: int) -> None:
    x, up = normal(600, hidden), normal(experts, 2 * ffn, hidden, seed=2, scale=hidden**-0.5)
    down = normal(experts, hidden, ffn, seed=3, scale=ffn**-0.5)
    ids = torch.rand(600, experts, device="cuda", generator=torch.Generator(device="cuda").manual_seed(4)).argsort(1)[:, :top_k]
    ids[:200] = ids[0]  # experts with many rows, and with few
    whole = ops.expert_rows(x, ids, up, down)
    for size in ROWS:
        for first in (0, 90):
            part = slice(first, first + size)
            assert torch.equal(ops.expert_rows(x[part], ids[part], up, down), whole[part]), (size, first)
    for e in (0, int(ids[0, 0]), experts - 1):  # as the trainer evaluates them
        rows = (ids == e).nonzero()
        one = ops.expert_linear(ops.silu_and_mul(ops.expert_linear(x[rows[:, 0]], up[e])), down[e])
        assert torch.equal(one, whole[rows[:, 0], rows[:, 1]]), e
        hidden_rows = ops.expert_linear(x[rows[:, 0]], up[e])
        close(hidden_rows, x[rows[:, 0]].double() @ up[e].double().t())


def test_nothing_waits_for_the_host() -> None:
    x, up, down = normal(70, 128), normal(16, 128, 128, seed=2), normal(16, 128, 64, seed=3)
    ids = torch.rand(70, 16, device="cuda").argsort(1)[:, :4]
    ops.expert_rows(x, ids, up, down)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.expert_rows(x, ids, up, down)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_loop_and_the_kernel_agree() -> None:
    x, w = normal(200, 64), normal(4, 96, 64, seed=2)
    ids = torch.arange(200, device="cuda")[:, None] % 4
    plan = grouped.plan(ids, 4)
    got = grouped.grouped_linear(x, w, plan.token_R, plan.place_R, plan.row_end_E)
    want = torch.stack([ops.linear(x[t:t + 1], w[t % 4])[0] for t in range(200)])
    close(got, want.double())


def test_no_row_at_all() -> None:
    """As a rank of several has it whose experts nobody chose."""
    x, up, down = normal(0, 128), normal(16, 128, 128, seed=2), normal(16, 128, 64, seed=3)
    assert ops.expert_rows(x, torch.zeros(0, 1, dtype=torch.int64, device="cuda"), up, down).shape == (0, 1, 128)


@pytest.mark.parametrize("rows, width", [(4096, 6144), (6144, 2048), (128, 128), (50, 40)])
@pytest.mark.parametrize("inner", [True, False])
def test_small_tiles_give_the_bits_of_wide_ones(rows: int, width: int, inner: bool) -> None:
    """Experts with no row to many; and few rows of experts do take them."""
    weight = normal(5, *((rows, width) if inner else (width, rows)), seed=2, scale=width**-0.5)
    weight = weight if inner else weight.transpose(1, 2)
    ends = torch.tensor([1, 1, 18, 83, 200], device="cuda")
    x, each = normal(200, width), torch.arange(200, device="cuda")
    weight = grouped._weight(weight)
    one, other = (grouped._multiply_experts(x, weight, each, each, ends, tile[torch.bfloat16]) for tile in (grouped._TILE, grouped._FEW))
    assert torch.equal(one, other)
    assert grouped._few_rows(weight, 40) and not grouped._few_rows(weight, 41)
