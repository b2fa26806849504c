"""Scores of the indexer on CUDA, in Triton: one program for a token and a tile of keys, heads added one by one.

A library GEMM may take another kernel, and with it another order along the dimension, when the number of keys is another;
the trainer scores a token against its whole sequence and the engine against what there is of it so far. Here a score is
made from its own query and key only, by code that is compiled once for a shape of the indexer: keys are found through a table
of blocks, of which a plain list of keys is one, and no stride or length is compiled in.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from vime.ops.cuda.tensors import dense, next_power_of_2

_TILE, _UNROLL = 32, 8


@triton.jit(do_not_specialize=["width", "block", "key_stride", "table_stride"],
            do_not_specialize_on_alignment=["k_ptr", "table_ptr", "row_ptr", "position_ptr"])
def _scores(q_ptr, k_ptr, w_ptr, table_ptr, row_ptr, position_ptr, out_ptr, dim_scale, head_scale, width, block, key_stride, table_stride,
            H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, TILE: tl.constexpr,
            UNROLL: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1).to(tl.int64) * TILE
    s = first + tl.arange(0, TILE)
    last = tl.load(position_ptr + t)
    seen = s <= last
    total = tl.zeros([TILE], tl.float32)
    if first <= last:
        d = tl.arange(0, BD)
        table = table_ptr + tl.load(row_ptr + t) * table_stride
        cell = tl.load(table + s // block, mask=seen, other=0).to(tl.int64) * block + s % block
        k = tl.load(k_ptr + cell[:, None] * key_stride + d[None, :], mask=seen[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        d_SD = d[None, :] + (s * 0)[:, None]  # each thread reads what it multiplies: shared over rows, q would cross all warps at each head
        for h in tl.range(0, H, loop_unroll_factor=UNROLL):
            q = tl.load(q_ptr + (t * H + h) * D + d_SD, mask=(d < D)[None, :], other=0.0).to(tl.float32)
            weight = tl.load(w_ptr + t * H + h).to(tl.float32) * head_scale
            dot = tl.sum(k * q, axis=1) * dim_scale
            total += tl.where(dot < 0.0, 0.0, dot) * weight  # NaN stays NaN, so that the choice can refuse it
    tl.store(out_ptr + t * width + s, tl.where(seen, total, float("-inf")), mask=s < width)


def index_scores(q_THD: torch.Tensor, k_SD: torch.Tensor, weights_TH: torch.Tensor) -> torch.Tensor:
    """As :func:`vime.ops.index_scores`. No gradient: the indexer is frozen."""
    tokens, rows = q_THD.shape[0], k_SD.shape[0]
    table_BM = torch.zeros(1, 1, dtype=torch.int32, device=q_THD.device)
    row_T, last_T = (torch.full((tokens,), value, dtype=torch.int64, device=q_THD.device) for value in (0, rows - 1))
    return index_scores_paged(q_THD, dense(k_SD.detach()), weights_TH, table_BM, row_T, last_T, rows, rows)


def index_scores_paged(q_THD: torch.Tensor, key_SD: torch.Tensor, weights_TH: torch.Tensor, table_BM: torch.Tensor, row_T: torch.Tensor,
                       position_T: torch.Tensor, width: int, block: int) -> torch.Tensor:
    """The scores of :func:`index_scores` against keys in a paged cache; nothing is read on the host.

    Args:
        key_SD: all cells of the cache, ``[S, D]`` with inner stride 1; any outer stride.
        table_BM: int32, the blocks of each sequence; a block is ``block`` cells.
        row_T: int64, the row of ``table_BM`` of each token.
        position_T: int64, the last position that a token sees; ``-1`` for a token that is none.
        width: columns of the result, at most ``M * block``.

    Returns:
        fp32 ``[T, width]``: columns are positions of the token's own sequence, minus infinity past the last.
    """
    tokens, heads, dim = q_THD.shape
    out_TS = torch.empty(tokens, width, dtype=torch.float32, device=q_THD.device)
    if out_TS.numel():
        _scores[(tokens, triton.cdiv(width, _TILE))](
            dense(q_THD.detach()), key_SD, dense(weights_TH.detach()), table_BM, row_T, position_T, out_TS, dim**-0.5, heads**-0.5, width, block,
            key_SD.stride(0), table_BM.stride(0), H=heads, D=dim, BD=max(16, next_power_of_2(dim)), TILE=_TILE, UNROLL=min(heads, _UNROLL), num_warps=4,
            enable_fp_fusion=False)
    return out_TS
