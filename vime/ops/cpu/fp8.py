"""The block-FP8 linear layer on a CPU: quantised values are exact in fp32, so the blocks go through the fp32 kernel."""
from __future__ import annotations

from typing import Any

import torch

from vime.ops import blockwise, registry
from vime.ops.cpu import functions
from vime.ops.fp8 import BLOCK


def _product(x: torch.Tensor, weight: torch.Tensor, block_N: torch.Tensor | None) -> torch.Tensor:
    xq_TK, sx_TB, wq_NK, sw_NB = blockwise.quantise_both(x.reshape(-1, x.shape[-1]), weight, block_N)
    total_TN = torch.zeros(xq_TK.shape[0], weight.shape[0])
    for b in range(sx_TB.shape[1]):
        part = slice(b * BLOCK, (b + 1) * BLOCK)
        inner_TN = functions.K.linear(xq_TK[:, part].float().contiguous(), wq_NK[:, part].float().contiguous())
        # two operations and not one fused: a vector's remainder would otherwise round elsewhere
        total_TN = total_TN + inner_TN * (sx_TB[:, b, None] * sw_NB[None, :, b])
    return total_TN.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


class _LinearFp8(functions._Linear):
    """The backward is that of the ordinary linear layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, block_N: torch.Tensor | None) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return _product(x, weight, block_N)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:  # type: ignore[override]
        return *functions._Linear.backward(ctx, dy), None


def linear_fp8(x: torch.Tensor, weight: torch.Tensor, block_N: torch.Tensor | None) -> torch.Tensor:
    products = -(-weight.shape[1] // BLOCK)
    registry.count("linear", registry.implementation("linear", "cpu", torch.float32), products)
    if functions._tracked(x, weight):
        return _LinearFp8.apply(x, weight, block_N)
    return _product(x, weight, block_N)
