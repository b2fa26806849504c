"""Proof of the attention on this device: one sequence alone, packed, paged, in chunks, decoded; forward and backward."""
from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from vime import ops
from vime.ops import reference
from vime.ops.cuda.proof import Finding, Tally, relative_error
from vime.ops.cuda.shapes import ModelShape

LENGTHS = (3, 1025, 17, 64, 65, 128, 129, 300, 1, 511, 4096, 33, 777, 2, 250, 1024)
CHUNKS = (1, 2, 5, 8, 16, 63, 64, 100, 128, 129, 512, 2048)
PAGE = 16


def paged_copy(k_TGD: torch.Tensor, v_TGD: torch.Tensor, lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache that holds the sequences in shuffled pages: (kv_cache, block_table_BM)."""
    device = k_TGD.device
    pages = [-(-n // PAGE) for n in lengths]
    order = torch.randperm(sum(pages) + 7)[: sum(pages)].to(torch.int32)
    table_BM = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    slots, used = [], 0
    for b, (n, count) in enumerate(zip(lengths, pages, strict=True)):
        table_BM[b, :count] = order[used : used + count]
        used += count
        at = torch.arange(n)
        slots.append(table_BM[b, at // PAGE].long() * PAGE + at % PAGE)
    shape = ops.kv_cache_shape(sum(pages) + 7, PAGE, k_TGD.shape[1], k_TGD.shape[2], k_TGD.dtype, device)
    cache = torch.full(shape, 1e4, dtype=k_TGD.dtype, device=device)
    ops.kv_cache_write(k_TGD, v_TGD, cache, torch.cat(slots).to(device))
    return cache, table_BM.to(device)


def _starts(lengths: tuple[int, ...] | list[int], device: torch.device | str) -> torch.Tensor:
    total = torch.tensor([0, *lengths]).cumsum(0)
    return total.to(device, torch.int32)


def attention(shape: ModelShape, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Iterator[Finding]:
    """Every way to compute a row against the sequence alone."""
    heads, groups, dim, total = shape.heads, shape.groups, shape.head_dim, sum(LENGTHS)
    q, k, v = (torch.randn(total, n, dim, device=device, dtype=dtype) for n in (heads, groups, groups))
    scale, cu = dim**-0.5, _starts(LENGTHS, device)
    bounds = cu.tolist()
    case = f"{shape.name} {heads}/{groups}x{dim}"
    alone = torch.cat([
        ops.attention_varlen(q[a:b], k[a:b], v[a:b], _starts([b - a], device), scale) for a, b in itertools.pairwise(bounds)
    ])
    tally = Tally()
    tally.compare("packed", ops.attention_varlen(q, k, v, cu, scale), alone)
    short = bounds[8]
    exact = reference.attention_varlen(q[:short].double(), k[:short].double(), v[:short].double(), cu[:9], scale)
    yield tally.finish("attention", f"{case} packed against alone", dtype, relative_error(alone[:short], exact))

    cache, table_BM = paged_copy(k, v, LENGTHS)
    lengths = torch.tensor(LENGTHS)
    for chunk in (max(LENGTHS), *CHUNKS):
        tally = Tally()
        starts = range(0, max(LENGTHS), chunk)
        if len(starts) > 200:  # decode: all early positions, then a spread of later ones
            starts = sorted({*range(0, 160, chunk), *range(0, max(LENGTHS), 61 * chunk)})
        for start in starts:
            rows = [b for b, n in enumerate(LENGTHS) if n > start]
            stops = [min(LENGTHS[b], start + chunk) for b in rows]
            where = torch.cat([torch.arange(bounds[b] + start, bounds[b] + stop) for b, stop in zip(rows, stops, strict=True)]).to(device)
            got = ops.attention_paged(q[where], cache, table_BM[rows], torch.tensor(stops, device=device, dtype=torch.int32),
                                      _starts([s - start for s in stops], device), scale)
            tally.compare(f"chunk {chunk} at position {start}", got, alone[where])
        yield tally.finish("attention", f"{case} paged, chunks of {chunk}", dtype)

    tally = Tally()
    for b, n in enumerate(LENGTHS):  # decode of the last token, batch of one
        last = bounds[b] + n - 1
        got = ops.attention_paged(q[last : last + 1], cache, table_BM[b : b + 1, : -(-n // PAGE)].contiguous(),
                                  lengths[b : b + 1].to(device, torch.int32), _starts([1], device), scale)
        tally.compare(f"decode of sequence {b} alone", got, alone[last : last + 1])
    yield tally.finish("attention", f"{case} decode, batch of one", dtype)


def attention_backward(shape: ModelShape, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Iterator[Finding]:
    """Gradients: bitwise repeatable, a sequence alone equal to the same one packed, near float64."""
    lengths = (3, 300, 64, 513, 1025, 17)
    heads, groups, dim = shape.heads, shape.groups, shape.head_dim
    leaves = [torch.randn(sum(lengths), n, dim, device=device, dtype=dtype) for n in (heads, groups, groups)]
    upstream = torch.randn(sum(lengths), heads, dim, device=device, dtype=dtype)
    scale, cu = dim**-0.5, _starts(lengths, device)
    bounds = cu.tolist()

    def gradients(run, tensors, do, starts) -> list[torch.Tensor]:
        tensors = [t.clone().requires_grad_() for t in tensors]
        run(*tensors, starts, scale).backward(do)
        return [t.grad for t in tensors]

    want = gradients(ops.attention_varlen, leaves, upstream, cu)
    tally = Tally()
    for rerun in range(4):
        for name, got, first in zip("qkv", gradients(ops.attention_varlen, leaves, upstream, cu), want, strict=True):
            tally.compare(f"rerun {rerun}, d{name}", got, first)
    exact = gradients(reference.attention_varlen, [t.double() for t in leaves], upstream.double(), cu)
    error = max(relative_error(a, b) for a, b in zip(want, exact, strict=True))
    yield tally.finish("attention", f"{shape.name} backward, reruns", dtype, error)
    tally = Tally()
    for a, b in itertools.pairwise(bounds):
        one = gradients(ops.attention_varlen, [t[a:b] for t in leaves], upstream[a:b], _starts([b - a], device))
        for name, got, packed in zip("qkv", one, want, strict=True):
            tally.compare(f"sequence of {b - a} alone, d{name}", got, packed[a:b])
    yield tally.finish("attention", f"{shape.name} backward, alone against packed", dtype)
