"""SiLU-and-multiply on CUDA: ``silu(gate) * up`` in fp32, rounded once (Shazeer 2020). Elementwise, no reduction."""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from vime.ops.cuda.tensors import empty_rows, rows_of

IMPLEMENTATION = "cuda/activation/triton@1"
_BLOCK = 1024


@triton.jit
def _forward(x_ptr, y_ptr, F: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < F
    gate = tl.load(x_ptr + row * (2 * F) + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * (2 * F) + F + cols, mask=mask, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * F + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward(dy_ptr, x_ptr, dx_ptr, F: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < F
    gate = tl.load(x_ptr + row * (2 * F) + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * (2 * F) + F + cols, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * F + cols, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    dup = dy * gate * sigmoid
    tl.store(dx_ptr + row * (2 * F) + cols, dgate.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dx_ptr + row * (2 * F) + F + cols, dup.to(dx_ptr.dtype.element_ty), mask=mask)


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_T2F):
        T, F = x_T2F.shape[0], x_T2F.shape[1] // 2
        y_TF = empty_rows(T, F, x_T2F)
        if T:
            _forward[(T, triton.cdiv(F, _BLOCK))](x_T2F, y_TF, F=F, BLOCK=_BLOCK, enable_fp_fusion=False)
        ctx.save_for_backward(x_T2F)
        return y_TF

    @staticmethod
    def backward(ctx, dy_TF):
        (x_T2F,) = ctx.saved_tensors
        T, F = x_T2F.shape[0], x_T2F.shape[1] // 2
        dx_T2F = torch.empty_like(x_T2F)
        if T:
            _backward[(T, triton.cdiv(F, _BLOCK))](rows_of(dy_TF), x_T2F, dx_T2F, F=F, BLOCK=_BLOCK, enable_fp_fusion=False)
        return dx_T2F


def silu_and_mul(x_T2F: torch.Tensor) -> torch.Tensor:
    """x: fp32 or bf16 [..., 2F], gate half first. Returns [..., F] in the dtype of x."""
    return _SiluAndMul.apply(rows_of(x_T2F)).view(*x_T2F.shape[:-1], x_T2F.shape[-1] // 2)
