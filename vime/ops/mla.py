"""The steps of latent attention around its kernel: cache rows, queries and index keys from what the projections gave.

Both sides call these with the outputs of their own linear layers, so the order of norm, rotation and concatenation is
written once. Equations: MLA (arXiv:2405.04434, section 2.1), the indexer of DSA (arXiv:2512.02556, section 2.1).
"""
from __future__ import annotations

import torch

from vime.ops.indexer import layer_norm
from vime.ops.norm import rms_norm
from vime.ops.rope import apply_rope
from vime.ops.sparse_attention import into_latent


def latent_row(down_TD: torch.Tensor, norm_weight_L: torch.Tensor, eps: float, cos_TR: torch.Tensor,
               sin_TR: torch.Tensor) -> torch.Tensor:
    """``[rms_norm(c) | rotate(k)]`` of the down-projection ``[c | k]``: what the KV cache holds of a token.

    Args:
        down_TD: ``[T, kv_lora + rope]`` in the model dtype.
        norm_weight_L: ``[kv_lora]``, same dtype.
        cos_TR, sin_TR: fp32 ``[T, rope / 2]``; the pairs are interleaved.

    Returns:
        ``[T, kv_lora + rope]``. Differentiable.
    """
    rank = norm_weight_L.shape[0]
    if down_TD.dim() != 2 or down_TD.shape[1] != rank + 2 * cos_TR.shape[1]:
        raise ValueError(f"latent_row: down-projection {tuple(down_TD.shape)}, norm {rank}, rope {2 * cos_TR.shape[1]} do not "
                         "fit; expected [T, kv_lora + rope]")
    c_TL = rms_norm(down_TD[:, :rank].contiguous(), norm_weight_L, eps)
    k_TR = apply_rope(down_TD[:, None, rank:], cos_TR, sin_TR, interleaved=True)[:, 0]
    return torch.cat([c_TL, k_TR], dim=1)


def latent_query(q_THD: torch.Tensor, kv_b_HOL: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    """``[kv_b_nope^T q_nope | rotate(q_rope)]``: a query as it is held against cache rows.

    Args:
        q_THD: ``[T, heads, nope + rope]`` in the model dtype.
        kv_b_HOL: the up-projection ``[heads, nope + v, kv_lora]``.
        cos_TR, sin_TR: as in :func:`latent_row`.

    Returns:
        ``[T, heads, kv_lora + rope]``. Differentiable.
    """
    nope = q_THD.shape[2] - 2 * cos_TR.shape[1]
    rope_THR = apply_rope(q_THD[:, :, nope:], cos_TR, sin_TR, interleaved=True)
    return torch.cat([into_latent(q_THD[:, :, :nope], kv_b_HOL), rope_THR], dim=2)


def index_row(k_TD: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor, eps: float, cos_TR: torch.Tensor,
              sin_TR: torch.Tensor, interleaved: bool = True) -> torch.Tensor:
    """``rotate(layer_norm(k))``: the indexer's key of a token, rotated in its first ``rope`` dimensions, ``[T, D]``."""
    return apply_rope(layer_norm(k_TD, weight_D, bias_D, eps)[:, None], cos_TR, sin_TR, interleaved)[:, 0]


def index_query(q_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, interleaved: bool = True) -> torch.Tensor:
    """The indexer's query, rotated in its first ``rope`` dimensions, ``[T, heads, D]``."""
    return apply_rope(q_THD, cos_TR, sin_TR, interleaved)
