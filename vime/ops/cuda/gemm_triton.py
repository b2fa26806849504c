"""A GEMM whose order along K is written in its loop: the route for shapes that cuBLAS cannot be proven on.

One tile size for every M: blocks of 64 along K, first to last, accumulated in fp32 by the tensor cores, rounded once.
"""
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_TILE = {"BM": 128, "BN": 128, "BK": 64, "GROUP": 8}
#: For at most 64 rows: narrow tiles keep more multiprocessors reading the weight. The order along K is the same.
_NARROW = {"BM": 64, "BN": 32, "BK": 128, "GROUP": 8}


@triton.jit(do_not_specialize=["M"])
def _gemm(
    a_ptr, b_ptr, c_ptr, M, N: tl.constexpr, K: tl.constexpr,
    stride_am, stride_ak, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    group = pid // (GROUP * tiles_n)
    first = group * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    tile_m = first + (pid % (GROUP * tiles_n)) % height
    tile_n = (pid % (GROUP * tiles_n)) // height
    rows = tile_m * BM + tl.arange(0, BM)
    cols = tile_n * BN + tl.arange(0, BN)
    row_in = (rows % M).to(tl.int64)
    col_in = (cols % N).to(tl.int64)
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        ks = k * BK + tl.arange(0, BK)
        a = tl.load(a_ptr + row_in[:, None] * stride_am + ks[None, :] * stride_ak, mask=ks[None, :] < K, other=0.0)
        b = tl.load(b_ptr + ks[:, None] * stride_bk + col_in[None, :] * stride_bn, mask=ks[:, None] < K, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    out = c_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(out, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


def mm(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """``a @ b`` for fp32 or bf16 operands of any strides; contiguous [M, N] in their dtype."""
    if a_MK.dtype == torch.float32:
        return _launch(a_MK, b_KN, _TILE | {"BM": 64, "BN": 64, "BK": 32}, PRECISION="ieee", num_warps=4, num_stages=2)
    return _launch(a_MK, b_KN, _TILE, PRECISION="tf32", num_warps=8, num_stages=4)


def narrow(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """:func:`mm` for few rows of bf16, in one row of narrow tiles."""
    return _launch(a_MK, b_KN, _NARROW, PRECISION="tf32", num_warps=4, num_stages=4)


def _launch(a_MK: torch.Tensor, b_KN: torch.Tensor, tile: dict[str, int], **options: Any) -> torch.Tensor:
    (M, K), N = a_MK.shape, b_KN.shape[1]
    c_MN = torch.empty(M, N, dtype=a_MK.dtype, device=a_MK.device)
    if M and N:
        grid = (triton.cdiv(M, tile["BM"]) * triton.cdiv(N, tile["BN"]),)
        _gemm[grid](a_MK, b_KN, c_MN, M, N, K, a_MK.stride(0), a_MK.stride(1), b_KN.stride(0), b_KN.stride(1), **options, **tile)
    return c_MN
