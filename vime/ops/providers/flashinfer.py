"""FlashInfer's paged prefill kernel (``fa2``, FlashInfer 0.6.14) at one tile, for training, prefill and decode alike.

FlashInfer by itself chooses the tile of query rows by the average length of the batch, splits keys over programs, and decodes
with another kernel. Tiles of 16 rows share keys among warps, so each choice is another order of additions. Here its planner is
not asked: the schedule that it would write is made on the device, always in tiles of ``TILE`` packed rows (query rows times the
query heads of a group), which one warp a row walks over the keys from the sequence's first, and never split. A single query is
a tile with one row. Packed training sequences are pages of one position. So there is one kernel and one order for all.

A row's keys in a tile past its own position are masked to a weight of exactly 0, but how many such tiles of keys it meets
depends on the rows that share its tile, so each must leave the row's sums as they were. They are scaled by
``exp2(m_old * scale - m * scale)``, which is 1 for an unmoved maximum only if both products are rounded alike: contracted to one
fused multiply-add (``-use_fast_math``, FlashInfer's default) it is 2 to the rounding error of ``m * scale``, and a row differs now
and then. So the kernel is compiled by FlashInfer with ``-fmad=false``, under a name of its own, on first use (``nvcc``; about
a minute for each head width).
"""
from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import math
import os
from collections.abc import Sequence
from typing import Any

import torch

from vime.ops.providers.fa3 import KernelMissing

#: Packed query rows of a program: FlashInfer's widest, with one warp for each 32 rows and none that share keys.
TILE = 128
WIDTHS = (64, 128)
#: FlashInfer's ``PrefillPlanInfo`` is a list of 15 numbers in this order; all offsets are bytes into the schedule.
_FIELDS = ("padded_batch_size", "total_num_rows", "total_num_rows_offset", "cta_tile_q", "request_indices_offset",
           "qo_tile_indices_offset", "kv_tile_indices_offset", "merge_indptr_offset", "o_indptr_offset", "kv_chunk_size_ptr_offset",
           "v_offset", "s_offset", "block_valid_mask_offset", "enable_cuda_graph", "split_kv")
_CAUSAL, _NHD = 1, 0
#: Products and sums are rounded one by one: see above.
FLAGS = ("-fmad=false",)


@functools.cache
def _module(head_dim: int) -> Any:
    """The compiled kernel for bf16 and this head width. Raises :class:`KernelMissing`."""
    if head_dim not in WIDTHS:
        raise KernelMissing(f"FlashInfer's prefill kernel is used for heads of {' or '.join(map(str, WIDTHS))} here, this model has "
                            f"{head_dim}; say --vllm-attention-backend flash_attn")
    try:
        from flashinfer.jit import gen_batch_prefill_module
    except ImportError as error:
        raise KernelMissing(f"FlashInfer cannot be imported ({error}). Install flashinfer-python==0.6.14, or say "
                            "--vllm-attention-backend flash_attn") from error
    bf16 = torch.bfloat16
    # dtypes of q, k and v, output, indices; widths of q.k and of v; no rotation, window, cap or fp16 products
    spec = gen_batch_prefill_module("fa2", bf16, bf16, bf16, torch.int32, head_dim, head_dim, 0, False, False, False)
    spec = dataclasses.replace(spec, name=f"{spec.name}_vime_unfused", extra_cuda_cflags=[*(spec.extra_cuda_cflags or ()), *FLAGS])
    return spec.build_and_load()


def built_with() -> str:
    """FlashInfer's version, and variables that name another compiler or add flags (they come last and may take ours back)."""
    try:
        found = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return "missing"
    added = [f"{name}={os.environ[name]}" for name in ("FLASHINFER_NVCC", "FLASHINFER_EXTRA_CUDAFLAGS") if os.environ.get(name)]
    return ", ".join([found, *added])


@functools.cache
def _no_workspace(device: torch.device) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8, device=device)  # where split keys would be merged


def programs(rows: int, sequences: int, group: int) -> int:
    """An upper bound on tiles of ``rows`` query rows in so many sequences."""
    return rows * group // TILE + sequences


def schedule(query_start_B1: torch.Tensor, rows: int, group: int) -> torch.Tensor:
    """What FlashInfer's planner would write for tiles of ``TILE`` and unsplit keys: int32, of a size that shapes alone decide.

    Sequence and tile number of each program, zeros for the part of the keys, the first output row of each sequence, and a
    size of parts that the kernel divides by and does not use. Programs past the last tile repeat the first one, which writes the same bits again.
    """
    start = query_start_B1.to(torch.int32)
    device, sequences = start.device, start.shape[0] - 1
    count = programs(rows, sequences, group)
    tiles_B = ((start[1:] - start[:-1]) * group + TILE - 1) // TILE
    end_B = tiles_B.cumsum(0, dtype=torch.int32)
    at_P = torch.arange(count, dtype=torch.int32, device=device)
    request_P = torch.searchsorted(end_B, at_P, right=True, out_int32=True).clamp_(max=sequences - 1)
    used_P = at_P < end_B[-1]
    first_B = end_B - tiles_B
    tile_P = torch.where(used_P, at_P - first_B[request_P.long()], 0)
    zeros = torch.zeros(_aligned(count), dtype=torch.int32, device=device)
    whole = torch.full((4,), 1 << 30, dtype=torch.int32, device=device)
    parts = [_padded(torch.where(used_P, request_P, 0)), _padded(tile_P), zeros, _padded(start), whole]
    return torch.cat(parts).to(torch.int32)


def _aligned(count: int) -> int:
    return -(-count // 4) * 4  # 16 bytes


def _padded(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, _aligned(values.shape[0]) - values.shape[0]))


def plan_numbers(rows: int, sequences: int, group: int) -> list[int]:
    """``PrefillPlanInfo`` for a schedule of :func:`schedule`."""
    count = programs(rows, sequences, group)
    step = 4 * _aligned(count)
    fields = dict.fromkeys(_FIELDS, 0) | {
        "padded_batch_size": count, "total_num_rows": rows, "cta_tile_q": TILE, "qo_tile_indices_offset": step,
        "kv_tile_indices_offset": 2 * step, "o_indptr_offset": 3 * step,
        "kv_chunk_size_ptr_offset": 3 * step + 4 * _aligned(sequences + 1)}
    return [fields[name] for name in _FIELDS]


def forward(
    q_THD: torch.Tensor, k_NPGD: torch.Tensor, v_NPGD: torch.Tensor, query_start_B1: torch.Tensor, page_start_B1: torch.Tensor,
    pages: torch.Tensor, last_page_B: torch.Tensor, scale: float, out_THD: torch.Tensor, plan: torch.Tensor | None = None,
    lse_TH: torch.Tensor | None = None,
) -> None:
    """Causal attention into ``out_THD`` (and log2-sum-exp into ``lse_TH``, fp32).

    Sequence b has the pages ``pages[page_start[b]:page_start[b + 1]]`` of ``k``, ``v`` (``[pages, page, groups, D]``, alike in
    strides), of which all but the last are full; ``last_page_B`` may be negative where pages past its end are listed. All
    indices int32. ``plan``: of :func:`schedule`, for these starts.
    """
    rows, heads, dim = q_THD.shape
    group, sequences = heads // k_NPGD.shape[2], query_start_B1.shape[0] - 1
    if plan is None:
        plan = schedule(query_start_B1, rows, group)
    q_THD, k_NPGD, v_NPGD = q_THD.detach(), k_NPGD.detach(), v_NPGD.detach()  # what has a gradient is not handed to a foreign library
    nothing: Sequence[None] = (None,) * 8  # custom mask and its starts, ALiBi, prefixes, items and their longest, scales of K and V
    _module(dim).paged_run(
        _no_workspace(q_THD.device), plan.view(torch.uint8), plan_numbers(rows, sequences, group), q_THD, k_NPGD, v_NPGD, query_start_B1,
        page_start_B1, pages, last_page_B, out_THD, lse_TH, _CAUSAL, _NHD, -1, False, *nothing, 0.0, scale, 1.0, 1e-4, 0)


def natural(lse_TH: torch.Tensor) -> torch.Tensor:
    """Natural log-sum-exp ``[heads, T]``, as a flash backward takes it."""
    return (lse_TH * math.log(2.0)).t().contiguous()
