"""Sparse attention and router scores on the CPU, as differentiable functions."""
from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, q: torch.Tensor, kv: torch.Tensor, index: torch.Tensor, value_dim: int,
                scale: float) -> torch.Tensor:
        o, lse = kernels.sparse_attention(q, kv, index, value_dim, scale)
        ctx.save_for_backward(q, kv, index, lse, o)
        ctx.kernels, ctx.scale = kernels, scale
        return o

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, kv, index, lse, o = ctx.saved_tensors
        dq, shares_TKD = ctx.kernels.sparse_attention_backward(q, kv, index, ctx.scale, lse, o, do)
        used = index >= 0
        # Shares of one row are added in the order of (token, entry), whatever the number of threads.
        rows, order = torch.sort(index[used].long(), stable=True)
        dkv = ctx.kernels.embedding_backward(rows, order, shares_TKD[used], kv.shape[0])
        return None, dq, dkv.to(kv.dtype), None, None, None


class _Map(torch.autograd.Function):
    """An elementwise kernel whose derivative is a function of its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kernel: Callable[[torch.Tensor], torch.Tensor],
                slope: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        y = kernel(x)
        ctx.save_for_backward(y)
        ctx.slope = slope
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (y,) = ctx.saved_tensors
        return dy * ctx.slope(y), None, None


def functions(kernels: ModuleType) -> dict[str, Callable[..., Any]]:
    """``sparse_attention`` (operation attention), ``sigmoid`` and ``exp`` (operation moe)."""

    def sparse_attention(q: torch.Tensor, kv: torch.Tensor, index: torch.Tensor, value_dim: int, scale: float) -> torch.Tensor:
        if torch.is_grad_enabled() and (q.requires_grad or kv.requires_grad):
            return _SparseAttention.apply(kernels, q, kv, index, value_dim, scale)
        return kernels.sparse_attention(q, kv, index, value_dim, scale)[0]

    def sigmoid(x: torch.Tensor) -> torch.Tensor:
        return _Map.apply(x, kernels.sigmoid, lambda y: y * (1 - y)) if torch.is_grad_enabled() and x.requires_grad else kernels.sigmoid(x)

    def exp(x: torch.Tensor) -> torch.Tensor:
        return _Map.apply(x, kernels.exponential, lambda y: y) if torch.is_grad_enabled() and x.requires_grad else kernels.exponential(x)

    return {"sparse_attention": sparse_attention, "sigmoid": sigmoid, "exp": exp}
