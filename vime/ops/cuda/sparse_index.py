"""Scores of the indexer on CUDA, in Triton: one program for a token and a tile of keys, heads added one by one.

A library GEMM may take another kernel, and with it another order along the dimension, when the number of keys is another;
the trainer scores a token against its whole sequence and the engine against what there is of it so far. Here a score is
made from its own query and key only, by code that is compiled once for a shape of the indexer.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from vime.ops.cuda.tensors import dense, next_power_of_2

_TILE = 64


@triton.jit(do_not_specialize=["S"])
def _scores(q_ptr, k_ptr, w_ptr, out_ptr, dim_scale, head_scale, S, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
            TILE: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    d = tl.arange(0, BD)
    k = tl.load(k_ptr + s[:, None] * D + d[None, :], mask=(s < S)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for h in range(H):
        q = tl.load(q_ptr + (t * H + h) * D + d, mask=d < D, other=0.0).to(tl.float32)
        weight = tl.load(w_ptr + t * H + h).to(tl.float32) * head_scale
        dot = tl.sum(k * q[None, :], axis=1) * dim_scale
        total += tl.where(dot < 0.0, 0.0, dot) * weight  # NaN stays NaN, so that the choice can refuse it
    tl.store(out_ptr + t * S + s, total, mask=s < S)


def index_scores(q_THD: torch.Tensor, k_SD: torch.Tensor, weights_TH: torch.Tensor) -> torch.Tensor:
    """As :func:`vime.ops.index_scores`. No gradient: the indexer is frozen."""
    (tokens, heads, dim), rows = q_THD.shape, k_SD.shape[0]
    out_TS = torch.empty(tokens, rows, dtype=torch.float32, device=q_THD.device)
    if out_TS.numel():
        _scores[(tokens, triton.cdiv(rows, _TILE))](
            dense(q_THD.detach()), dense(k_SD.detach()), dense(weights_TH.detach()), out_TS, dim**-0.5, heads**-0.5, rows, H=heads, D=dim,
            BD=max(16, next_power_of_2(dim)), TILE=_TILE, num_warps=4, enable_fp_fusion=False)
    return out_TS
