"""Proof of the attention on this device: one sequence alone, packed, paged, in chunks, decoded; forward and backward."""
from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import torch

from vime import ops
from vime.ops import reference
from vime.ops.cuda.proof import Sweep
from vime.ops.prove_types import CaseResult, relative_error
from vime.ops.providers import fa3

LENGTHS = (3, 1025, 17, 64, 65, 128, 129, 300, 1, 511, 4096, 33, 777, 2, 250, 1024)
CHUNKS = (1, 2, 5, 8, 16, 63, 64, 100, 128, 129, 512, 2048)
PAGES = (16, 32, 64)


def paged_copy(k_TGD: torch.Tensor, v_TGD: torch.Tensor, lengths: tuple[int, ...], page: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache that holds the sequences in shuffled pages, NaN where nothing was written: (kv_cache, block_table_BM)."""
    device = k_TGD.device
    pages = [-(-n // page) for n in lengths]
    spare = sum(pages) + 7
    order = torch.randperm(spare)[: sum(pages)].to(torch.int32)
    table_BM = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    slots, used = [], 0
    for b, (n, count) in enumerate(zip(lengths, pages, strict=True)):
        table_BM[b, :count] = order[used : used + count]
        used += count
        at = torch.arange(n)
        slots.append(table_BM[b, at // page].long() * page + at % page)
    shape = ops.kv_cache_shape(spare, page, k_TGD.shape[1], k_TGD.shape[2], k_TGD.dtype, device)
    cache = torch.full(shape, float("nan"), dtype=k_TGD.dtype, device=device)
    ops.kv_cache_write(k_TGD, v_TGD, cache, torch.cat(slots).to(device))
    return cache, table_BM.to(device)


def starts(lengths: tuple[int, ...] | list[int]) -> torch.Tensor:
    """int32 [B + 1]: where each sequence begins."""
    return torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)


def attention(sweep: Sweep, quick: bool = False) -> Iterator[CaseResult]:
    """Every way to compute a row against its sequence alone."""
    shape, lengths = sweep.shape, LENGTHS[:8] if quick else LENGTHS
    heads, groups, dim, total = shape.heads, shape.groups, shape.head_dim, sum(lengths)
    q, k, v = sweep.data(total, heads, dim), sweep.data(total, groups, dim), sweep.data(total, groups, dim)
    scale, cu = dim**-0.5, starts(lengths)
    bounds = [0, *itertools.accumulate(lengths)]
    case = f"{heads}/{groups}x{dim}, lengths {min(lengths)} to {max(lengths)}"
    alone = torch.cat([ops.attention_varlen(q[a:b], k[a:b], v[a:b], starts([b - a]), scale) for a, b in itertools.pairwise(bounds)])
    result = sweep.case("attention", "attention_varlen", f"{case}, packed against alone")
    result.rows_expected = total
    result.compare(ops.attention_varlen(q, k, v, cu, scale), alone, {"form": "packed"})
    short = bounds[8]
    exact = reference.attention_varlen(q[:short].double(), k[:short].double(), v[:short].double(), cu[:9], scale)
    result.error = relative_error(alone[:short], exact)
    yield result
    for page in PAGES:
        cache, table_BM = paged_copy(k, v, lengths, page)
        for chunk in (max(lengths), *((1, 8) if quick and page > 16 else CHUNKS[:4] if quick or page > 16 else CHUNKS)):
            started = time.perf_counter()
            result = sweep.case("attention", "attention_paged", f"{case}, pages of {page}, chunks of {chunk}")
            for start in _places(max(lengths), chunk):
                active = [b for b, n in enumerate(lengths) if n > start]
                stops = [min(lengths[b], start + chunk) for b in active]
                at = torch.cat([torch.arange(bounds[b] + start, bounds[b] + stop) for b, stop in zip(active, stops, strict=True)]).cuda()
                used, first = torch.tensor(stops, device="cuda", dtype=torch.int32), starts([s - start for s in stops])
                run = _as_the_engine_does if sweep.subject == "vime" else _stock
                result.rows_expected += len(at)
                result.compare(run(q[at], cache, table_BM[active], used, first, scale), alone[at], {"chunk": chunk, "position": start, "page": page})
            result.seconds = time.perf_counter() - started
            yield result


def _places(longest: int, chunk: int) -> list[int]:
    """Every chunk; where there are very many, the early ones and a spread of later ones."""
    every = range(0, longest, chunk)
    return list(every) if len(every) <= 200 else sorted({*range(0, 160, chunk), *range(0, longest, 61 * chunk)})


def _as_the_engine_does(q_THD: torch.Tensor, cache: torch.Tensor, table_BM: torch.Tensor, used_B: torch.Tensor, first_B1: torch.Tensor,
                        scale: float) -> torch.Tensor:
    """Into a given tensor, by a plan that was made before."""
    plan = ops.attention_plan(q_THD, cache, table_BM, used_B, first_B1)
    return ops.attention_paged_into(torch.empty_like(q_THD), q_THD, cache, table_BM, used_B, first_B1, scale, plan)


def _stock(q_THD: torch.Tensor, cache: torch.Tensor, table_BM: torch.Tensor, used_B: torch.Tensor, first_B1: torch.Tensor, scale: float) -> torch.Tensor:
    longest = int((first_B1[1:] - first_B1[:-1]).max())
    return fa3.stock_paged(q_THD, cache[:, 0], cache[:, 1], first_B1, longest, int(used_B.max()), scale, used_B, table_BM)


def gradients(run: Callable[..., torch.Tensor], leaves: list[torch.Tensor], upstream: torch.Tensor, cu: torch.Tensor, scale: float) -> list[torch.Tensor]:
    """Gradients of q, k, v."""
    with torch.enable_grad():
        leaves = [x.detach().clone().requires_grad_() for x in leaves]
        return list(torch.autograd.grad(run(*leaves, cu, scale), leaves, upstream))


def attention_backward(sweep: Sweep, quick: bool = False) -> Iterator[CaseResult]:
    """Gradients are the same bits on every rerun and near float64."""
    shape, lengths = sweep.shape, (3, 300, 64, 17) if quick else (3, 300, 64, 513, 1025, 17)
    total, dim = sum(lengths), shape.head_dim
    leaves = [sweep.data(total, n, dim) for n in (shape.heads, shape.groups, shape.groups)]
    upstream, cu, scale = sweep.data(total, shape.heads, dim), starts(lengths), dim**-0.5
    result = sweep.case("attention", "attention_backward", f"{shape.heads}/{shape.groups}x{dim}, reruns")
    want = gradients(ops.attention_varlen, leaves, upstream, cu, scale)
    for rerun in range(4):
        for name, got, first in zip("qkv", gradients(ops.attention_varlen, leaves, upstream, cu, scale), want, strict=True):
            result.rows_expected += total
            result.compare(got, first, {"rerun": rerun, "gradient": name})
    exact = gradients(reference.attention_varlen, [x.double() for x in leaves], upstream.double(), cu, scale)
    result.error = max(relative_error(a, b) for a, b in zip(want, exact, strict=True))
    yield result
