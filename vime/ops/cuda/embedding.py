"""Token embedding on CUDA. The forward copies rows. The backward adds the rows of one token in one order.

Stock backwards add with atomics or in an order that the whole batch decides. Here ids are sorted (stable), and one
program per distinct id walks its rows from the first to the last, in fp32.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from vime.ops.cuda.tensors import rows_of

IMPLEMENTATION = "cuda/embedding/ordered@1"
_BLOCK = 512


@triton.jit
def _ordered_add(dx_ptr, order_ptr, id_ptr, start_ptr, dweight_ptr, H: tl.constexpr, BLOCK: tl.constexpr):
    group = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < H
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(tl.load(start_ptr + group), tl.load(start_ptr + group + 1)):
        row = tl.load(order_ptr + i) * H
        acc += tl.load(dx_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)
    out = tl.load(id_ptr + group) * H
    tl.store(dweight_ptr + out + cols, acc.to(dweight_ptr.dtype.element_ty), mask=mask)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids_T, weight_VH):
        ctx.save_for_backward(ids_T)
        ctx.like = weight_VH.shape, weight_VH.dtype
        return torch.nn.functional.embedding(ids_T, weight_VH)

    @staticmethod
    def backward(ctx, dx_TH):
        (ids_T,) = ctx.saved_tensors
        shape, dtype = ctx.like
        dweight_VH = torch.zeros(shape, dtype=dtype, device=dx_TH.device)
        if ids_T.numel():
            sorted_T, order_T = torch.sort(ids_T.reshape(-1).long(), stable=True)
            id_G, count_G = torch.unique_consecutive(sorted_T, return_counts=True)
            start_G1 = torch.zeros(len(id_G) + 1, dtype=torch.int64, device=dx_TH.device)
            start_G1[1:] = torch.cumsum(count_G, 0)
            H = shape[1]
            _ordered_add[(len(id_G), triton.cdiv(H, _BLOCK))](
                rows_of(dx_TH), order_T, id_G, start_G1, dweight_VH, H=H, BLOCK=_BLOCK
            )
        return None, dweight_VH


def embedding(ids_T: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """``weight[ids]``: [*ids.shape, H]. An id out of range stops the kernel with a device-side assertion."""
    return _Embedding.apply(ids_T, weight_VH)
