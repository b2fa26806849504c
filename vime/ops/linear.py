"""Linear layers, the LM head included: the operation where stock kernels change their order of additions with M."""
from __future__ import annotations

import torch

from vime.ops import registry


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """``y[t, n] = round(sum_k x[t, k] * weight[n, k]) (+ bias[n])``.

    Products are accumulated in fp32 in an order along K that depends on K alone, and rounded once to the model
    dtype; the bias is added afterwards in the model dtype (a second rounding in bf16).

    Args:
        x_TK: fp32 or bf16, any leading dimensions (none, and zero rows, included).
        weight_NK: same dtype and device. Read anew on every call: there is no cache of packed weights to go stale.
        bias_N: same dtype, or None.

    Returns:
        ``y_TN`` with the leading dimensions of ``x_TK``. Differentiable in all three arguments; the backward is
        deterministic and evaluates the same kernel on transposed operands.
    """
    if weight_NK.dim() != 2 or x_TK.shape[-1] != weight_NK.shape[1]:
        raise ValueError(f"linear: x {tuple(x_TK.shape)} and weight {tuple(weight_NK.shape)} do not fit; "
                         "the last dimension of x must equal the second of weight [N, K]")
    if weight_NK.dtype != x_TK.dtype:
        raise ValueError(f"linear: x is {x_TK.dtype}, weight {weight_NK.dtype}; both must have the model dtype")
    if bias_N is not None and (bias_N.shape != weight_NK.shape[:1] or bias_N.dtype != x_TK.dtype):
        raise ValueError(f"linear: bias {tuple(bias_N.shape)} {bias_N.dtype} does not fit "
                         f"weight {tuple(weight_NK.shape)} {weight_NK.dtype}")
    y_TN = registry.call("linear", "linear", x_TK, x_TK, weight_NK)
    return y_TN if bias_N is None else y_TN + bias_N


def weight_gradient(dy_TN: torch.Tensor, x_TK: torch.Tensor) -> torch.Tensor:
    """``dw[n, k] = round(sum_t dy[t, n] * x[t, k])``, accumulated in fp32: the part of a weight's gradient that these rows make.

    Args:
        dy_TN, x_TK: fp32 or bf16, the same dtype and device, at least one row.

    Returns:
        ``dw_NK`` in that dtype: the same bits for the same rows, in an order along ``T`` that their number may choose. No row
        invariance is asked for here, so a device need not prove a kernel for every number of rows. Not differentiable.
    """
    if dy_TN.dim() != 2 or x_TK.dim() != 2 or dy_TN.shape[0] != x_TK.shape[0] or dy_TN.dtype != x_TK.dtype:
        raise ValueError(f"weight_gradient: dy {tuple(dy_TN.shape)} {dy_TN.dtype} and x {tuple(x_TK.shape)} {x_TK.dtype} do not fit; "
                         "expected [T, N] and [T, K] of one dtype")
    if "weight_gradient" in registry.resolve("linear", dy_TN.device, dy_TN.dtype).functions:
        return registry.call("linear", "weight_gradient", dy_TN, dy_TN, x_TK)
    return linear(dy_TN.t().contiguous(), x_TK.t().contiguous())
