"""Attention: packed, paged, chunked, cached and decoded rows have the same bits."""
from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.helpers import against_float64, assert_same_rows, leaf
from vime import ops
from vime.ops import reference


def qkv(total, heads, groups, dim, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(total, n, dim, generator=generator).to(dtype) for n in (heads, groups, groups)]


def starts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def test_paged_in_any_chunks_is_packed(dtype):
    @settings(max_examples=20)
    @given(lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4), page=st.sampled_from([16, 32, 64, 128]),
           head=st.sampled_from([(2, 2, 8), (6, 2, 64), (7, 1, 80), (4, 2, 128)]), seed=st.integers(0, 9), data=st.data())
    def check(lengths, page, head, seed, data):
        heads, groups, dim = head
        q, k, v = qkv(sum(lengths), heads, groups, dim, dtype, seed)
        cu, scale = starts(lengths), dim ** -0.5
        torch.set_num_threads(1)
        want = ops.attention_varlen(q, k, v, cu, scale)
        torch.set_num_threads(data.draw(st.sampled_from([1, 2])))
        blocks = [(n + page - 1) // page for n in lengths]
        cache = torch.full(ops.kv_cache_shape(sum(blocks) + 2, page, groups, dim, dtype), float("nan"), dtype=dtype)
        free = data.draw(st.permutations(range(sum(blocks) + 2)))
        table = torch.full((len(lengths), max(blocks)), -1, dtype=torch.int32)
        for b, n in enumerate(blocks):
            table[b, :n] = torch.tensor(free[:n])
            free = free[n:]
        done, got = [0] * len(lengths), torch.zeros_like(want)
        while active := [b for b in range(len(lengths)) if done[b] < lengths[b]]:
            rows, slots, counts = [], [], []
            for b in active:
                n = min(data.draw(st.sampled_from([1, 2, 16, 63, 64, 100])), lengths[b] - done[b])
                position = torch.arange(done[b], done[b] + n)
                rows.append(position + int(cu[b]))
                slots.append(table[b, position // page].long() * page + position % page)
                counts.append(n)
                done[b] += n
            index = torch.cat(rows)
            ops.kv_cache_write(k[index], v[index], cache, torch.cat(slots))
            got[index] = ops.attention_paged(q[index], cache, table[active], torch.tensor([done[b] for b in active]), starts(counts), scale)
        assert_same_rows(got, want)

    check()


def test_a_sequence_does_not_know_its_pack(dtype):
    lengths = [3, 130, 1, 64, 77]
    q, k, v = qkv(sum(lengths), 6, 2, 64, dtype)
    packed = ops.attention_varlen(q, k, v, starts(lengths), 0.125)
    for b, (first, last) in enumerate(zip(starts(lengths)[:-1], starts(lengths)[1:], strict=True)):
        alone = ops.attention_varlen(q[first:last], k[first:last], v[first:last], starts([lengths[b]]), 0.125)
        assert_same_rows(alone, packed[first:last])


def test_later_keys_leave_no_trace(dtype):
    """A position sees nothing of what follows, not even its sign of zero."""
    q, k, v = qkv(130, 4, 2, 64, dtype)
    longer = ops.attention_varlen(q, k, v, starts([130]), 0.125)
    for n in (1, 63, 64, 65, 129):
        assert_same_rows(ops.attention_varlen(q[:n], k[:n], v[:n], starts([n]), 0.125), longer[:n])


def test_a_slot_of_another_sequence_changes_nothing_and_an_own_one_does(dtype):
    q, k, v = qkv(40, 4, 2, 64, dtype)
    cache = torch.zeros(ops.kv_cache_shape(6, 16, 2, 64, dtype), dtype=dtype)
    table = torch.tensor([[4, 0, 2]], dtype=torch.int32)
    position = torch.arange(40)
    ops.kv_cache_write(k, v, cache, table[0, position // 16].long() * 16 + position % 16)

    def run():
        return ops.attention_paged(q[39:], cache, table, torch.tensor([40]), starts([1]), 0.125)

    want = run()
    ops.kv_cache_write(k + 1, v + 1, cache, torch.tensor([2 * 16 + 8] + [-1] * 39))  # position 40: not yet there
    assert_same_rows(run(), want)
    ops.kv_cache_write(k + 1, v + 1, cache, torch.tensor([2 * 16 + 7] + [-1] * 39))  # position 39
    assert not torch.equal(run(), want)


@pytest.mark.parametrize("head", [(9, 3, 64), (4, 2, 128), (4, 4, 24), (6, 2, 80)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_against_float64(head, causal, dtype):
    heads, groups, dim = head
    lengths = [5, 0, 70, 129, 1]
    inputs = [leaf(sum(lengths) + 3, n, dim, dtype=dtype, seed=i) for i, n in enumerate((heads, groups, groups))]
    grads = against_float64(lambda q, k, v: ops.attention_varlen(q, k, v, starts(lengths), dim ** -0.5, causal),
                            lambda q, k, v: reference.attention_varlen(q, k, v, starts(lengths), dim ** -0.5, causal),
                            *inputs, tolerance=3e-6 if dtype is torch.float32 else 4e-3)
    assert all((g[sum(lengths):] == 0).all() for g in grads)


def test_backward_is_deterministic_and_knows_no_pack(dtype):
    lengths = [70, 129]
    q, k, v = qkv(sum(lengths), 6, 2, 64, dtype)
    up = torch.randn(q.shape).to(dtype)

    def grads(rows, cu, threads):
        torch.set_num_threads(threads)
        inputs = [x[rows].clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(ops.attention_varlen(*inputs, cu, 0.125), inputs, up[rows])

    one, two = grads(slice(None), starts(lengths), 1), grads(slice(None), starts(lengths), 2)
    alone = grads(slice(70, None), starts([129]), 1)
    for a, b, c in zip(one, two, alone, strict=True):
        assert_same_rows(b, a)
        assert_same_rows(c, a[70:])


def test_large_scores_stay_finite(dtype):
    q, k, v = (x * 50 for x in qkv(70, 2, 2, 64, dtype))
    assert torch.isfinite(ops.attention_varlen(q, k, v, starts([70]), 1.0)).all()


def test_bad_input_is_named(dtype):
    q, k, v = qkv(10, 4, 2, 64, dtype)
    cache = torch.zeros(ops.kv_cache_shape(2, 16, 2, 64, dtype), dtype=dtype)
    with pytest.raises(ValueError, match="multiple of groups"):
        ops.attention_varlen(q[:, :3], k, v, starts([10]), 1.0)
    with pytest.raises(ValueError, match=r"must not fall, found 5 then 4"):
        ops.attention_varlen(q, k, v, torch.tensor([0, 5, 4, 10]), 1.0)
    with pytest.raises(ValueError, match="block 2 is not in a cache of 2"):
        ops.attention_paged(q, cache, torch.tensor([[2]]), torch.tensor([10]), starts([10]), 1.0)
    with pytest.raises(IndexError, match="slot 32 is beyond a cache of 32"):
        ops.kv_cache_write(k[:1], v[:1], cache, torch.tensor([32]))
    with pytest.raises(ValueError, match="multiple of 16"):
        ops.kv_cache_shape(2, 20, 2, 64, dtype)
