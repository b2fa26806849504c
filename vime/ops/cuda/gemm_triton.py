"""A GEMM whose order along K is written in its loop: the route for shapes that cuBLAS cannot be proven on.

One tile size for every M: blocks of 64 along K, first to last, accumulated in fp32 by the tensor cores, rounded once.
"""
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_TILE = {"BM": 128, "BN": 128, "BK": 64, "GROUP": 8}
#: Tiles for few rows, by dtype: small ones keep more multiprocessors reading the weight. The order along K is the same. The number of a
#: tile is its place here; :mod:`vime.ops.cuda.gemm` proves and times them.
FEW: dict[torch.dtype, tuple[dict[str, Any], ...]] = {
    torch.bfloat16: ({"BM": 16, "BN": 32, "BK": 256, "num_warps": 4, "num_stages": 4},
                     {"BM": 16, "BN": 16, "BK": 256, "num_warps": 2, "num_stages": 4},
                     {"BM": 16, "BN": 64, "BK": 128, "num_warps": 4, "num_stages": 5},
                     {"BM": 64, "BN": 32, "BK": 128, "num_warps": 4, "num_stages": 4}),
    torch.float32: ({"BM": 4, "BN": 16, "BK": 128, "num_warps": 2, "num_stages": 3},
                    {"BM": 16, "BN": 16, "BK": 128, "num_warps": 4, "num_stages": 3}),
}


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


@triton.jit(do_not_specialize=["M"])
def _few(a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
         PRECISION: tl.constexpr):
    """As :func:`_gemm`; no size is compiled in, so one compilation serves every shape."""
    row_M = tl.program_id(1) * BM + tl.arange(0, BM)
    col_N = tl.program_id(0) * BN + tl.arange(0, BN)
    in_M, in_N = row_M.to(tl.int64), tl.where(col_N < N, col_N, 0).to(tl.int64)
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        k_K = k * BK + tl.arange(0, BK)
        a = tl.load(a_ptr + in_M[:, None] * stride_am + k_K[None, :] * stride_ak, mask=(row_M < M)[:, None] & (k_K < K)[None, :], other=0.0)
        b = tl.load(b_ptr + k_K[:, None] * stride_bk + in_N[None, :] * stride_bn, mask=k_K[:, None] < K, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    tl.store(c_ptr + row_M.to(tl.int64)[:, None] * N + col_N[None, :], acc.to(c_ptr.dtype.element_ty),
             mask=(row_M[:, None] < M) & (col_N[None, :] < N))


def few(a_MK: torch.Tensor, b_KN: torch.Tensor, which: int) -> torch.Tensor:
    """:func:`mm` of few rows by the tile ``FEW[dtype][which]``."""
    (M, K), N = a_MK.shape, b_KN.shape[1]
    c_MN = torch.empty(M, N, dtype=a_MK.dtype, device=a_MK.device)
    if M and N:
        tile = FEW[a_MK.dtype][which]
        _few[(triton.cdiv(N, tile["BN"]), triton.cdiv(M, tile["BM"]))](
            a_MK, b_KN, c_MN, M, N, K, a_MK.stride(0), a_MK.stride(1), b_KN.stride(0), b_KN.stride(1),
            PRECISION="ieee" if a_MK.dtype == torch.float32 else "tf32", **tile)
    return c_MN


def _launch(a_MK: torch.Tensor, b_KN: torch.Tensor, tile: dict[str, int], **options: Any) -> torch.Tensor:
    (M, K), N = a_MK.shape, b_KN.shape[1]
    c_MN = torch.empty(M, N, dtype=a_MK.dtype, device=a_MK.device)
    if M and N:
        grid = (triton.cdiv(M, tile["BM"]) * triton.cdiv(N, tile["BN"]),)
        _gemm[grid](a_MK, b_KN, c_MN, M, N, K, a_MK.stride(0), a_MK.stride(1), b_KN.stride(0), b_KN.stride(1), **options, **tile)
    return c_MN
