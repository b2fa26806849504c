"""Block-FP8 products on CUDA, in Triton: one linear layer, or all experts of a layer, in one launch.

The equation is that of :mod:`vime.ops.blockwise`. A block of 128 along K is one product of E4M3 tensor cores into registers that
start at zero, as in DeepGEMM; it is multiplied by its scales and added in fp32, block after block, with no fused multiply-add.
What the tensor cores keep of a sum of 128 products is the chip's own (fewer bits than fp32 on Hopper), hence an id of its own in the
contract. One tile serves every number of rows. Weights are quantised on every call, from the bits that are there: a copy that is
kept would have to be compared, which reads as much.
"""
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vime.ops import registry
from vime.ops.cuda import gemm
from vime.ops.cuda.grouped import rows_of_tile, tile_ends
from vime.ops.cuda.tensors import dense, next_power_of_2
from vime.ops.fp8 import BLOCK, FP8_MAX, quantise_blocks, scale_of

IMPLEMENTATION = "cuda/linear_fp8/triton@1"
_TILE = {"BM": 64, "BN": 128, "num_warps": 4, "num_stages": 4, "enable_fp_fusion": False}
_ROWS = 32  # of a weight, in a program that quantises


@triton.jit
def _peaks(w_ptr, block_ptr, most_ptr, R, N: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr):
    """The largest magnitude of each block: a maximum of non-negative numbers, in whatever order."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * C + tl.arange(0, C)
    w = tl.load(w_ptr + r[:, None] * K + k[None, :], mask=(r < R)[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
    block = tl.load(block_ptr + r % N, mask=r < R, other=0) + (r // N) * N
    tl.atomic_max(most_ptr + block * KB + tl.program_id(1), tl.max(tl.abs(w), axis=1), mask=r < R)


@triton.jit
def _quantise(w_ptr, block_ptr, scale_ptr, q_ptr, R, LARGEST: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KB: tl.constexpr,
              C: tl.constexpr, ROWS: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * C + tl.arange(0, C)
    mask = (r < R)[:, None] & (k < K)[None, :]
    w = tl.load(w_ptr + r[:, None] * K + k[None, :], mask=mask, other=0.0).to(tl.float32)
    block = tl.load(block_ptr + r % N, mask=r < R, other=0) + (r // N) * N
    scale = tl.load(scale_ptr + block * KB + tl.program_id(1), mask=r < R, other=1.0)
    q = tl.math.div_rn(w, tl.broadcast_to(scale[:, None], w.shape))
    # a NaN stays one, as on a CPU; by default a maximum would make -LARGEST of it, on both sides alike
    q = tl.maximum(q, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    q = tl.minimum(q, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(q_ptr + r[:, None] * K + k[None, :], q.to(q_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["E"])
def _products(x_ptr, sx_ptr, w_ptr, sw_ptr, block_ptr, y_ptr, source_ptr, target_ptr, row_end_ptr, tile_end_ptr, E, N: tl.constexpr,
              K: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
              PRECISION: tl.constexpr):
    e, source, target, mine = rows_of_tile(source_ptr, target_ptr, row_end_ptr, tile_end_ptr, tl.program_id(1), E, BE, BM)
    if e < E:
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        row_N = (n % N).to(tl.int64) + e.to(tl.int64) * N
        block_N = tl.load(block_ptr + n % N) + e.to(tl.int64) * N
        total = tl.zeros([BM, BN], dtype=tl.float32)
        for b in range(0, KB):
            k = b * C + tl.arange(0, C)
            x = tl.load(x_ptr + source[:, None] * K + k[None, :], mask=k[None, :] < K, other=0.0)
            w = tl.load(w_ptr + k[:, None] + row_N[None, :] * K, mask=k[:, None] < K, other=0.0)
            inner = tl.dot(x, w, input_precision=PRECISION)
            sx = tl.load(sx_ptr + source * KB + b)
            sw = tl.load(sw_ptr + block_N * KB + b)
            total = total + inner * (sx[:, None] * sw[None, :])
        tl.store(y_ptr + target[:, None] * N + n[None, :], total.to(y_ptr.dtype.element_ty), mask=mine[:, None] & (n[None, :] < N))


def quantise_weights(weight_ENK: torch.Tensor, block_N: torch.Tensor | None,
                     dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``q_ENK``, the scale of every block ``[E * N, KB]`` (those that are used), and the block of each row of an expert."""
    experts, rows, width = weight_ENK.shape
    blocks = -(-width // BLOCK)
    if block_N is None:
        block_N = torch.arange(rows, device=weight_ENK.device) // BLOCK
    most = torch.zeros(experts * rows, blocks, device=weight_ENK.device)
    q_ENK = torch.empty(weight_ENK.shape, dtype=dtype, device=weight_ENK.device)
    grid = (triton.cdiv(experts * rows, _ROWS), blocks)
    shape = {"N": rows, "K": width, "KB": blocks, "C": BLOCK, "ROWS": _ROWS}
    _peaks[grid](weight_ENK, block_N, most, experts * rows, **shape)
    scale = scale_of(most)
    _quantise[grid](weight_ENK, block_N, scale, q_ENK, experts * rows, LARGEST=FP8_MAX, **shape, enable_fp_fusion=False)
    return q_ENK, scale, block_N


def multiply(x: tuple[torch.Tensor, torch.Tensor], weight: tuple[torch.Tensor, torch.Tensor, torch.Tensor], source_R: torch.Tensor,
             target_R: torch.Tensor, row_end_E: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``y[target[r]]`` of what is quantised already, ``[R, N]`` in ``dtype``; arguments as of :func:`grouped_linear_fp8`."""
    (xq_SK, sx_SB), (wq_ENK, sw_RB, block_N) = x, weight
    (experts, rows, width), count = wq_ENK.shape, source_R.shape[0]
    y_RN = torch.empty(count, rows, dtype=dtype, device=xq_SK.device)
    tile: dict[str, Any] = _TILE
    tile_end_E = tile_ends(row_end_E, tile["BM"])
    most = triton.cdiv(count, tile["BM"]) + min(experts, count)
    _products[(triton.cdiv(rows, tile["BN"]), most)](
        dense(xq_SK), dense(sx_SB), wq_ENK, sw_RB, block_N, y_RN, source_R, target_R, row_end_E, tile_end_E, experts, N=rows, K=width,
        KB=sx_SB.shape[1], C=BLOCK, BE=max(16, next_power_of_2(experts)), PRECISION="ieee" if xq_SK.dtype == torch.float32 else "tf32",
        **tile)
    return y_RN


def grouped_linear_fp8(x_SK: torch.Tensor, weight_ENK: torch.Tensor, block_N: torch.Tensor | None, source_R: torch.Tensor,
                       target_R: torch.Tensor, row_end_E: torch.Tensor) -> torch.Tensor:
    """:func:`vime.ops.linear_fp8` of each row with its expert's weight, rows as of
    :func:`vime.ops.cuda.grouped.grouped_linear`. No gradient."""
    if not source_R.shape[0]:
        return x_SK.new_empty(0, weight_ENK.shape[1])
    registry.count("linear", IMPLEMENTATION)
    return multiply(quantise_blocks(x_SK.detach()), quantise_weights(dense(weight_ENK.detach()), block_N), source_R, target_R, row_end_E,
                    x_SK.dtype)


class _LinearFp8(gemm._Linear):
    """The backward is that of the ordinary linear layer."""

    @staticmethod
    def forward(ctx, x_TK, weight_NK, block_N):
        ctx.save_for_backward(x_TK, weight_NK)
        rows = x_TK.shape[0]
        every_R = torch.arange(rows, device=x_TK.device)
        return grouped_linear_fp8(x_TK, weight_NK[None], block_N, every_R, every_R, torch.full((1,), rows, device=x_TK.device))

    @staticmethod
    def backward(ctx, dy_TN):
        return *gemm._Linear.backward(ctx, dy_TN), None


def linear_fp8(x_TK: torch.Tensor, weight_NK: torch.Tensor, block_N: torch.Tensor | None) -> torch.Tensor:
    """As :func:`vime.ops.linear_fp8`, without the bias."""
    x2_TK = dense(x_TK.reshape(-1, x_TK.shape[-1]))
    y_TN = _LinearFp8.apply(x2_TK, weight_NK, block_N) if x2_TK.shape[0] else x2_TK @ weight_NK.t()
    return y_TN.reshape(*x_TK.shape[:-1], weight_NK.shape[0])


linear_fp8.vime_id = IMPLEMENTATION  # type: ignore[attr-defined]  # for the contract
