"""Mixture of experts: a router in fp32 with one slot order, and a sum over slots in that order.

An expert layer is exact at any expert-parallel size if each (token, slot) row is computed alone, comes back to the
token's owner, and the owner adds the slots in router order in fp32 (the experts themselves are ``ops.linear`` and
``ops.silu_and_mul``, whose rows do not see each other).
"""
from __future__ import annotations

import torch

from vime.ops import grouped, registry
from vime.ops.checks import refuse
from vime.ops.linear import linear
from vime.ops.logprob import log_softmax


def router_scores(x_TH: torch.Tensor, weight_EH: torch.Tensor, kind: str) -> torch.Tensor:
    """``sigmoid`` or ``softmax`` of the router logits, in fp32 from the first product on, ``[T, E]``.

    Args:
        x_TH: hidden states, any floating dtype.
        weight_EH: router weight, any floating dtype; both are widened to fp32, which is exact.

    Raises:
        ValueError: another ``kind``.
    """
    logits = linear(x_TH.float(), weight_EH.float())
    if kind == "sigmoid":
        return registry.call("moe", "sigmoid", logits, logits)
    if kind == "softmax":
        return registry.call("moe", "exp", logits, log_softmax(logits))
    raise ValueError(f"router_scores: kind must be sigmoid or softmax, found {kind!r}")


def route(scores_TE: torch.Tensor, top_k: int, *, bias_E: torch.Tensor | None = None, groups: int = 1,
          top_groups: int = 1, normalise: bool = True, scaling: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token in slot order, and their fp32 weights.

    Selection is by ``score + bias`` (DeepSeek-V3, arXiv:2412.19437, auxiliary-loss-free balancing); with ``groups`` > 1
    only within the ``top_groups`` groups whose two best sums are largest. Slots run from the best down; equal scores: the
    lower expert id first. The weight is the score without bias, divided by the sum over the slots in slot order
    (``normalise``), times ``scaling``.

    Returns:
        ``ids [T, top_k]`` int64 and ``weights [T, top_k]`` fp32 (differentiable in the scores).

    Raises:
        TypeError: scores that are not fp32. ValueError: NaN, or a ``top_k`` beyond the experts.
    """
    tokens, experts = scores_TE.shape
    if scores_TE.dtype != torch.float32:
        raise TypeError(f"route: router scores must be float32, found {scores_TE.dtype}; the router runs in FP32 on both sides")
    if not 0 < top_k <= experts or experts % groups:
        raise ValueError(f"route: top_k {top_k} of {experts} experts in {groups} group(s) does not work out")
    if groups == 1 and _has("route", scores_TE) and not (torch.is_grad_enabled() and scores_TE.requires_grad):
        ids_TK, weights_TK, nan_T = registry.call("moe", "route", scores_TE, scores_TE, top_k, bias_E, normalise, scaling)
        _refuse_nan(nan_T)
        return ids_TK, weights_TK
    choice = scores_TE.detach() if bias_E is None else scores_TE.detach() + bias_E.detach().float()
    _refuse_nan(torch.isnan(choice).any(1))
    if groups > 1:
        best_two = torch.sort(choice.view(tokens, groups, -1), dim=2, descending=True).values[:, :, :2]
        rank = torch.sort(best_two[:, :, 0] + best_two[:, :, -1], dim=1, descending=True, stable=True).indices
        keep = torch.zeros(tokens, groups, dtype=torch.bool, device=choice.device).scatter_(1, rank[:, :top_groups], True)
        choice = choice.masked_fill(~keep.repeat_interleave(experts // groups, dim=1), float("-inf"))
    ids_TK = torch.sort(choice, dim=1, descending=True, stable=True).indices[:, :top_k]
    weights_TK = scores_TE.gather(1, ids_TK)
    if normalise:
        total = weights_TK[:, 0]
        for slot in range(1, top_k):
            total = total + weights_TK[:, slot]
        weights_TK = weights_TK / (total + 1e-20)[:, None]
    return ids_TK, weights_TK * scaling


def _has(function: str, like: torch.Tensor) -> bool:
    return like.device.type != "cpu" and grouped.has("moe", function, like)


def _refuse_nan(nan_T: torch.Tensor) -> None:
    """Raise if any token is marked."""
    refuse(nan_T.any(), lambda: ValueError(f"route: the router scores of token {int(nan_T.nonzero()[0])} hold NaN"), "route: a router score is NaN")


def combine_slots(rows_TKH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """``y[t] = round(sum_k weights[t, k] * rows[t, k])``: fp32, slot 0 first, a multiplication and an addition each.

    Args:
        rows_TKH: what the experts put out for each (token, slot), in the model dtype.
        weights_TK: fp32.

    Returns:
        ``y_TH`` in the dtype of the rows. Differentiable in both.
    """
    if rows_TKH.dim() != 3 or rows_TKH.shape[:2] != weights_TK.shape or weights_TK.dtype != torch.float32:
        raise ValueError(f"combine_slots: rows {tuple(rows_TKH.shape)}, weights {tuple(weights_TK.shape)} {weights_TK.dtype}; "
                         "expected [T, K, H] and float32 [T, K]")
    if _has("combine_slots", rows_TKH):
        return registry.call("moe", "combine_slots", rows_TKH, rows_TKH, weights_TK)
    total = rows_TKH[:, 0].float() * weights_TK[:, 0, None]
    for slot in range(1, rows_TKH.shape[1]):
        total = total + rows_TKH[:, slot].float() * weights_TK[:, slot, None]
    return total.to(rows_TKH.dtype)
