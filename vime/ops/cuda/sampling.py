"""Batch-invariant sampling on CUDA: Gumbel-max with a counter for a generator.

    id = argmax_v (logits[v] / temperature + g(seed, position, v)),   g = -log(-log(1 - u))

``u`` comes from Philox4x32-10 (Salmon et al., SC'11): word ``v % 4`` of counter ``(v // 4, position, 0)`` under the key
``seed``. Nothing is drawn from a stream, so neither batch, nor order, nor a restart changes a token. A maximum is exact
in any order: the vocabulary is cut into chunks, one program each. Lowest id wins ties; temperature 0 is greedy.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from vime.ops.cuda.tensors import dense, next_power_of_2

IMPLEMENTATION = "cuda/sampling/triton-philox@1"
_CHUNK = 4096
_SORTED_BLOCK = 1024


@triton.jit
def _gumbel(bits):
    """-log(-log(1 - u)), u = (bits + 1/2) / 2^32. log1p by its series where 1 - u would round."""
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0)))
    e = tl.where(u < 1e-3, series, -tl.log(1.0 - u))
    return -tl.log(e)


@triton.jit
def _scaled(x, temperature):
    """(logits / temperature, whether the row is greedy)."""
    greedy = temperature == 0.0
    return tl.div_rn(x, tl.where(greedy, 1.0, temperature)), greedy


@triton.jit
def _chunk_best(
    x_ptr, seed_ptr, position_ptr, temperature_ptr, best_ptr, best_id_ptr,
    V: tl.constexpr, S: tl.constexpr, CHUNK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1)
    cols = s * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + t * V + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
    x, greedy = _scaled(x, tl.load(temperature_ptr + t))
    position = tl.load(position_ptr + t)
    group = (s * (CHUNK // 4) + tl.arange(0, CHUNK // 4)).to(tl.uint32)
    zero = group * 0
    r0, r1, r2, r3 = tl.philox(
        tl.load(seed_ptr + t).to(tl.uint64), group, zero + position.to(tl.uint32), zero + (position >> 32).to(tl.uint32), zero
    )
    bits = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), [CHUNK])
    score = tl.where(greedy, x, x + _gumbel(bits))
    best = tl.max(score, axis=0)
    tl.store(best_ptr + t * S + s, best)
    tl.store(best_id_ptr + t * S + s, tl.min(tl.where((score == best) & (cols < V), cols, V - 1), axis=0))


@triton.jit
def _row_best(best_ptr, best_id_ptr, out_ptr, V: tl.constexpr, S: tl.constexpr, BS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BS)
    score = tl.load(best_ptr + t * S + s, mask=s < S, other=float("-inf"))
    ids = tl.load(best_id_ptr + t * S + s, mask=s < S, other=V - 1)
    best = tl.max(score, axis=0)
    tl.store(out_ptr + t, tl.min(tl.where(score == best, ids, V - 1), axis=0).to(tl.int64))


@triton.jit
def _sorted_best(
    x_ptr, ids_ptr, seed_ptr, position_ptr, temperature_ptr, top_k_ptr, top_p_ptr, out_ptr,
    V: tl.constexpr, BLOCK: tl.constexpr,
):
    """Walks a row by falling logit: mass within the top k first, then the best score within the mass p."""
    t = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + t)
    top_k = tl.load(top_k_ptr + t)
    top_k = tl.where(top_k <= 0, V, tl.minimum(top_k, V))
    top_p = tl.load(top_p_ptr + t)
    top_p = tl.where(top_p >= 1.0, float("inf"), tl.maximum(top_p, 1e-30))
    seed = tl.load(seed_ptr + t).to(tl.uint64)
    position = tl.load(position_ptr + t)
    lanes = tl.arange(0, BLOCK)
    top, greedy = _scaled(tl.load(x_ptr + t * V).to(tl.float32), temperature)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, V, BLOCK):
        rank = start + lanes
        x = tl.load(x_ptr + t * V + rank, mask=rank < V, other=float("-inf")).to(tl.float32)
        x, _ = _scaled(x, temperature)
        total += tl.where(rank < top_k, tl.exp(x - top), 0.0)
    mass = tl.sum(total, axis=0)
    before = tl.full([], 0.0, tl.float32)
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], V, tl.int64)
    for start in range(0, V, BLOCK):
        rank = start + lanes
        x = tl.load(x_ptr + t * V + rank, mask=rank < V, other=float("-inf")).to(tl.float32)
        x, _ = _scaled(x, temperature)
        p = tl.where(rank < top_k, tl.div_rn(tl.exp(x - top), mass), 0.0)
        reached = before + tl.cumsum(p, axis=0) - p
        keep = (rank < top_k) & (reached < top_p)
        ids = tl.load(ids_ptr + t * V + rank, mask=rank < V, other=V)
        group = (ids // 4).to(tl.uint32)
        zero = group * 0
        r0, r1, r2, r3 = tl.philox(
            seed, group, zero + position.to(tl.uint32), zero + (position >> 32).to(tl.uint32), zero
        )
        word = ids % 4
        bits = tl.where(word < 2, tl.where(word == 0, r0, r1), tl.where(word == 2, r2, r3))
        score = tl.where(keep, tl.where(greedy, x, x + _gumbel(bits)), float("-inf"))
        block_best = tl.max(score, axis=0)
        block_id = tl.min(tl.where(keep & (score == block_best), ids, V), axis=0)
        better = (block_best > best) | ((block_best == best) & (block_id < best_id))
        best_id = tl.where(better, block_id, best_id)
        best = tl.where(better, block_best, best)
        before += tl.sum(p, axis=0)
    tl.store(out_ptr + t, tl.minimum(best_id, V - 1).to(tl.int64))


def sample(
    logits_TV: torch.Tensor, seed_T: torch.Tensor, position_T: torch.Tensor, temperature_T: torch.Tensor,
    top_k_T: torch.Tensor | None = None, top_p_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """int64 ids [T]. logits: fp32 or bf16 [T, V]; seed, position, top_k: int64 [T]; temperature, top_p: fp32 [T]."""
    logits_TV, seed_T, position_T, temperature_T = (dense(x) for x in (logits_TV, seed_T, position_T, temperature_T))
    T, V = logits_TV.shape
    out_T = torch.empty(T, dtype=torch.int64, device=logits_TV.device)
    if T == 0:
        return out_T
    if top_k_T is None and top_p_T is None:
        S = triton.cdiv(V, _CHUNK)
        best_TS = torch.empty(T, S, dtype=torch.float32, device=logits_TV.device)
        best_id_TS = torch.empty(T, S, dtype=torch.int32, device=logits_TV.device)
        _chunk_best[(T, S)](
            logits_TV, seed_T, position_T, temperature_T, best_TS, best_id_TS, V=V, S=S, CHUNK=_CHUNK,
            num_warps=8, enable_fp_fusion=False,
        )
        _row_best[(T,)](best_TS, best_id_TS, out_T, V=V, S=S, BS=next_power_of_2(S), num_warps=1)
        return out_T
    if top_k_T is None:
        top_k_T = torch.zeros_like(seed_T)
    if top_p_T is None:
        top_p_T = torch.ones_like(temperature_T)
    sorted_TV, ids_TV = torch.sort(logits_TV, dim=-1, descending=True, stable=True)
    _sorted_best[(T,)](
        sorted_TV, ids_TV, seed_T, position_T, temperature_T, dense(top_k_T), dense(top_p_T), out_T,
        V=V, BLOCK=_SORTED_BLOCK, num_warps=8, enable_fp_fusion=False,
    )
    return out_T
