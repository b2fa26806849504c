"""Rotation by a table, and attention into a given tensor: the plain functions' bits on the CPU, which has no kernel of its own for them."""
from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime import ops


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(0, 20), heads=st.integers(1, 5), groups=st.integers(0, 3), half=st.integers(1, 6), rest=st.integers(0, 4),
       interleaved=st.booleans(), bf16=st.booleans(), seed=st.integers(0, 2**31))
def test_rotate_is_apply_rope(rows, heads, groups, half, rest, interleaved, bf16, seed):
    g = torch.Generator().manual_seed(seed)
    dtype, dim = torch.bfloat16 if bf16 else torch.float32, 2 * half + rest
    q = torch.randn(rows, heads, dim, generator=g).to(dtype).requires_grad_()
    k = torch.randn(rows, groups, dim, generator=g).to(dtype).requires_grad_() if groups else None
    cos, sin = ops.rope_cos_sin(torch.arange(50), 2 * half, 1e4)
    at = torch.randint(0, 50, (rows,), generator=g)
    want = [ops.apply_rope(x, cos[at], sin[at], interleaved) for x in (q, k) if x is not None]
    got = [x for x in ops.rotate(q, k, cos, sin, at, interleaved) if x is not None]
    leaves = [x for x in (q, k) if x is not None]
    assert len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    upstream = [torch.randn(x.shape, generator=g).to(dtype) for x in want]
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream),
                                                 strict=True))


@pytest.mark.parametrize(("q", "k", "table", "positions", "text"), [
    ((4, 2, 8), None, (9, 5), torch.arange(4), "do not fit"), ((4, 2, 8), (4, 1, 6), (9, 2), torch.arange(4), "k .*do not fit"),
    ((4, 2, 8), (3, 1, 8), (9, 2), torch.arange(4), "k .*do not fit"), ((4, 2, 8), None, (9, 2), torch.rand(4), "positions integers")])
def test_what_does_not_fit_is_named(q, k, table, positions, text):
    with pytest.raises(ValueError, match=text):
        ops.rotate(torch.zeros(q), None if k is None else torch.zeros(k), torch.zeros(table), torch.zeros(table), positions)


def test_attention_into_a_tensor():
    g = torch.Generator().manual_seed(0)
    heads, groups, dim, lengths = 4, 2, 16, [5, 40]
    cache = torch.zeros(ops.kv_cache_shape(8, 16, groups, dim, torch.float32))
    k, v = (torch.randn(45, groups, dim, generator=g) for _ in range(2))
    table = torch.tensor([[6, 0, 0], [1, 5, 2]], dtype=torch.int32)
    slots = torch.cat([table[b, torch.arange(n) // 16].long() * 16 + torch.arange(n) % 16 for b, n in enumerate(lengths)])
    ops.kv_cache_write(k, v, cache, slots)
    q, used, starts = torch.randn(7, heads, dim, generator=g), torch.tensor(lengths, dtype=torch.int32), torch.tensor([0, 2, 7], dtype=torch.int32)
    want = ops.attention_paged(q, cache, table, used, starts, 0.25)
    out = torch.full_like(q, float("nan"))
    plan = ops.attention_plan(q, cache, table, used, starts)
    assert ops.attention_paged_into(out, q, cache, table, used, starts, 0.25, plan) is out and torch.equal(out, want)
    with pytest.raises(ValueError, match="is not like q"):
        ops.attention_paged_into(out[:3], q, cache, table, used, starts, 0.25)
