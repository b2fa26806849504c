"""Multi-head latent attention over an explicit list of rows, dense or sparse, in training and in generation.

MLA (DeepSeek-V2, arXiv:2405.04434) is evaluated in its latent form on both sides: a query is taken into the latent
space, reads rows ``[compressed kv | rotated key]`` that all heads share, and the result is taken out again. A dense
layer lists all earlier positions, a sparse one (DSA, arXiv:2512.02556) the chosen ones. So one kernel serves prefill,
decode, chunks and packed training, and a layer that drops nothing has the bits of a dense one.
"""
from __future__ import annotations

import torch

from vime.ops import registry
from vime.ops.grouped import linear_heads


def sparse_attention(q_THD: torch.Tensor, kv_SD: torch.Tensor, index_TK: torch.Tensor, value_dim: int,
                     scale: float) -> torch.Tensor:
    """``o[t, h] = softmax_j(scale q[t, h] . kv[index[t, j]]) kv[index[t, j], :value_dim]``, in the order of the list.

    Args:
        q_THD: fp32 or bf16 ``[T, heads, D]``.
        kv_SD: same dtype, ``[S, D]``: rows that all heads share; the first ``value_dim`` elements are the value.
        index_TK: int32 rows of ``kv_SD``; entries from the first ``-1`` on are not read. An empty list gives zeros.
        scale: factor of the scores.

    Returns:
        ``o [T, heads, value_dim]`` in the dtype of ``q_THD``; scores, softmax and sums in fp32, one rounding.
        Differentiable in q and kv; the gradient of a row is added in (token, entry) order.

    Raises:
        ValueError: shapes or dtypes that do not fit. IndexError: an entry beyond ``S``.
    """
    if q_THD.dim() != 3 or kv_SD.dim() != 2 or q_THD.shape[2] != kv_SD.shape[1] or index_TK.dim() != 2 \
            or index_TK.shape[0] != q_THD.shape[0] or not 0 < value_dim <= kv_SD.shape[1]:
        raise ValueError(f"sparse_attention: q {tuple(q_THD.shape)}, kv {tuple(kv_SD.shape)}, index {tuple(index_TK.shape)}, "
                         f"value_dim {value_dim} do not fit; expected [T, heads, D], [S, D], [T, K]")
    if q_THD.dtype != kv_SD.dtype:
        raise ValueError(f"sparse_attention: q is {q_THD.dtype}, kv {kv_SD.dtype}; both must have the model dtype")
    return registry.call("attention", "sparse_attention", q_THD, q_THD, kv_SD, index_TK, int(value_dim), float(scale))


def causal_index(starts_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
    """The list of a dense layer: row ``starts[t] + p`` for ``p = 0 .. positions[t]``, then ``-1``. int32 ``[T, max + 1]``."""
    width = int(positions_T.max()) + 1 if positions_T.numel() else 0
    p_K = torch.arange(width, device=positions_T.device)
    rows_TK = starts_T[:, None] + p_K
    return torch.where(p_K <= positions_T[:, None], rows_TK, -1).to(torch.int32)


def into_latent(q_THN: torch.Tensor, kv_b_HOL: torch.Tensor) -> torch.Tensor:
    """``q_lat[t, h] = round(q[t, h] kv_b[h, :N])``: a query's non-rotary part in the latent space.

    Args:
        q_THN: ``[T, heads, nope]``.
        kv_b_HOL: the up-projection ``[heads, nope + v, kv_lora]``; its first ``nope`` rows make keys.

    Returns:
        ``[T, heads, kv_lora]``. Differentiable.
    """
    return linear_heads(q_THN, kv_b_HOL[:, :q_THN.shape[2]].transpose(1, 2))


def out_of_latent(o_THL: torch.Tensor, kv_b_HOL: torch.Tensor, nope: int) -> torch.Tensor:
    """``o[t, h] = round(kv_b[h, nope:] o_lat[t, h])``: attention's result from the latent space, ``[T, heads, v]``."""
    return linear_heads(o_THL, kv_b_HOL[:, nope:])
