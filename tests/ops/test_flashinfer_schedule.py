"""The schedule that FlashInfer's kernel is given: every tile of query rows once, at the offsets that the kernel reads.

What the kernel makes of it is shown on a GPU only (``tests/cuda/test_flashinfer.py``).
"""
from __future__ import annotations

import dataclasses
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.ops.providers import flashinfer

NAMES = flashinfer._FIELDS


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=9), group=st.sampled_from([1, 3, 4, 7, 8]), spare=st.integers(0, 40))
def test_every_tile_has_one_program_and_what_is_left_over_repeats_the_first(lengths, group, spare):
    start = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    rows, sequences = int(start[-1]) + spare, len(lengths)  # an engine pads its rows up to a captured size
    schedule = flashinfer.schedule(start, rows, group)
    numbers = dict(zip(NAMES, flashinfer.plan_numbers(rows, sequences, group), strict=True))
    assert len(numbers) == 15 and schedule.dtype is torch.int32
    raw = schedule.numpy().tobytes()

    def read(name, count):
        offset = numbers[f"{name}_offset"]
        assert offset % 16 == 0 and offset + 4 * count <= len(raw)
        return np.frombuffer(raw, np.int32, count, offset).tolist()

    count = numbers["padded_batch_size"]
    programs = list(zip(read("request_indices", count), read("qo_tile_indices", count), strict=True))
    wanted = [(b, t) for b, n in enumerate(lengths) for t in range(-(-n * group // flashinfer.TILE))]
    assert programs[:len(wanted)] == wanted and set(programs[len(wanted):]) <= {(0, 0)}
    assert set(read("kv_tile_indices", count)) == {0} and read("o_indptr", sequences + 1) == start.tolist()
    assert read("kv_chunk_size_ptr", 1)[0] > 0  # divided by, whether or not keys are split
    # whatever the batch, the same tile; keys are never split, and nothing is merged
    assert numbers["cta_tile_q"] == 128 and numbers["split_kv"] == numbers["enable_cuda_graph"] == 0


@given(lengths=st.lists(st.integers(1, 700), min_size=1, max_size=6), page=st.sampled_from([16, 32, 64]), spare=st.integers(0, 5))
def test_a_row_of_the_table_read_to_its_end_has_the_length_of_its_sequence(lengths, page, spare):
    """The kernel takes (pages - 1) * page + last, in 32 bits; ``last`` is negative where the table is longer."""
    width = -(-max(lengths) // page) + spare
    last = torch.tensor(lengths) - (width - 1) * page
    assert ((np.uint32(width - 1) * np.uint32(page) + last.numpy().astype(np.int32).astype(np.uint32)) == lengths).all()


def test_logarithms_are_natural_for_the_backward():
    lse = torch.randn(5, 3)
    assert torch.allclose(flashinfer.natural(lse).t().exp(), 2.0**lse) and flashinfer.natural(lse).is_contiguous()


class Kernel:
    """FlashInfer's ``paged_run`` in float64: every program of the schedule computes its tile of packed rows, from the arguments alone."""

    @staticmethod
    def paged_run(workspace, schedule, numbers, q, k, v, start, page_start, pages, last_page, out, lse, mask, layout, window, pdl,
                  custom, custom_start, alibi, prefix, items, longest_item, k_scales, v_scales, cap, scale, rope_scale, theta, item_count):
        assert (mask, layout, window, pdl, cap, rope_scale) == (1, 0, -1, False, 0.0, 1.0)
        assert {custom, custom_start, alibi, prefix, items, longest_item, k_scales, v_scales} == {None}
        named = dict(zip(NAMES, numbers, strict=True))

        def read(name, count):
            return np.frombuffer(schedule.numpy().tobytes(), np.int32, count, named[f"{name}_offset"])

        count, group, page = named["padded_batch_size"], q.shape[1] // k.shape[2], k.shape[1]
        row_of = read("o_indptr", start.shape[0])
        for b, tile in zip(read("request_indices", count), read("qo_tile_indices", count), strict=True):
            first, stop = int(page_start[b]), int(page_start[b + 1])
            length, queries = (stop - first - 1) * page + int(last_page[b]), int(start[b + 1] - start[b])
            at = torch.arange(length)
            where = pages[first + at // page].long()
            keys, values = k[where, at % page].double(), v[where, at % page].double()  # [length, groups, D]
            for packed in range(tile * named["cta_tile_q"], (tile + 1) * named["cta_tile_q"]):
                query, inside = divmod(packed, group)
                if query >= queries:
                    break
                seen = length - queries + query + 1
                for g in range(k.shape[2]):
                    head = g * group + inside
                    scores = (keys[:seen, g] @ q[start[b] + query, head].double()) * scale
                    out[row_of[b] + query, head] = (scores.softmax(0) @ values[:seen, g]).to(out.dtype)
                    if lse is not None:
                        lse[row_of[b] + query, head] = scores.logsumexp(0) / np.log(2)


def test_the_kernel_is_compiled_without_fused_products_and_apart_from_flashinfers_own(monkeypatch):
    """With them a tile of masked keys scales a row's sums by something else than 1 (the provider's docstring)."""

    @dataclasses.dataclass
    class Spec:
        name: str
        extra_cuda_cflags: list[str]

        def build_and_load(self):
            return self

    stock = Spec("batch_prefill", ["-use_fast_math", "-O3"])
    jit = types.ModuleType("flashinfer.jit")
    jit.gen_batch_prefill_module = lambda backend, *args: stock
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.jit", jit)
    built = flashinfer._module.__wrapped__(64)
    assert built.extra_cuda_cflags == ["-use_fast_math", "-O3", "-fmad=false"] and built.name != stock.name
    assert stock == Spec("batch_prefill", ["-use_fast_math", "-O3"]), "FlashInfer's own kernel stays as it is"


def test_packed_and_paged_calls_mean_the_same_attention(monkeypatch):
    """What is handed over is right: starts, pages, a table that is longer than its sequences, strides of the cache, padding."""
    pytest.importorskip("triton")
    from vime.ops import reference
    from vime.ops.cuda import attention_flashinfer

    monkeypatch.setattr(flashinfer, "_module", lambda head_dim: Kernel)
    generator, lengths, page, dim = torch.Generator().manual_seed(0), (5, 33, 1, 18), 16, 8
    total = sum(lengths)
    q = torch.randn(total + 3, 6, dim, generator=generator)
    k, v = (torch.randn(total + 3, 2, dim, generator=generator) for _ in range(2))
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    exact = reference.attention_varlen(q[:total].double(), k[:total].double(), v[:total].double(), cu, 0.3)
    packed = attention_flashinfer.attention_varlen(q, k, v, cu, 0.3, True)
    assert float((packed[:total] - exact).abs().max()) < 1e-6 and not packed[total:].any()
    cache = torch.full((20, 2, page, 2, dim), float("nan"))
    table = torch.randperm(20, generator=generator)[:16].view(4, 4)  # a page more than the longest needs
    for b, n in enumerate(lengths):
        for i in range(n):
            cache[table[b, i // page], :, i % page] = torch.stack([k[cu[b] + i], v[cu[b] + i]])
    for new in ((5, 33, 1, 18), (1, 1, 1, 1), (2, 20, 1, 0)):
        rows = torch.cat([torch.arange(int(cu[b]) + n - m, int(cu[b]) + n) for b, (n, m) in enumerate(zip(lengths, new, strict=True))])
        start = torch.tensor([0, *new]).cumsum(0)
        padded = torch.cat([q[rows], torch.randn(2, 6, dim, generator=generator)])
        plan = attention_flashinfer.attention_plan(padded, cache, table, torch.tensor(lengths), start)
        for made in (plan, None):
            out = torch.zeros_like(padded)
            attention_flashinfer.attention_paged_into(out, padded, cache, table, torch.tensor(lengths), start, 0.3, made)
            assert float((out[:len(rows)] - exact[rows]).abs().max()) < 1e-6 and not out[len(rows):].any(), new


def test_the_backward_gets_what_the_forward_left_and_padding_has_no_gradient(monkeypatch):
    """The same backward for both kernels, with the log-sum-exp in its own form: natural, heads first."""
    pytest.importorskip("triton")
    from vime.ops.cuda import attention, attention_flashinfer

    monkeypatch.setattr(flashinfer, "_module", lambda head_dim: Kernel)
    q = torch.randn(9, 6, 8, requires_grad=True)
    k, v = (torch.randn(9, 2, 8, requires_grad=True) for _ in range(2))
    cu, given = torch.tensor([0, 4, 7], dtype=torch.int32), []
    monkeypatch.setattr(attention.fa3, "backward", lambda *args: given.append(args) or tuple(torch.ones_like(x) for x in args[1:4]))
    out = attention_flashinfer.attention_varlen(q, k, v, cu, 0.3, True)
    out.sum().backward()
    (do, *saved, o, lse, starts, longest, scale, causal), = given
    assert bool((do == 1).all()) and all(torch.equal(a, b) for a, b in zip(saved, (q, k, v), strict=True)) and torch.equal(o, out)
    assert torch.equal(starts, cu) and (longest, scale, causal) == (4, 0.3, True)
    scores = torch.einsum("hd,sd->hs", q[3], k[:4, 0])[:3] * 0.3  # the last row of the first sequence, heads of the first group
    torch.testing.assert_close(lse[:3, 3], scores.logsumexp(1))
    for x in (q, k, v):
        assert bool((x.grad[:7] == 1).all()) and not x.grad[7:].any()
