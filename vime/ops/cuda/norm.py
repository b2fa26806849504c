"""RMSNorm on CUDA: one program a row, so a row never learns how many neighbours it has.

    y = (x * rsqrt(mean(x^2) + eps) * w)    all in fp32, rounded once

(Zhang & Sennrich 2019.) The additions of a row happen in an order that only the hidden size fixes: block and warps are
chosen from it alone. The fused form rounds the residual sum to the model dtype first and normalises the rounded value,
the order in which Megatron adds and normalises; it is the same kernel, so both give the same bits.
"""
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vime.ops.cuda.tensors import dense, empty_rows, next_power_of_2, rows_of

IMPLEMENTATION = "cuda/norm/triton-row@1"
_MAX_PARTIALS = 256


@triton.jit
def _forward(x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, eps, H: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * H
    cols = tl.arange(0, BLOCK)
    mask = cols < H
    x = tl.load(x_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)
        rounded = (x + residual).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row + cols, rounded, mask=mask)
        x = rounded.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / H + eps)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    y = x * rstd * weight
    tl.store(y_ptr + row + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "ROWS"])
def _backward(
    dy_ptr, x_ptr, weight_ptr, dsum_ptr, dx_ptr, dweight_ptr, eps, T, ROWS,
    H: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):
    part = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < H
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], dtype=tl.float32)
    for t in range(part * ROWS, tl.minimum(T, (part + 1) * ROWS)):
        row = t * H
        x = tl.load(x_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=0) / H + eps)
        xhat = x * rstd
        dweight += dy * xhat
        wdy = dy * weight
        dx = (wdy - xhat * (tl.sum(wdy * xhat, axis=0) / H)) * rstd
        if ADD:
            dx += tl.load(dsum_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dweight_ptr + part * H + cols, dweight, mask=mask)


def _launch(H: int) -> dict[str, Any]:
    block = next_power_of_2(H)
    return {"H": H, "BLOCK": block, "num_warps": min(16, max(1, block // 512)), "enable_fp_fusion": False}


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, residual_TH, weight_H, eps):
        T, H = x_TH.shape
        add = residual_TH is not None
        y_TH = empty_rows(T, H, x_TH)
        sum_TH = torch.empty_like(x_TH) if add else x_TH
        if T:
            _forward[(T,)](x_TH, residual_TH if add else x_TH, weight_H, y_TH, sum_TH, eps, ADD=add, **_launch(H))
        ctx.save_for_backward(sum_TH, weight_H)
        ctx.eps, ctx.add = eps, add
        return (y_TH, sum_TH) if add else y_TH

    @staticmethod
    def backward(ctx, dy_TH, dsum_TH=None):
        x_TH, weight_H = ctx.saved_tensors
        T, H = x_TH.shape
        dy_TH = dense(dy_TH)
        dsum_TH = dense(dsum_TH) if ctx.add else dy_TH
        dx_TH = torch.empty_like(x_TH)
        rows = max(1, -(-T // _MAX_PARTIALS))
        parts = max(1, -(-T // rows))
        partial_PH = (torch.empty if T else torch.zeros)(parts, H, dtype=torch.float32, device=x_TH.device)
        if T:
            _backward[(parts,)](
                dy_TH, x_TH, weight_H, dsum_TH, dx_TH, partial_PH, ctx.eps, T, rows, ADD=ctx.add, **_launch(H)
            )
        return dx_TH, dx_TH if ctx.add else None, partial_PH.sum(0).to(weight_H.dtype), None


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension. x: fp32 or bf16 [..., H]; weight: [H]; eps: added to the mean of squares."""
    return _RmsNorm.apply(rows_of(x_TH), None, dense(weight_H), float(eps)).view(x_TH.shape)


def add_rms_norm(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``s = round(x + residual)``; returns (rms_norm(s), s), both [..., H] in the dtype of x."""
    y_TH, sum_TH = _RmsNorm.apply(rows_of(x_TH), rows_of(residual_TH), dense(weight_H), float(eps))
    return y_TH.view(x_TH.shape), sum_TH.view(x_TH.shape)
