"""Causal grouped-query attention on CUDA: FlashAttention-3 at one split, for packed training and the paged cache alike.

A query row meets its keys in tiles of 128 positions counted from the start of its own sequence, whatever the launch
around it looks like; so packing, chunked prefill, a prefix-cache hit and decode give the same bits
(:mod:`vime.ops.providers.fa3` says what is pinned for that). The backward is torch's deterministic flash backward.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from vime.ops.cuda.tensors import dense, empty_rows, next_power_of_2
from vime.ops.providers import fa3

IMPLEMENTATION = "cuda/attention/fa3-split1@1"
KEY_TILE = 128
_EXTENT = "vime_extent"


@triton.jit
def _write(
    k_ptr, v_ptr, cache_ptr, slot_ptr, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    page_stride, kv_stride, row_stride, PAGE: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + t)
    if slot >= 0:
        heads = tl.arange(0, BG)[:, None]
        cols = tl.arange(0, BD)[None, :]
        mask = (heads < G) & (cols < D)
        to = cache_ptr + (slot // PAGE) * page_stride + (slot % PAGE) * row_stride + heads * D + cols
        tl.store(to, tl.load(k_ptr + t * k_stride_t + heads * k_stride_h + cols, mask=mask), mask=mask)
        tl.store(to + kv_stride, tl.load(v_ptr + t * v_stride_t + heads * v_stride_h + cols, mask=mask), mask=mask)


def kv_cache_shape(num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    """[blocks, 2 (key, value), block, kv heads, head dim]."""
    if block_size > fa3.MAX_PAGE or block_size % 16:
        raise ValueError(
            f"block size {block_size} is not covered on CUDA: pages must be a multiple of 16 and at most {fa3.MAX_PAGE} "
            "positions, since larger ones may take another attention kernel. Use 16."
        )
    return (num_blocks, 2, block_size, kv_heads, head_dim)


def kv_cache_write(k_TGD: torch.Tensor, v_TGD: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor) -> None:
    """Write rows into their slots; a negative slot is skipped."""
    k_TGD = k_TGD if k_TGD.stride(-1) == 1 else k_TGD.contiguous()
    v_TGD = v_TGD if v_TGD.stride(-1) == 1 else v_TGD.contiguous()
    T = slot_mapping_T.shape[0]
    _, _, page, G, D = kv_cache.shape
    if T:
        _write[(T,)](
            k_TGD, v_TGD, kv_cache, slot_mapping_T, k_TGD.stride(0), k_TGD.stride(1), v_TGD.stride(0), v_TGD.stride(1),
            kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2), PAGE=page, G=G, D=D,
            BG=next_power_of_2(G), BD=next_power_of_2(D), num_warps=1,
        )


def extent(cu_seqlens_B1: torch.Tensor) -> tuple[int, int]:
    """(longest sequence, rows in all). One wait for the device per pack, not one per layer: kept on the tensor with its version."""
    version = None if cu_seqlens_B1.is_inference() else cu_seqlens_B1._version
    kept = getattr(cu_seqlens_B1, _EXTENT, None)
    if kept is None or version is None or kept[0] != version:
        longest, rows = torch.stack(((cu_seqlens_B1[1:] - cu_seqlens_B1[:-1]).max(), cu_seqlens_B1[-1])).tolist()
        kept = version, longest, rows
        setattr(cu_seqlens_B1, _EXTENT, kept)
    return kept[1], kept[2]


def packed_gradients(ctx: Any, do_THD: torch.Tensor, lse_HT: torch.Tensor) -> tuple[Any, ...]:
    """The backward of both forward kernels: gradients of q, k and v, and nothing for the other three arguments. ``ctx`` has q, k,
    v and the output saved first, and ``cu_seqlens_B1``, ``scale``, ``causal`` as attributes. Rows past the last: zeros."""
    (q_THD, k_TGD, v_TGD, o_THD, *_), cu_seqlens_B1 = ctx.saved_tensors, ctx.cu_seqlens_B1
    longest, packed = extent(cu_seqlens_B1)
    grads = fa3.backward(dense(do_THD), q_THD, k_TGD, v_TGD, o_THD, lse_HT, cu_seqlens_B1, longest, ctx.scale, ctx.causal)
    if packed < q_THD.shape[0]:
        for grad in grads:
            grad[packed:].zero_()
    return *grads, None, None, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THD, k_TGD, v_TGD, cu_seqlens_B1, scale, causal):
        T = q_THD.shape[0]
        o_THD, lse_HT = fa3.forward(
            q_THD, k_TGD, v_TGD, cu_seqlens_B1, T, T, scale, causal, key_start_B1=cu_seqlens_B1,
            out_THD=torch.zeros_like(q_THD),
        )
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, o_THD, lse_HT)
        ctx.scale, ctx.causal, ctx.cu_seqlens_B1 = scale, causal, cu_seqlens_B1  # itself: what is known of it is kept on it
        return o_THD

    @staticmethod
    def backward(ctx, do_THD):
        return packed_gradients(ctx, do_THD, ctx.saved_tensors[4])


def packed_by(function: type[torch.autograd.Function]) -> Callable[..., torch.Tensor]:
    """``attention_varlen`` of a kernel."""

    def attention_varlen(
        q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, cu_seqlens_B1: torch.Tensor, scale: float, causal: bool
    ) -> torch.Tensor:
        """Packed sequences. q: bf16 [T, heads, D]; k, v: [T, groups, D]; cu_seqlens: [B + 1]. Rows past the last: zeros."""
        if q_THD.shape[0] == 0 or cu_seqlens_B1.numel() < 2:
            return torch.zeros_like(q_THD)
        return function.apply(dense(q_THD), dense(k_TGD), dense(v_TGD), cu_seqlens_B1.to(q_THD.device, torch.int32), scale, causal)

    return attention_varlen


def paged_by(into: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``attention_paged`` of a kernel whose ``attention_paged_into`` this is."""

    def attention_paged(
        q_THD: torch.Tensor, kv_cache: torch.Tensor, block_table_BM: torch.Tensor, seq_lens_B: torch.Tensor,
        query_start_loc_B1: torch.Tensor, scale: float,
    ) -> torch.Tensor:
        """The same rows over the paged cache (:func:`kv_cache_shape`). Rows past the last query: zeros."""
        T, H, D = q_THD.shape
        if T == 0:
            return torch.zeros_like(q_THD)
        out_THD = empty_rows(T, H * D, q_THD).zero_().view(T, H, D)
        return into(out_THD, q_THD, kv_cache, block_table_BM, seq_lens_B, query_start_loc_B1, scale, None)

    return attention_paged


def attention_plan(
    q_THD: torch.Tensor, kv_cache: torch.Tensor, block_table_BM: torch.Tensor, seq_lens_B: torch.Tensor, query_start_loc_B1: torch.Tensor,
) -> torch.Tensor:
    """For :func:`attention_paged_into` with these shapes and lengths, in all layers of a step."""
    _, _, page, groups, dim = kv_cache.shape
    return fa3.paged_plan(q_THD.shape[1], groups, dim, page, q_THD.shape[0], block_table_BM.shape[1] * page,
                          query_start_loc_B1.to(torch.int32), seq_lens_B.to(torch.int32))


def attention_paged_into(
    out_THD: torch.Tensor, q_THD: torch.Tensor, kv_cache: torch.Tensor, block_table_BM: torch.Tensor, seq_lens_B: torch.Tensor,
    query_start_loc_B1: torch.Tensor, scale: float, plan: torch.Tensor | None,
) -> torch.Tensor:
    """:func:`attention_paged`, written into ``out`` (contiguous, aligned). Rows past the last query keep what they held."""
    if q_THD.shape[0] == 0:
        return out_THD
    q_THD = dense(q_THD)
    fa3.forward(
        q_THD, kv_cache[:, 0], kv_cache[:, 1], query_start_loc_B1.to(torch.int32), q_THD.shape[0],
        block_table_BM.shape[1] * kv_cache.shape[2], scale, True, used_keys_B=seq_lens_B.to(torch.int32),
        block_table_BM=block_table_BM[: seq_lens_B.shape[0]].to(torch.int32), out_THD=out_THD, plan=plan,
    )
    return out_THD


attention_varlen, attention_paged = packed_by(_Attention), paged_by(attention_paged_into)
