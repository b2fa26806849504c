"""Rotary position embedding on CUDA: rotation in fp32, one rounding (Su et al. 2021).

Element for element there is nothing to reorder, but a compiler may fuse either product of ``a*cos - b*sin`` into the
addition, and choose anew for every head count. Fusing is switched off: each product and sum is rounded by itself.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from vime.ops.cuda.tensors import dense, next_power_of_2

IMPLEMENTATION = "cuda/rope/triton@1"


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, y_ptr, stride_t, stride_h,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    BH: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr, INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BH)[:, None]
    pairs = tl.arange(0, BR)[None, :]
    mask = (heads < H) & (pairs < R)
    if INTERLEAVED:
        first, second = 2 * pairs, 2 * pairs + 1
    else:
        first, second = pairs, pairs + R
    row_in = x_ptr + t * stride_t + heads * stride_h
    row_out = y_ptr + t * (H * D) + heads * D
    cos = tl.load(cos_ptr + t * R + pairs, mask=pairs < R, other=0.0)
    sin = tl.load(sin_ptr + t * R + pairs, mask=pairs < R, other=0.0)
    if BACKWARD:
        sin = -sin
    a = tl.load(row_in + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(row_in + second, mask=mask, other=0.0).to(tl.float32)
    out_a = a * cos - b * sin
    out_b = b * cos + a * sin
    tl.store(row_out + first, out_a.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(row_out + second, out_b.to(y_ptr.dtype.element_ty), mask=mask)
    if 2 * R < D:
        rest = 2 * R + tl.arange(0, BP)[None, :]
        keep = (heads < H) & (rest < D)
        tl.store(row_out + rest, tl.load(row_in + rest, mask=keep), mask=keep)


def _run(x_THD, cos_TR, sin_TR, interleaved: bool, backward: bool) -> torch.Tensor:
    if x_THD.stride(-1) != 1:
        x_THD = x_THD.contiguous()
    T, H, D = x_THD.shape
    R = cos_TR.shape[-1]
    y_THD = torch.empty(T, H, D, dtype=x_THD.dtype, device=x_THD.device)
    if T:
        _rotate[(T,)](
            x_THD, cos_TR, sin_TR, y_THD, x_THD.stride(0), x_THD.stride(1), H=H, D=D, R=R,
            BH=next_power_of_2(H), BR=next_power_of_2(R), BP=next_power_of_2(max(1, D - 2 * R)),
            INTERLEAVED=interleaved, BACKWARD=backward, enable_fp_fusion=False,
        )
    return y_THD


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_THD, cos_TR, sin_TR, interleaved):
        ctx.save_for_backward(cos_TR, sin_TR)
        ctx.interleaved = interleaved
        return _run(x_THD, cos_TR, sin_TR, interleaved, backward=False)

    @staticmethod
    def backward(ctx, dy_THD):
        cos_TR, sin_TR = ctx.saved_tensors
        return _run(dy_THD, cos_TR, sin_TR, ctx.interleaved, backward=True), None, None, None


def apply_rope(
    x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Rotate the first 2R of D. x: fp32 or bf16 [T, H, D], any outer strides; cos, sin: fp32 [T, R]."""
    return _Rope.apply(x_THD, dense(cos_TR), dense(sin_TR), interleaved)


def table(positions_T: torch.Tensor, frequencies_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) fp32 [T, R] of int64 positions and float64 frequencies; no wait for the device."""
    angles_TR = positions_T.double()[:, None] * frequencies_R
    return angles_TR.cos().float(), angles_TR.sin().float()
