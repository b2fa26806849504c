"""SiLU-and-multiply, the gate of every SwiGLU block."""
from __future__ import annotations

import torch

from vime.ops import registry


def silu_and_mul(x_T2F: torch.Tensor) -> torch.Tensor:
    """``y = round(g / (1 + exp(-g)) * u)`` in fp32 with ``[g | u] = x`` (arXiv:2002.05202), one rounding.

    Args:
        x_T2F: fp32 or bf16, any leading dimensions; the gate is the first half of the last dimension.

    Returns:
        ``y_TF``, dtype of the input. Differentiable.
    """
    if x_T2F.dim() == 0 or x_T2F.shape[-1] % 2:
        raise ValueError(f"silu_and_mul: the last dimension of {tuple(x_T2F.shape)} must be even: [gate | up]")
    return registry.call("activation", "silu_and_mul", x_T2F, x_T2F)
