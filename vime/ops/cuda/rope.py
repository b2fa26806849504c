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
def _heads(
    row_in, row_out, cos, sin, stride_h,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr, INTERLEAVED: tl.constexpr,
):
    """One token's heads; ``cos`` and ``sin`` are [1, BR]."""
    heads = tl.arange(0, BH)[:, None]
    pairs = tl.arange(0, BR)[None, :]
    mask = (heads < H) & (pairs < R)
    if INTERLEAVED:
        first, second = 2 * pairs, 2 * pairs + 1
    else:
        first, second = pairs, pairs + R
    row_in = row_in + heads * stride_h
    row_out = row_out + heads * D
    a = tl.load(row_in + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(row_in + second, mask=mask, other=0.0).to(tl.float32)
    out_a = a * cos - b * sin
    out_b = b * cos + a * sin
    tl.store(row_out + first, out_a.to(row_out.dtype.element_ty), mask=mask)
    tl.store(row_out + second, out_b.to(row_out.dtype.element_ty), mask=mask)
    if 2 * R < D:
        rest = 2 * R + tl.arange(0, BP)[None, :]
        keep = (heads < H) & (rest < D)
        tl.store(row_out + rest, tl.load(row_in + rest, mask=keep), mask=keep)


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, y_ptr, stride_t, stride_h,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    BH: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr, INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, BR)[None, :]
    cos = tl.load(cos_ptr + t * R + pairs, mask=pairs < R, other=0.0)
    sin = tl.load(sin_ptr + t * R + pairs, mask=pairs < R, other=0.0)
    if BACKWARD:
        sin = -sin
    _heads(x_ptr + t * stride_t, y_ptr + t * (H * D), cos, sin, stride_h, H, D, R, BH, BR, BP, INTERLEAVED)


@triton.jit
def _rotate_at(
    q_ptr, k_ptr, cos_ptr, sin_ptr, position_ptr, q_out_ptr, k_out_ptr, q_stride_t, q_stride_h, k_stride_t, k_stride_h, stride_p,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    BH: tl.constexpr, BG: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr, INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr,
):
    """Query and key (G heads, maybe none) of one token, the angle looked up in the table."""
    t = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, BR)[None, :]
    at = tl.load(position_ptr + t) * stride_p + pairs
    cos = tl.load(cos_ptr + at, mask=pairs < R, other=0.0)
    sin = tl.load(sin_ptr + at, mask=pairs < R, other=0.0)
    if BACKWARD:
        sin = -sin
    _heads(q_ptr + t * q_stride_t, q_out_ptr + t * (H * D), cos, sin, q_stride_h, H, D, R, BH, BR, BP, INTERLEAVED)
    if G > 0:
        _heads(k_ptr + t * k_stride_t, k_out_ptr + t * (G * D), cos, sin, k_stride_h, G, D, R, BG, BR, BP, INTERLEAVED)


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


def _run_at(q_THD, k_TGD, cos_PR, sin_PR, positions_T, interleaved: bool, backward: bool):
    q_THD = q_THD if q_THD.stride(-1) == 1 else q_THD.contiguous()
    T, H, D = q_THD.shape
    q_out = torch.empty(T, H, D, dtype=q_THD.dtype, device=q_THD.device)
    k_out, G = None, 0
    if k_TGD is not None:
        k_TGD = k_TGD if k_TGD.stride(-1) == 1 else k_TGD.contiguous()
        G = k_TGD.shape[1]
        k_out = torch.empty(T, G, D, dtype=k_TGD.dtype, device=k_TGD.device)
    R = cos_PR.shape[-1]
    if T:
        k = q_THD if k_TGD is None else k_TGD
        _rotate_at[(T,)](
            q_THD, k, cos_PR, sin_PR, positions_T, q_out, q_out if k_out is None else k_out,
            q_THD.stride(0), q_THD.stride(1), k.stride(0), k.stride(1), cos_PR.stride(0), H=H, G=G, D=D, R=R,
            BH=next_power_of_2(H), BG=next_power_of_2(max(1, G)), BR=next_power_of_2(R), BP=next_power_of_2(max(1, D - 2 * R)),
            INTERLEAVED=interleaved, BACKWARD=backward, enable_fp_fusion=False,
        )
    return q_out, k_out


class _RopeAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THD, k_TGD, cos_PR, sin_PR, positions_T, interleaved):
        ctx.save_for_backward(cos_PR, sin_PR, positions_T)
        ctx.interleaved = interleaved
        return _run_at(q_THD, k_TGD, cos_PR, sin_PR, positions_T, interleaved, backward=False)

    @staticmethod
    def backward(ctx, dq_THD, dk_TGD):
        return *_run_at(dq_THD, dk_TGD, *ctx.saved_tensors, ctx.interleaved, backward=True), None, None, None, None


def rotate(q_THD: torch.Tensor, k_TGD: torch.Tensor | None, cos_PR: torch.Tensor, sin_PR: torch.Tensor, positions_T: torch.Tensor,
           interleaved: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`apply_rope` of query and key by the rows ``positions`` of a table, in one launch. ``cos``, ``sin``: fp32 [P, R] of one
    row stride; positions: int [T], within the table."""
    if cos_PR.stride() != sin_PR.stride() or cos_PR.stride(1) != 1:
        cos_PR, sin_PR = dense(cos_PR), dense(sin_PR)
    return _RopeAt.apply(q_THD, k_TGD, cos_PR, sin_PR, positions_T, interleaved)


def table(positions_T: torch.Tensor, frequencies_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) fp32 [T, R] of int64 positions and float64 frequencies; no wait for the device."""
    angles_TR = positions_T.double()[:, None] * frequencies_R
    return angles_TR.cos().float(), angles_TR.sin().float()
