"""RMSNorm, alone and fused with the residual sum.

The two frameworks disagree on what is normalised after a residual sum: vLLM takes the unrounded fp32 sum, Megatron
the sum rounded to the model dtype. Here it is the rounded one (contract parameter ``norm.residual_rounding``), since
the rounded sum is what both carry to the next layer.
"""
from __future__ import annotations

import torch

from vime.ops import registry


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """``y = round(x * (1 / sqrt(mean(x^2) + eps)) * weight)``, all in fp32, one rounding (arXiv:1910.07467).

    Args:
        x_TH: fp32 or bf16, any leading dimensions.
        weight_H: same dtype.
        eps: added to the mean of squares.

    Returns:
        Shape and dtype of ``x_TH``. Differentiable in ``x_TH`` and ``weight_H``.
    """
    _check("rms_norm", x_TH, weight_H)
    return registry.call("norm", "rms_norm", x_TH, x_TH, weight_H, float(eps))


def add_rms_norm(x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor,
                 eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``r = round(x + residual)``; returns ``(rms_norm(r, weight, eps), r)``. Bit for bit the two steps one by one.

    Args and dtypes as in :func:`rms_norm`; ``residual_TH`` has the shape of ``x_TH``.
    """
    _check("add_rms_norm", x_TH, weight_H)
    if residual_TH.shape != x_TH.shape or residual_TH.dtype is not x_TH.dtype:
        raise ValueError(f"add_rms_norm: residual {tuple(residual_TH.shape)} {residual_TH.dtype} is not "
                         f"like x {tuple(x_TH.shape)} {x_TH.dtype}")
    return registry.call("norm", "add_rms_norm", x_TH, x_TH, residual_TH, weight_H, float(eps))


def _check(name: str, x_TH: torch.Tensor, weight_H: torch.Tensor) -> None:
    if weight_H.dim() != 1 or weight_H.size(0) != x_TH.size(-1) or weight_H.dtype is not x_TH.dtype:
        raise ValueError(f"{name}: weight {tuple(weight_H.shape)} {weight_H.dtype} does not fit "
                         f"x {tuple(x_TH.shape)} {x_TH.dtype}; expected [{x_TH.shape[-1]}] of the same dtype")
