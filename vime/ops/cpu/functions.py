"""The CPU kernels as differentiable functions.

The inference path calls the kernel directly; only where a gradient is asked for does an ``autograd.Function`` come in
between. Both run the same kernel, so that a forward without grad and its recomputation with grad give the same bits.
"""
from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

K: ModuleType  # the compiled kernels

def bind(kernels: ModuleType) -> None:
    global K
    K = kernels


def _tracked(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return K.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = K.linear(dy, K.transpose(weight))
        if ctx.needs_input_grad[1]:
            dy_TN, x_TK = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
            dw = K.linear(K.transpose(dy_TN), K.transpose(x_TK))
        return dx, dw


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _Linear.apply(x, weight) if _tracked(x, weight) else K.linear(x, weight)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return K.rms_norm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        dx, dw = K.rms_norm_backward(*ctx.saved_tensors, dy, ctx.eps)
        return dx, dw, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _RmsNorm.apply(x, weight, eps) if _tracked(x, weight) else K.rms_norm(x, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    if _tracked(x, residual, weight):
        summed = x + residual
        return _RmsNorm.apply(summed, weight, eps), summed
    return K.add_rms_norm(x, residual, weight, eps)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return K.apply_rope(x, cos, sin, interleaved, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return K.apply_rope(dy, *ctx.saved_tensors, ctx.interleaved, -1.0), None, None, None


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return _Rope.apply(x, cos, sin, interleaved) if _tracked(x) else K.apply_rope(x, cos, sin, interleaved, 1.0)


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return K.silu_and_mul(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return K.silu_and_mul_backward(*ctx.saved_tensors, dy)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    return _SiluAndMul.apply(x) if _tracked(x) else K.silu_and_mul(x)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = weight.shape[0]
        return K.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[None, torch.Tensor]:
        (ids,) = ctx.saved_tensors
        sorted_ids, order = torch.sort(ids.reshape(-1).long(), stable=True)
        return None, K.embedding_backward(sorted_ids, order, dy.reshape(-1, dy.shape[-1]), ctx.rows)


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _Embedding.apply(ids, weight) if _tracked(weight) else K.embedding(ids, weight)


class _LogSoftmax(torch.autograd.Function):
    """Both forms. With ids one number a row comes out, without them the whole row."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, ids: torch.Tensor | None, temperature: torch.Tensor) -> torch.Tensor:
        top, logsum = torch.empty(2, logits.shape[0])
        out = torch.empty(logits.shape if ids is None else logits.shape[:1], dtype=torch.float32)
        whole, chosen = (out, None) if ids is None else (None, out)
        K.log_softmax_forward(logits, temperature, ids, whole, chosen, top, logsum, None)
        ctx.save_for_backward(logits, ids, temperature, top, logsum)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, ids, temperature, top, logsum = ctx.saved_tensors
        return K.log_softmax_backward(logits, temperature, top, logsum, ids, g), None, None


def log_softmax(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    temperature = temperature.contiguous()
    if _tracked(logits):
        return _LogSoftmax.apply(logits, None, temperature)
    out = torch.empty(logits.shape, dtype=torch.float32)
    K.log_softmax_forward(logits, temperature, None, out, None, None, None, None)
    return out


def token_logprob(logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor,
                  entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    ids, temperature = ids.long().contiguous(), temperature.contiguous()
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= logits.shape[1]):
        bad = int(((ids < 0) | (ids >= logits.shape[1])).nonzero()[0])
        raise IndexError(f"token_logprob: id {int(ids[bad])} in row {bad} is outside a vocabulary of {logits.shape[1]}")
    entropy_T = torch.empty(logits.shape[0]) if entropy else None
    lp_T = torch.empty(logits.shape[0])
    if _tracked(logits):
        lp_T = _LogSoftmax.apply(logits, ids, temperature)
        if entropy:
            K.log_softmax_forward(logits.detach(), temperature, ids, None, None, None, None, entropy_T)
    else:
        K.log_softmax_forward(logits.detach(), temperature, ids, None, lp_T, None, None, entropy_T)
    return lp_T, entropy_T


def sample(logits: torch.Tensor, seed: torch.Tensor, position: torch.Tensor, temperature: torch.Tensor,
           top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    def plain(value: torch.Tensor | None) -> torch.Tensor | None:
        return None if value is None else value.contiguous()

    if (temperature < 0).any():
        raise ValueError(f"sample: temperature must be >= 0, found {float(temperature.min())}")
    ids = K.sample(logits, plain(seed), plain(position), plain(temperature), plain(top_k), plain(top_p))
    if (ids < 0).any():
        raise ValueError(f"sample: the logits of row {int((ids < 0).nonzero()[0])} hold NaN or nothing above -inf; no token can be drawn from them")
    return ids


class _AttentionVarlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, scale: float,
                causal: bool) -> torch.Tensor:
        lse = torch.empty(q.shape[:2])
        o = K.attention_varlen(q, k, v, cu, scale, causal, lse)
        ctx.save_for_backward(q, k, v, cu, lse, o)
        ctx.scale, ctx.causal = scale, causal
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, cu, lse, o = ctx.saved_tensors
        return *K.attention_backward(q, k, v, cu, ctx.scale, ctx.causal, lse, o, do), None, None, None


def attention_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    if _tracked(q, k, v):
        return _AttentionVarlen.apply(q, k, v, cu, scale, causal)
    return K.attention_varlen(q, k, v, cu, scale, causal, None)


def kv_cache_shape(num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    if block_size % 16:
        raise ValueError(f"kv_cache_shape: block_size {block_size} must be a multiple of 16 (a key tile is four groups of 16)")
    if head_dim % 2:
        raise ValueError(f"kv_cache_shape: head_dim {head_dim} must be even (bf16 keys lie in pairs)")
    return (num_blocks, 2, kv_heads, block_size, head_dim)


def table(gemm: str, attention: str, short: str) -> dict[str, tuple[str, dict[str, Callable[..., Any]]]]:
    """Operation -> (kind for the id, functions)."""
    return {
        "linear": (f"{gemm}@1", {"linear": linear}),
        "norm": (f"{short}@1", {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm}),
        "rope": (f"{short}@1", {"apply_rope": apply_rope, "table": K.rope_table}),
        "activation": (f"{short}@1", {"silu_and_mul": silu_and_mul}),
        "embedding": (f"{short}@1", {"embedding": embedding}),
        "attention": (f"{attention}@1", {"attention_varlen": attention_varlen, "attention_paged": K.attention_paged,
                                            "kv_cache_write": K.kv_cache_write, "kv_cache_shape": kv_cache_shape}),
        "logprob": (f"{short}@1", {"log_softmax": log_softmax, "token_logprob": token_logprob}),
        "sampling": (f"{short}@1", {"sample": sample}),
    }
