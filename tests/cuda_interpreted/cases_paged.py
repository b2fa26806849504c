"""The form of latent attention that a CUDA graph can repeat, against the one that lays sequences out on the host: bit for bit.

Run by ``test_interpreted.py`` under TRITON_INTERPRET=1.
"""
from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime import ops
from vime.ops import paged, registry
from vime.ops.cuda import cells, select, sparse, sparse_index
from vime.ops.cuda import paged as kernels
from vime.vllm import latent_device
from vime.vllm.latent_rows import RowFormat, sequences

RANK, ROPE, KEY, HEADS, INDEX_HEADS, BLOCK, TOP_K = 160, 16, 32, 3, 2, 4, 7
FUNCTIONS = {"index_scores_paged": sparse_index.index_scores_paged, "select": select.select, "write_cells": cells.write_cells,
             "list_cells": cells.list_cells, "sparse_attention_paged": kernels.sparse_attention_paged}


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "call", lambda op, function, like, *args: FUNCTIONS[function](*args))
    monkeypatch.setattr(registry, "resolve", lambda op, *_: types.SimpleNamespace(functions=FUNCTIONS))


def noise(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_a_choice_without_a_sort_is_the_choice_with_one(data: st.DataObject) -> None:
    """Ties, both zeros, infinities and lists of any length."""
    width, tokens = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 4))
    values = st.sampled_from([0.0, -0.0, 1.0, 1.0000001, -1.0, 3e38, 1e-45, float("inf"), float("-inf"), 7.5])
    scores = torch.tensor(data.draw(st.lists(st.lists(values, min_size=width, max_size=width), min_size=tokens, max_size=tokens)))
    counts = torch.tensor(data.draw(st.lists(st.integers(0, width), min_size=tokens, max_size=tokens)))
    top_k = data.draw(st.integers(1, 80))
    assert torch.equal(select.select(scores, counts, top_k), ops.select(scores, counts, top_k))


def test_a_token_that_is_none_chooses_nothing() -> None:
    assert select.select(noise(2, 9), torch.tensor([-1, 0]), 4).tolist() == [[-1] * 4] * 2


@pytest.mark.parametrize("rows, tokens", [(70, 5), (130, 2)])
def test_scores_by_block_table(rows: int, tokens: int) -> None:
    """Those of the keys in one piece, wherever the blocks lie and however wide a cell is."""
    q, k, w = noise(tokens, INDEX_HEADS, KEY), noise(rows, KEY, seed=1), noise(tokens, INDEX_HEADS, seed=2)
    whole = sparse_index.index_scores(q, k, w)
    blocks = -(-rows // BLOCK)
    place = torch.randperm(blocks + 3, generator=torch.Generator().manual_seed(3))[:blocks]
    cache = torch.full(((blocks + 3) * BLOCK, KEY + 11), float("nan"))
    at = torch.arange(rows)
    cache[place[at // BLOCK] * BLOCK + at % BLOCK, 5:5 + KEY] = k
    table = torch.zeros(3, blocks + 2, dtype=torch.int32)
    table[1, :blocks] = place.int()
    last = torch.tensor([rows - 1, *range(-1, tokens - 2)])
    got = sparse_index.index_scores_paged(q, cache[:, 5:5 + KEY], w, table, torch.ones(tokens, dtype=torch.int64), last, table.shape[1] * BLOCK, BLOCK)
    for t in range(tokens):
        n = int(last[t]) + 1
        assert torch.equal(got[t, :n], whole[t, :n]) and bool((got[t, n:] == float("-inf")).all())


def test_cells_are_written_by_slot() -> None:
    cache, new = torch.zeros(9, 14), noise(3, 11)
    cells.write_cells(new, cache, torch.tensor([7, -1, 0]))
    assert torch.equal(cache[[7, 0], :11], new[[0, 2]]) and int((cache != 0).any(1).sum()) == 2 and not cache[:, 11:].any()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(tokens=st.integers(1, 4), width=st.integers(1, 40), seed=st.integers(0, 99))
def test_cells_of_a_choice(tokens: int, width: int, seed: int) -> None:
    """By torch's own indexing: each position's cell, how many come before the first that is none, and what is counted."""
    g = torch.Generator().manual_seed(seed)
    table = torch.randint(1, 50, (tokens + 2, 12), generator=g, dtype=torch.int32)
    row = torch.randint(0, tokens + 2, (tokens,), generator=g)
    positions = torch.randint(0, 12 * BLOCK, (tokens, width), generator=g).int()
    positions[torch.rand(tokens, width, generator=g) < 0.1] = -1
    at = torch.randint(-1, 48, (tokens,), generator=g)
    own = torch.randint(-1, 4 * BLOCK, (tokens,), generator=g)
    counts = torch.tensor([5, 7])
    slots, n = cells.list_cells(positions, table, row, at, own, BLOCK, counts)
    listed = positions >= 0
    cell = table[row].gather(1, positions.clamp(min=0).long() // BLOCK) * BLOCK + positions % BLOCK
    assert torch.equal(slots, torch.where(listed, cell, -1)) and torch.equal(n, sparse.lengths(positions, 12 * BLOCK))
    real = own >= BLOCK
    assert counts.tolist() == [5 + int((at + 1)[real].sum()), 7 + int((at + 1 - n)[real].sum())]
    again, m = cells.list_cells(positions, table, row, at, own, BLOCK, None)
    assert torch.equal(again, slots) and torch.equal(m, n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_cells_are_read_as_the_format_says(dtype: torch.dtype) -> None:
    form = RowFormat(RANK, ROPE, KEY, dtype, fp8=True)
    packed = form.pack((noise(12, RANK + ROPE) * noise(12, 1, seed=4).exp()).to(dtype), noise(12, KEY, seed=5).to(dtype))
    cache = torch.zeros(20, form.width + 8, dtype=torch.uint8)
    cache[3:15, :form.width] = packed
    slots, counts = torch.tensor([[3, 9, 14, -1], [7, -1, -1, -1]]), torch.tensor([3, 1], dtype=torch.int32)
    got = cells.dequantised_rows(cache, slots, counts, RANK, ROPE, dtype).view(2, 4, -1)
    want = form.rows(packed)
    for found, wanted in ((got[0, :3], want[[0, 6, 11]]), (got[1, 0], want[4])):
        if dtype is torch.float32:
            assert torch.equal(found, wanted)
        else:  # the interpreter cuts off what a device rounds (``tests/cuda/test_graphs_moe.py``)
            torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-7, atol=0)
    assert torch.equal(form.key_view(cache)[3:15], form.keys(packed))


@dataclasses.dataclass
class Layer:
    """What :func:`latent_device.attend` asks of a layer."""

    m: Any
    format: RowFormat
    kv_cache: torch.Tensor
    counts_2: torch.Tensor | None = None
    kept: torch.Tensor | None = None

    def choice(self, own_TK: torch.Tensor | None, step: Any) -> torch.Tensor:
        self.kept = own_TK if own_TK is not None else self.kept
        assert self.kept is not None
        return self.kept


def on_the_host(layer: Layer, step: Any, query: torch.Tensor, row: torch.Tensor, index: Any) -> torch.Tensor:
    """As an eager engine does it, with the same kernels."""
    size, form = layer.kv_cache.shape[1], layer.format
    slots = step.slot_mapping_T[:len(row)]
    layer.kv_cache[slots // size, slots % size, :form.width] = form.pack(row, index[1])
    bounds = step.query_start_loc_B1.tolist()
    layout = sequences(bounds, step.seq_lens_B.tolist(), step.block_table_BM, size)
    found = layer.kv_cache[layout.block_S, layout.offset_S][:, :form.width]
    if layer.m.indexer is None:
        rows = ops.causal_index(layout.start_T, layout.position_T)
    else:
        chosen = torch.full((len(row), TOP_K), -1, dtype=torch.int32)
        for start, length, (begin, end) in zip(layout.starts, layout.lengths, layout.queries, strict=True):
            scores = sparse_index.index_scores(index[0][begin:end], form.keys(found)[start:start + length], index[2][begin:end])
            part = ops.select(scores, layout.position_T[begin:end] + 1, TOP_K)
            chosen[begin:end, :part.shape[1]] = part
        rows = torch.where(chosen >= 0, chosen + layout.start_T[:, None], -1).to(torch.int32)
    return sparse.sparse_attention(query, form.rows(found), rows, RANK, 0.3)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("indexer", [False, True])
@pytest.mark.parametrize("news", [(1, 1, 1), (6, 1, 3), (9,)])
def test_a_step_on_the_device_is_the_step_on_the_host(news: tuple[int, ...], indexer: bool, fp8: bool) -> None:
    """Prompts, chunks and decodes in one step, with and without tokens that only pad it: the same output and the same cache."""
    g = torch.Generator().manual_seed(sum(news))
    before = torch.randint(0, 9, (len(news),), generator=g)
    lengths = before + torch.tensor(news)
    form = RowFormat(RANK, ROPE, KEY if indexer else 0, torch.float32, fp8)
    pages = torch.randperm(30, generator=g)[:5 * len(news)].view(len(news), 5) + 1
    cache = form.pack(noise(31 * BLOCK, RANK + ROPE, seed=7), noise(31 * BLOCK, KEY, seed=8) if indexer else None).view(31, BLOCK, -1)
    spec = types.SimpleNamespace(indexer=types.SimpleNamespace(top_k=TOP_K) if indexer else None, kv_rank=RANK, scale=0.3)
    position = torch.cat([torch.arange(int(b), int(n)) for b, n in zip(before, lengths, strict=True)])
    sequence = torch.repeat_interleave(torch.arange(len(news)), torch.tensor(news))
    slots = pages[sequence, position // BLOCK] * BLOCK + position % BLOCK
    total, outputs, caches = len(position), [], []
    for extra in (None, 0, 3):  # on the host; as it is; padded to a larger step, as a graph's is
        pad = extra or 0

        def rows(*size: int, seed: int = 0, pad: int = pad) -> torch.Tensor:
            return torch.cat([noise(total, *size, seed=seed), noise(pad, *size, seed=99)])

        step = types.SimpleNamespace(
            query_start_loc_B1=torch.tensor([0, *torch.tensor(news).cumsum(0).tolist(), *[total] * pad], dtype=torch.int32),
            seq_lens_B=torch.cat([lengths.int(), torch.zeros(pad, dtype=torch.int32)]),
            block_table_BM=torch.cat([pages.int(), torch.zeros(pad, 5, dtype=torch.int32)]),
            slot_mapping_T=torch.cat([slots, torch.full((pad,), -1)]), tokens=None)
        layer = Layer(spec, form, cache.clone())
        index = (rows(INDEX_HEADS, KEY, seed=2), rows(KEY, seed=3), rows(INDEX_HEADS, seed=4)) if indexer else None
        call = on_the_host if extra is None else lambda *a: latent_device.attend(a[0], a[1], *a[2:], "step")
        given = index or (None, None, None) if extra is None else index
        out = call(layer, step, rows(HEADS, RANK + ROPE), rows(RANK + ROPE, seed=1), given)
        assert not out[total:].any()
        outputs.append(out[:total])
        caches.append(layer.kv_cache)
        if extra is not None and indexer:
            assert layer.counts_2.tolist() == [int((position + 1).sum()), int((position + 1 - TOP_K).clamp(min=0).sum())]
    assert all(torch.equal(outputs[0], out) for out in outputs[1:])
    assert all(torch.equal(caches[0], one) for one in caches[1:])


def test_a_score_that_is_no_number_is_refused() -> None:
    cache = torch.full((8, KEY), float("nan"))
    with pytest.raises(ValueError, match="row 1 hold NaN"):
        paged.choose(noise(2, 1, KEY), cache, torch.ones(2, 1), torch.tensor([[0, 1]], dtype=torch.int32), torch.zeros(2, dtype=torch.int64),
                     torch.tensor([-1, 3]), BLOCK, 3)
