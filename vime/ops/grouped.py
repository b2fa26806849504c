"""Products that come in many small ones, by head or by expert: one launch where a device has a kernel for it, else a loop.

On one device there is one of the two and never both, so a row has the same bits however many heads or experts are evaluated
with it, and on whichever side.
"""
from __future__ import annotations

import torch

from vime.ops import registry
from vime.ops.activation import silu_and_mul
from vime.ops.blockwise import linear_fp8
from vime.ops.linear import linear


def has(op: str, function: str, like: torch.Tensor) -> bool:
    """Whether the device of ``like`` has a kernel of its own for a function, where others take a composite form."""
    return function in registry.resolve(op, like.device, like.dtype).functions


def linear_heads(x_THK: torch.Tensor, weight_HNK: torch.Tensor) -> torch.Tensor:
    """``y[t, h] = round(weight[h] x[t, h])``, each head a :func:`vime.ops.linear` of its own. ``[T, heads, N]``; differentiable.

    Args:
        x_THK: fp32 or bf16.
        weight_HNK: same dtype; may be a transposed or sliced view.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if x_THK.dim() != 3 or weight_HNK.dim() != 3 or x_THK.shape[1:] != (weight_HNK.shape[0], weight_HNK.shape[2]) \
            or x_THK.dtype != weight_HNK.dtype:
        raise ValueError(f"linear_heads: x {tuple(x_THK.shape)} {x_THK.dtype} and weight {tuple(weight_HNK.shape)} {weight_HNK.dtype} do "
                         "not fit; expected [T, heads, K] and [heads, N, K] of one dtype")
    if has("attention", "linear_heads", x_THK):
        return registry.call("attention", "linear_heads", x_THK, x_THK, weight_HNK)
    # Made contiguous in one go: kernels are proven for the layout of an ordinary weight.
    weights = weight_HNK.contiguous().unbind(0)
    return torch.stack([linear(x_TK, w_NK) for x_TK, w_NK in zip(x_THK.unbind(1), weights, strict=True)], dim=1)


def expert_linear(x_RK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """:func:`vime.ops.linear` for rows of one expert, with the bits that :func:`expert_rows` gives them. Differentiable."""
    if has("moe", "expert_linear", x_RK):
        return registry.call("moe", "expert_linear", x_RK, x_RK, weight_NK)
    return linear(x_RK, weight_NK)


def expert_rows(x_TH: torch.Tensor, ids_TK: torch.Tensor, gate_up_E2FH: torch.Tensor, down_EHF: torch.Tensor,
                fp8_blocks: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
    """``row[t, k] = down[e] silu_and_mul(gate_up[e] x[t])`` with ``e = ids[t, k]``, in the model dtype. No gradient.

    Args:
        x_TH: tokens, fp32 or bf16.
        ids_TK: int64, the expert of each slot.
        gate_up_E2FH, down_EHF: both weights of every expert.
        fp8_blocks: the block of each row of the two weights: then they are :func:`vime.ops.linear_fp8`.

    Returns:
        ``[T, K, H]``, before the router's weights.
    """
    tokens, slots = ids_TK.shape
    if has("moe", "grouped_linear", x_TH):
        return _at_once(x_TH, ids_TK, (gate_up_E2FH, down_EHF), fp8_blocks).view(tokens, slots, down_EHF.shape[1])

    def multiply(x: torch.Tensor, weight: torch.Tensor, which: int) -> torch.Tensor:
        return linear(x, weight) if fp8_blocks is None else linear_fp8(x, weight, None, fp8_blocks[which])

    order = torch.sort(ids_TK.reshape(-1), stable=True)
    rows = x_TH.new_empty(tokens * slots, x_TH.shape[1])
    begin = 0
    for e, count in enumerate(torch.bincount(order.values, minlength=gate_up_E2FH.shape[0]).tolist()):
        if count:
            places = order.indices[begin:begin + count]
            hidden = silu_and_mul(multiply(x_TH.index_select(0, places // slots), gate_up_E2FH[e], 0))
            rows.index_copy_(0, places, multiply(hidden, down_EHF[e], 1))
        begin += count
    return rows.view(tokens, slots, x_TH.shape[1])


def _at_once(x_TH: torch.Tensor, ids_TK: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor],
             fp8_blocks: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    plan = registry.call("moe", "plan", x_TH, ids_TK, weights[0].shape[0])
    own_R = torch.arange(plan.place_R.shape[0], device=x_TH.device)

    def multiply(x: torch.Tensor, which: int, source_R: torch.Tensor, target_R: torch.Tensor) -> torch.Tensor:
        weight, rows = weights[which].detach(), (source_R, target_R, plan.row_end_E)
        if fp8_blocks is None:
            return registry.call("moe", "grouped_linear", x_TH, x, weight, *rows)
        return registry.call("moe", "grouped_linear_fp8", x_TH, x, weight, fp8_blocks[which], *rows)

    return multiply(silu_and_mul(multiply(x_TH.detach(), 0, plan.token_R, own_R)), 1, own_R, plan.place_R)
