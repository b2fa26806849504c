"""The FP8-E4M3 KV cache of MLA: what is stored, and what attention then reads, the same on both sides.

Layout of a row (FlashMLA's FP8 sparse cache): the compressed part in E4M3 with one fp32 scale per block of 128
elements, the rotated key in the model dtype. The engine stores it so; the trainer, which has no cache, rounds its rows
through the same functions and passes the gradient straight through.
"""
from __future__ import annotations

import torch

BLOCK = 128
FP8_MAX = 448.0  # largest finite E4M3 (OCP 8-bit floating point, revision 1.0)


def scale_of(peak: torch.Tensor) -> torch.Tensor:
    """``peak / 448``, fp32, rounded to nearest; 1 where that is zero (nothing but zeros, or the smallest numbers)."""
    scale = peak / peak.new_full((), FP8_MAX)  # by a plain number CUDA would multiply with its rounded inverse
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def quantise_blocks(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``scale = max|x| / 448`` per block of 128 (a block of zeros: 1), ``q = e4m3(x / scale)``.

    Args:
        x_TD: fp32 or bf16; a last block may be shorter.

    Returns:
        ``q_TD`` float8_e4m3fn and ``scale_TB`` fp32. Maxima and single divisions only, so a row is the same anywhere.
    """
    tokens, dim = x_TD.shape
    blocks = -(-dim // BLOCK)
    x = torch.nn.functional.pad(x_TD.float(), (0, blocks * BLOCK - dim)).view(tokens, blocks, BLOCK)
    peak = x.abs().amax(dim=2)
    scale_TB = scale_of(peak)
    q = (x / scale_TB[:, :, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return q.view(tokens, blocks * BLOCK)[:, :dim], scale_TB


def dequantise_blocks(q_TD: torch.Tensor, scale_TB: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``round(q * scale)`` in ``dtype``."""
    scale = scale_TB.repeat_interleave(BLOCK, dim=1)[:, : q_TD.shape[1]]
    return (q_TD.float() * scale).to(dtype)


class _ThroughCache(torch.autograd.Function):
    """Straight-through: the forward rounds as the cache does, the backward passes the gradient."""

    @staticmethod
    def forward(ctx: object, row_TD: torch.Tensor, rank: int) -> torch.Tensor:
        q, scale = quantise_blocks(row_TD[:, :rank])
        return torch.cat([dequantise_blocks(q, scale, row_TD.dtype), row_TD[:, rank:]], dim=1)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def through_fp8_cache(row_TD: torch.Tensor, kv_lora_rank: int) -> torch.Tensor:
    """What attention reads of ``[compressed | rotated key]`` rows once they went through the FP8 cache."""
    return _ThroughCache.apply(row_TD, kv_lora_rank)
