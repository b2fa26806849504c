"""Attention over listed cells of latent attention's paged cache, on CUDA, without the host.

The rows that are read and the kernel that reads them are those of :func:`vime.ops.cuda.sparse.sparse_attention`: cells in the model
dtype are read where they lie, FP8 cells are dequantised first, the listed ones only.
"""
from __future__ import annotations

import torch

from vime.ops.cuda import sparse
from vime.ops.cuda.cells import dequantised_rows
from vime.ops.cuda.tensors import dense

#: Bytes of dequantised rows that lie there at a time.
ROW_BYTES = 1 << 30


def sparse_attention_paged(q_THD: torch.Tensor, cache_SW: torch.Tensor, slots_TK: torch.Tensor, n_T: torch.Tensor, value_dim: int,
                           scale: float) -> torch.Tensor:
    """``sparse_attention(q, rows of the cells, slots)``: the same bits, ``[T, heads, value_dim]``. No gradient.

    Args:
        q_THD: bf16 or fp32 ``[T, heads, D]``.
        cache_SW: every cell of the cache: in the dtype of ``q``, or uint8 with an FP8 compressed part. Inner stride 1.
        slots_TK: int32, cells in the order in which they are added.
        n_T: int32, the entries of each list.
    """
    q_THD, slots_TK = dense(q_THD), dense(slots_TK)
    if cache_SW.dtype == q_THD.dtype:
        return sparse.rows_of_lists(q_THD, cache_SW, slots_TK, n_T, value_dim, scale)[0]
    (tokens, _, dim), k = q_THD.shape, slots_TK.shape[1]
    step = max(1, ROW_BYTES // max(1, k * dim * q_THD.element_size()))
    parts = []
    for first in range(0, tokens, step):
        part = slice(first, first + step)
        rows_RD = dequantised_rows(cache_SW, slots_TK[part], n_T[part], value_dim, dim - value_dim, q_THD.dtype)
        own_TK = torch.arange(rows_RD.shape[0], dtype=torch.int32, device=q_THD.device).view(-1, k)
        parts.append(sparse.rows_of_lists(q_THD[part], rows_RD, own_TK, dense(n_T[part]), value_dim, scale)[0])
    return torch.cat(parts) if len(parts) != 1 else parts[0]
