"""On a GPU: attention over listed rows at the widths of GLM, rows alone against rows together, and float64."""
from __future__ import annotations

import pytest
import torch

from vime.ops.cuda import sparse

HEADS, DIM, VALUE, TOP_K, ROWS = 64, 576, 512, 256, 1024


def inputs(tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator(device="cuda").manual_seed(1)
    q = torch.randn(tokens, HEADS, DIM, device="cuda", generator=g).to(dtype)
    kv = torch.randn(ROWS, DIM, device="cuda", generator=g).to(dtype)
    order = torch.rand(tokens, ROWS, device="cuda", generator=g).argsort(1)[:, :TOP_K].sort(1).values.int()
    counts = torch.arange(tokens, device="cuda") * TOP_K // max(tokens - 1, 1)
    return q, kv, torch.where(torch.arange(TOP_K, device="cuda")[None] < counts[:, None], order, -1)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 64, 129])
def test_a_row_does_not_see_its_neighbours(size: int) -> None:
    q, kv, index = inputs(300)
    whole = sparse.sparse_attention(q, kv, index, VALUE, 0.0625)
    moved = torch.randperm(ROWS, device="cuda")
    there = torch.argsort(moved).int()
    for start in range(0, 300 - size, 37):
        part = slice(start, start + size)
        assert torch.equal(sparse.sparse_attention(q[part], kv, index[part], VALUE, 0.0625), whole[part])
        lists = torch.where(index[part] >= 0, there[index[part].clamp_min(0).long()], -1)
        assert torch.equal(sparse.sparse_attention(q[part], kv[moved], lists, VALUE, 0.0625), whole[part])


def test_against_float64_and_again() -> None:
    q, kv, index = inputs(40)
    upstream = torch.randn(40, HEADS, VALUE, device="cuda", generator=torch.Generator(device="cuda").manual_seed(2)).bfloat16()

    def run() -> tuple[torch.Tensor, ...]:
        leaves = q.clone().requires_grad_(), kv.clone().requires_grad_()
        out = sparse.sparse_attention(*leaves, index, VALUE, 0.0625)
        out.backward(upstream)
        return out.detach(), leaves[0].grad, leaves[1].grad  # type: ignore[return-value]

    exact = q.double().requires_grad_(), kv.double().requires_grad_()
    rows = []
    for t in range(40):
        chosen = exact[1][index[t][index[t] >= 0].long()]
        rows.append(torch.softmax(0.0625 * exact[0][t] @ chosen.t(), 1) @ chosen[:, :VALUE] if len(chosen) else exact[0][t, :, :VALUE] * 0)
    want = torch.stack(rows)
    want.backward(upstream.double())
    first = run()
    for got, true in zip(first, (want.detach(), exact[0].grad, exact[1].grad), strict=True):
        assert float((got.double() - true).norm() / true.norm()) < 6e-3
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
