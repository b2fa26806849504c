"""On a GPU: what saves launches gives the bits of the plain functions. Under ten seconds."""
from __future__ import annotations

import pytest
import torch

from vime import ops
from vime.ops.cuda.proof_attention import paged_copy, starts
from vime.ops.cuda.shapes import MODELS


def _bits(x: torch.Tensor) -> torch.Tensor:
    assert torch.isfinite(x).all()
    return x.contiguous().view(torch.int16)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
def test_rotate(model: str, rows: int) -> None:
    s = MODELS[model]
    torch.manual_seed(rows)
    qkv = torch.randn(rows, (s.heads + 2 * s.groups) * s.head_dim, device="cuda", dtype=torch.bfloat16)
    q, k, _ = qkv.split([s.heads * s.head_dim, s.groups * s.head_dim, s.groups * s.head_dim], dim=1)
    q, k = q.view(rows, s.heads, s.head_dim), k.view(rows, s.groups, s.head_dim)
    cos, sin = ops.rope_cos_sin(torch.arange(4096, device="cuda"), s.head_dim, 1e4)
    at = torch.randint(0, 4096, (rows,), device="cuda")
    leaves = [x.detach().clone().requires_grad_() for x in (q, k)]
    upstream = [torch.randn_like(x) for x in leaves]
    got = ops.rotate(q, k, cos, sin, at)
    for mine, x in zip(got, (q, k), strict=True):
        assert torch.equal(_bits(mine), _bits(ops.apply_rope(x, cos[at], sin[at])))
    mine = torch.autograd.grad(ops.rotate(*leaves, cos, sin, at), leaves, upstream)
    plain = torch.autograd.grad([ops.apply_rope(x, cos[at], sin[at]) for x in leaves], leaves, upstream)
    assert all(torch.equal(_bits(a), _bits(b)) for a, b in zip(mine, plain, strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_attention_into_a_tensor_with_one_plan_for_many_layers(model: str) -> None:
    """Layers of one step share the plan, eager and captured, for decode, chunks and a mix; each has the bits of a launch alone."""
    s = MODELS[model]
    torch.manual_seed(0)
    lengths = (1, 3, 1025, 17, 64, 65, 300, 511, 2048, 33)
    total, scale = sum(lengths), s.head_dim**-0.5
    layers = [paged_copy(*(torch.randn(total, s.groups, s.head_dim, device="cuda", dtype=torch.bfloat16) for _ in "kv"), lengths)
              for _ in range(4)]
    used = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    for new in ((1,) * 10, tuple(min(n, 64) for n in lengths), (1, 3, 500, 1, 64, 1, 300, 1, 1, 33)):
        first = starts(new)
        q = torch.randn(sum(new) + 5, s.heads, s.head_dim, device="cuda", dtype=torch.bfloat16)  # five rows of padding

        def step(out: torch.Tensor, q: torch.Tensor = q, first: torch.Tensor = first) -> None:
            plan = ops.attention_plan(q, layers[0][0], layers[0][1], used, first)
            for i, (cache, table) in enumerate(layers):
                ops.attention_paged_into(out[i], q, cache, table, used, first, scale, plan)

        want = torch.stack([ops.attention_paged(q, cache, table, used, first, scale) for cache, table in layers])
        out = torch.zeros_like(want)
        step(out)
        assert torch.equal(_bits(out[:, : sum(new)]), _bits(want[:, : sum(new)])), "eager"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(out)
        for _ in range(3):
            out.zero_()
            graph.replay()
            assert torch.equal(_bits(out[:, : sum(new)]), _bits(want[:, : sum(new)])), "captured"
        other = tuple(max(1, n // 2) for n in new)  # a graph has to plan anew for the lengths that it finds
        first.copy_(starts(other))
        used.copy_(torch.tensor([max(n, m - 1) for n, m in zip(other, lengths, strict=True)]))
        want = torch.stack([ops.attention_paged(q, cache, table, used, first, scale) for cache, table in layers])
        graph.replay()
        assert torch.equal(_bits(out[:, : sum(other)]), _bits(want[:, : sum(other)])), "captured, then other lengths"
        used.copy_(torch.tensor(lengths))


def test_gradients_of_packs_that_are_changed_in_place() -> None:
    """What is kept of the boundaries (longest, rows in all) is thrown away when they change."""
    q, k, v = (torch.randn(300, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (9, 3, 3))
    cu, upstream = starts([200, 60, 40]), torch.randn(300, 9, 64, device="cuda", dtype=torch.bfloat16)

    def gradients(cu: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(ops.attention_varlen(q, k, v, cu, 0.125), (q, k, v), upstream)

    gradients(cu)
    cu.copy_(starts([10, 50, 200]))
    for got, want in zip(gradients(cu), gradients(starts([10, 50, 200])), strict=True):
        assert torch.equal(_bits(got), _bits(want))
        assert not got[260:].any()
