"""Cells of latent attention's paged cache on CUDA, in Triton: written by slot, and read by a list. Copies and single roundings only."""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from vime.ops.cuda.tensors import dense, next_power_of_2
from vime.ops.fp8 import BLOCK

_TILE = 32


@triton.jit
def _write(cell_ptr, cache_ptr, slot_ptr, W: tl.constexpr, cache_stride, BW: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + t).to(tl.int64)
    w = tl.arange(0, BW)
    if slot >= 0:
        tl.store(cache_ptr + slot * cache_stride + w, tl.load(cell_ptr + t * W + w, mask=w < W), mask=w < W)


def write_cells(cells_TW: torch.Tensor, cache_SW: torch.Tensor, slots_T: torch.Tensor) -> None:
    """``cache[slots[t], :W] = cells[t]``; a negative slot is no cell. The cache may be wider, in one piece or not."""
    if cells_TW.shape[0]:
        width = cells_TW.shape[1]
        _write[(cells_TW.shape[0],)](dense(cells_TW), cache_SW, slots_T, W=width, cache_stride=cache_SW.stride(0),
                                     BW=next_power_of_2(width), num_warps=4)


@triton.jit
def _dequantise(q_ptr, scale_ptr, key_ptr, slot_ptr, n_ptr, out_ptr, K, q_stride, scale_stride, key_stride, L: tl.constexpr,
                R: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)
    listed = j < tl.load(n_ptr + t)
    slot = tl.load(slot_ptr + t * K + j, mask=listed, other=0).to(tl.int64)
    d, r = tl.arange(0, BL), tl.arange(0, BR)
    left = listed[:, None] & (d < L)[None, :]
    q = tl.load(q_ptr + slot[:, None] * q_stride + d[None, :], mask=left, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + slot[:, None] * scale_stride + (d // C)[None, :], mask=left, other=0.0)
    to = out_ptr + (t * K + j)[:, None] * (L + R)
    tl.store(to + d[None, :], (q * scale).to(out_ptr.dtype.element_ty), mask=left)
    right = listed[:, None] & (r < R)[None, :]
    tl.store(to + L + r[None, :], tl.load(key_ptr + slot[:, None] * key_stride + r[None, :], mask=right), mask=right)


def dequantised_rows(cache_SW: torch.Tensor, slots_TK: torch.Tensor, count_T: torch.Tensor, rank: int, rope: int,
                     dtype: torch.dtype) -> torch.Tensor:
    """The rows ``[compressed | rotated key]`` of the first ``count[t]`` listed cells of an FP8 cache, ``[T * K, rank + rope]``; the
    others are undefined.

    Args:
        cache_SW: uint8, cells as :class:`vime.vllm.latent_rows.RowFormat` packs them with ``fp8``; ``W`` may be more than they take.
        slots_TK: int32 or int64.
    """
    tokens, k = slots_TK.shape
    out = torch.empty(tokens * k, rank + rope, dtype=dtype, device=cache_SW.device)
    if out.numel():
        scales, size = -(-rank // BLOCK), dtype.itemsize
        q_SL = cache_SW[:, :rank].view(torch.float8_e4m3fn)
        scale_SB = cache_SW[:, rank:rank + 4 * scales].view(torch.float32)
        key_SR = cache_SW[:, rank + 4 * scales:rank + 4 * scales + rope * size].view(dtype)
        _dequantise[(tokens, triton.cdiv(k, _TILE))](
            q_SL, scale_SB, key_SR, dense(slots_TK), count_T, out, k, q_SL.stride(0), scale_SB.stride(0), key_SR.stride(0), L=rank, R=rope,
            BL=max(16, next_power_of_2(rank)), BR=max(16, next_power_of_2(rope)), C=BLOCK, TILE=_TILE, num_warps=4, enable_fp_fusion=False)
    return out
