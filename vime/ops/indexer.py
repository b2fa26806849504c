"""The lightning indexer of sparse attention (DeepSeek-V3.2, arXiv:2512.02556): which keys a query may read.

Its choice must be the same on both sides to the last key, so everything that could decide a tie is fixed: scores in
fp32 with one order over the dimension and over the heads, ties at the k-th score to the lower position, and the
chosen positions in rising order (the order in which attention adds them).
"""
from __future__ import annotations

import torch

from vime.ops import registry
from vime.ops.checks import refuse
from vime.ops.linear import linear


def layer_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm (arXiv:1607.06450) in fp32, one rounding: the norm of the indexer's keys. Any dtype in, same dtype out."""
    x = x_TD.float()
    ones = torch.ones(1, x.shape[-1], dtype=torch.float32, device=x.device)
    mean = linear(x, ones) / x.shape[-1]  # a sum over a row with the fixed order of a GEMM
    centred = x - mean
    variance = linear(centred * centred, ones) / x.shape[-1]
    y = centred / torch.sqrt(variance + eps)
    return (y * weight_D.float() + bias_D.float()).to(x_TD.dtype)


def index_scores(q_THD: torch.Tensor, k_SD: torch.Tensor, weights_TH: torch.Tensor) -> torch.Tensor:
    """``score[t, s] = sum_h (w[t, h] / sqrt(H)) * relu(q[t, h] . k[s] / sqrt(D))``, fp32 ``[T, S]``.

    Args:
        q_THD: index queries, rotated, any dtype (exact in fp32).
        k_SD: index keys, rotated.
        weights_TH: head weights of each token.

    The sum over heads runs in rising order of ``h``, a multiplication and an addition each (no fused form).
    """
    if k_SD.device.type != "cpu":  # a GEMM there may add in another order for another number of keys
        return registry.call("attention", "index_scores", q_THD, q_THD, k_SD, weights_TH)
    tokens, heads, dim = q_THD.shape
    weights = weights_TH.float() * heads**-0.5
    dots = linear(q_THD.float().reshape(tokens * heads, dim), k_SD.float()).view(tokens, heads, -1)
    terms = torch.relu(dots * dim**-0.5) * weights[:, :, None]
    total = terms[:, 0].clone()
    for h in range(1, heads):
        total = total + terms[:, h]
    return total


def select(scores_TS: torch.Tensor, counts_T: torch.Tensor, top_k: int) -> torch.Tensor:
    """The ``top_k`` best of the first ``counts[t]`` columns, as rising positions, ``-1`` past the end.

    Args:
        scores_TS: fp32; columns are positions of the token's own sequence.
        counts_T: how many positions each token may see (its own position + 1).

    Returns:
        int32 ``[T, min(top_k, S)]``. Equal scores at the border: the lower position is taken.

    Raises:
        ValueError: a score that may be chosen is NaN.
    """
    width = scores_TS.shape[1]
    visible = torch.arange(width, device=scores_TS.device) < counts_T[:, None]
    bad_TS = torch.isnan(scores_TS).logical_and(visible)
    refuse(bad_TS.any(), lambda: ValueError(f"select: the index scores of row {int(bad_TS.any(1).nonzero()[0])} hold NaN; no keys can be "
                                            "chosen from them"), "select: an index score is NaN")
    scores = (scores_TS + 0.0).masked_fill(~visible, float("-inf"))  # -0 is +0: a sort by bits would tell them apart
    k = min(top_k, width)
    chosen = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :k]
    chosen = torch.where(chosen < counts_T[:, None], chosen, width)  # columns the token cannot see go last
    chosen = torch.sort(chosen, dim=1).values
    return torch.where(chosen < width, chosen, -1).to(torch.int32)
