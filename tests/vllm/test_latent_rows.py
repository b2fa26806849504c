"""Cells of the latent cache, the layout of a step, and grouped experts, against the plainest form of each."""
from __future__ import annotations

import os
import socket

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment import bits
from vime import ops
from vime.vllm.expert_parallel import spread_rows
from vime.vllm.experts import expert_rows
from vime.vllm.latent_rows import RowFormat, sequences

DTYPES = (torch.float32, torch.bfloat16)


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    verdict = bits.judge(a, b)
    assert verdict.green, verdict.summary()


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(1, 9), rank=st.sampled_from([8, 128, 132, 256, 512]), rope=st.sampled_from([4, 16, 64]),
       index=st.sampled_from([0, 32, 128]), dtype=st.sampled_from(DTYPES), fp8=st.booleans(), seed=st.integers(0, 999))
def test_a_cell_gives_back_what_the_contract_says(tokens, rank, rope, index, dtype, fp8, seed) -> None:
    g = torch.Generator().manual_seed(seed)
    form = RowFormat(rank, rope, index, dtype, fp8)
    row, key = (torch.randn(tokens, n, generator=g).mul(3).to(dtype) for n in (rank + rope, index))
    cells = form.pack(row, key if index else None)
    assert cells.shape == (tokens, form.width) and cells.dtype == form.cache_dtype
    same(form.rows(cells), ops.through_fp8_cache(row, rank) if fp8 else row)
    if index:
        same(form.keys(cells), key)
    if fp8:
        assert form.width == rank + 4 * -(-rank // 128) + (rope + index) * dtype.itemsize  # stored as bytes, not as rounded rows
        scales = cells[:, rank:rank + 4].clone().view(torch.float32)
        spoilt = cells.clone()
        spoilt[:, rank:rank + 4] = (scales * 2).view(torch.uint8)
        assert not torch.equal(form.rows(spoilt), form.rows(cells))


@settings(max_examples=30, deadline=None)
@given(data=st.data(), size=st.sampled_from([1, 4, 16]))
def test_a_step_is_laid_out_sequence_by_sequence(data, size) -> None:
    news = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    lengths = [n + data.draw(st.integers(0, 20)) for n in news]
    pages = [-(-length // size) for length in lengths]
    free = data.draw(st.permutations(range(sum(pages) + 3)))
    table = torch.zeros(len(news), max(pages), dtype=torch.int32)
    for r, n in enumerate(pages):
        table[r, :n] = torch.tensor([free.pop() for _ in range(n)])
    bounds = [0, *torch.tensor(news).cumsum(0).tolist()]
    found = sequences(bounds, lengths, table, size)
    row = 0
    for r, length in enumerate(lengths):
        assert found.starts[r] == row and found.queries[r] == (bounds[r], bounds[r + 1])
        for p in range(length):
            assert (int(found.block_S[row]), int(found.offset_S[row])) == (int(table[r, p // size]), p % size)
            row += 1
        for t in range(bounds[r], bounds[r + 1]):
            assert int(found.start_T[t]) == found.starts[r] and int(found.position_T[t]) == length - (bounds[r + 1] - t)


def experts_of(seed: int, dtype: torch.dtype, tokens: int, count: int, slots: int) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(count, generator=g)[:slots] for _ in range(tokens)]) if tokens else torch.empty(0, slots, dtype=torch.int64)
    return (*(torch.randn(*shape, generator=g).to(dtype) for shape in ((tokens, 24), (count, 32, 24), (count, 24, 16))), ids)


@settings(max_examples=20, deadline=None)
@given(tokens=st.integers(0, 40), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 999))
def test_a_row_does_not_see_how_many_rows_its_expert_got(tokens, dtype, seed) -> None:
    x, up, down, ids = experts_of(seed, dtype, tokens, 6, 3)
    rows = expert_rows(x, ids, up, down)
    for t in range(tokens):
        for k in range(3):
            e = int(ids[t, k])
            same(rows[t, k][None], ops.linear(ops.silu_and_mul(ops.linear(x[t:t + 1], up[e])), down[e]))


def spread(rank: int, port: int, dtype: torch.dtype, counts: list[int], out: torch.Tensor) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    local = torch.tensor([[0, 1, 2, -1, -1, -1], [-1, -1, -1, 0, 1, 2]])
    for seed, count in enumerate(counts):
        x, up, down, ids = experts_of(seed, dtype, count * 2 + 1, 6, 3)
        mine = slice(0, count) if rank == 0 else slice(count, None)  # uneven, and none at all on rank 0 for count 0
        half = slice(3 * rank, 3 * rank + 3)
        rows = spread_rows(x[mine], ids[mine], local, dist.group.WORLD, lambda y, e, u=up[half], d=down[half]: expert_rows(y, e[:, None], u, d)[:, 0])
        out[rank, seed] = int(torch.equal(rows.view(torch.uint8), expert_rows(x, ids, up, down)[mine].contiguous().view(torch.uint8)))
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", DTYPES)
def test_spread_experts_give_the_rows_of_one_rank(dtype) -> None:
    import torch.multiprocessing as mp

    counts = [0, 1, 5, 17]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    out = torch.full((2, len(counts)), -1, dtype=torch.int64).share_memory_()
    threads, _ = torch.get_num_threads(), os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)  # a forked process cannot use this one's threads
    try:
        mp.start_processes(spread, args=(port, dtype, counts, out), nprocs=2, start_method="fork")
    finally:
        torch.set_num_threads(threads)
    assert out.tolist() == [[1] * len(counts)] * 2
