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


@triton.jit(do_not_specialize=["K", "table_stride", "block"])
def _list(position_ptr, table_ptr, row_ptr, slot_ptr, n_ptr, at_ptr, write_ptr, count_ptr, K, table_stride, block, BLOCK: tl.constexpr,
          COUNT: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    table = table_ptr + tl.load(row_ptr + t) * table_stride
    n = tl.full([], 0, tl.int32) + K
    for first in range(0, K, BLOCK):
        k = first + tl.arange(0, BLOCK)
        position = tl.load(position_ptr + t * K + k, mask=k < K, other=-1)
        listed = position >= 0
        cell = tl.load(table + position // block, mask=listed, other=0) * block + position % block
        tl.store(slot_ptr + t * K + k, tl.where(listed, cell, -1), mask=k < K)
        n = tl.minimum(n, tl.min(tl.where(listed, K, k)))
    tl.store(n_ptr + t, n)
    if COUNT:  # noqa: SIM102  (decided when it is compiled)
        # vLLM gives no sequence its first block, so a token there is one of a step that only warms up
        if tl.load(write_ptr + t) >= block:
            seen = tl.load(at_ptr + t) + 1
            tl.atomic_add(count_ptr, seen)  # of integers, in whatever order
            tl.atomic_add(count_ptr + 1, seen - n)


def list_cells(positions_TK: torch.Tensor, table_BM: torch.Tensor, row_T: torch.Tensor, position_T: torch.Tensor, slots_T: torch.Tensor, block: int,
               counts_2: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`vime.ops.paged.list_cells`."""
    tokens, k = positions_TK.shape
    slots_TK = torch.empty(tokens, k, dtype=torch.int32, device=positions_TK.device)
    n_T = torch.empty(tokens, dtype=torch.int32, device=positions_TK.device)
    if tokens:
        _list[(tokens,)](dense(positions_TK.to(torch.int32)), table_BM, row_T, slots_TK, n_T, position_T, slots_T, n_T if counts_2 is None else counts_2,
                         k, table_BM.stride(0), block, BLOCK=min(1024, max(16, next_power_of_2(k))), COUNT=counts_2 is not None, num_warps=4)
    return slots_TK, n_T


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
