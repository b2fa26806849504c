"""Causal grouped-query attention, one definition for packed training sequences and the paged cache of an engine.

Online softmax (arXiv:2205.14135) over key tiles whose boundaries lie at multiples of 64 *positions of the sequence*.
So the order of additions of a query row depends on its own position only: chunked prefill, a prefix-cache hit, decode
and a packed training row give the same bits. A tile that is masked for a row is an exact no-op for it.
"""
from __future__ import annotations

import torch

from vime.ops import registry

#: Keys a softmax step covers. Part of the contract.
KEY_TILE = 64


def attention_varlen(q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, cu_seqlens_B1: torch.Tensor,
                     scale: float, causal: bool = True) -> torch.Tensor:
    """``o = softmax(scale * q k^T + mask) v`` within each packed sequence.

    Args:
        q_THD: fp32 or bf16 ``[T, heads, D]``; k_TGD, v_TGD: same dtype ``[T, groups, D]``, heads % groups == 0; query
            head h reads key head ``h // (heads // groups)``. May be strided in the first two dimensions.
        cu_seqlens_B1: int32 ``[B + 1]``, ``0 = c0 <= c1 <= ... <= T``. Rows past the last one come out as zeros.
        scale: factor of the scores.
        causal: mask later positions of the sequence.

    Returns:
        ``o_THD``, dtype of ``q_THD``; softmax statistics and sums in fp32, one rounding. Differentiable in q, k, v; the
        backward is deterministic.
    """
    _check_qkv("attention_varlen", q_THD, k_TGD, v_TGD)
    if cu_seqlens_B1.dim() != 1 or cu_seqlens_B1.numel() < 1 or cu_seqlens_B1.is_floating_point():
        raise ValueError(f"attention_varlen: cu_seqlens must be int32 [B + 1], found {cu_seqlens_B1.dtype} {tuple(cu_seqlens_B1.shape)}")
    return registry.call("attention", "attention_varlen", q_THD, q_THD, k_TGD, v_TGD, cu_seqlens_B1, float(scale), bool(causal))


def kv_cache_shape(num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype,
                   device: torch.device | str = "cpu") -> tuple[int, ...]:
    """Shape of the cache tensor (contiguous, blocks first). The order inside a block is the implementation's own."""
    return registry.resolve("attention", device, dtype).functions["kv_cache_shape"](
        num_blocks, block_size, kv_heads, head_dim, dtype)


def kv_cache_write(k_TGD: torch.Tensor, v_TGD: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor) -> None:
    """Write keys and values of T tokens into their slots (block * block_size + offset), in place.

    ``slot_mapping_T`` is int64; a negative slot is padding and skipped. ``k``, ``v`` may have more rows than slots.
    """
    if k_TGD.shape != v_TGD.shape or k_TGD.dim() != 3 or slot_mapping_T.dim() != 1 or slot_mapping_T.shape[0] > k_TGD.shape[0]:
        raise ValueError(f"kv_cache_write: k {tuple(k_TGD.shape)}, v {tuple(v_TGD.shape)}, slots {tuple(slot_mapping_T.shape)} do not fit")
    registry.call("attention", "kv_cache_write", k_TGD, k_TGD, v_TGD, kv_cache, slot_mapping_T)


def attention_paged(q_THD: torch.Tensor, kv_cache: torch.Tensor, block_table_BM: torch.Tensor, seq_lens_B: torch.Tensor,
                    query_start_loc_B1: torch.Tensor, scale: float) -> torch.Tensor:
    """The bits of :func:`attention_varlen`, for the last ``query_start_loc[b+1] - query_start_loc[b]`` positions of each
    sequence, over keys and values in the paged cache (written before, those of the queries included).

    Args:
        q_THD: as in :func:`attention_varlen`.
        kv_cache: see :func:`kv_cache_shape`.
        block_table_BM: int32 block numbers of each sequence, in order.
        seq_lens_B: int32 total lengths (cached plus new).
        query_start_loc_B1: int32 ``[B + 1]``; rows of ``q_THD`` past the last one come out as zeros.

    Returns:
        ``o_THD``. Not differentiable.
    """
    _check_paged(q_THD, kv_cache, block_table_BM, seq_lens_B, query_start_loc_B1)
    return registry.call("attention", "attention_paged", q_THD, q_THD, kv_cache, block_table_BM, seq_lens_B,
                         query_start_loc_B1, float(scale))


def attention_plan(q_THD: torch.Tensor, kv_cache: torch.Tensor, block_table_BM: torch.Tensor, seq_lens_B: torch.Tensor,
                   query_start_loc_B1: torch.Tensor) -> torch.Tensor | None:
    """What all layers of an engine step share, for :func:`attention_paged_into` with tensors of these shapes and the same lengths:
    how the rows are dealt to the device. None where the device has no use for it."""
    make = registry.resolve("attention", q_THD.device, q_THD.dtype).functions.get("attention_plan")
    return None if make is None or q_THD.shape[0] == 0 else make(q_THD, kv_cache, block_table_BM, seq_lens_B, query_start_loc_B1)


def attention_paged_into(out_THD: torch.Tensor, q_THD: torch.Tensor, kv_cache: torch.Tensor, block_table_BM: torch.Tensor,
                         seq_lens_B: torch.Tensor, query_start_loc_B1: torch.Tensor, scale: float,
                         plan: torch.Tensor | None = None) -> torch.Tensor:
    """:func:`attention_paged` written into ``out_THD``, shape and dtype of ``q_THD``; the same bits. Rows past the last query are
    undefined. ``plan``: see :func:`attention_plan`. Returns ``out_THD``."""
    _check_paged(q_THD, kv_cache, block_table_BM, seq_lens_B, query_start_loc_B1)
    if out_THD.shape != q_THD.shape or out_THD.dtype is not q_THD.dtype:
        raise ValueError(f"attention_paged_into: out {tuple(out_THD.shape)} {out_THD.dtype} is not like q {tuple(q_THD.shape)} {q_THD.dtype}")
    functions = registry.resolve("attention", q_THD.device, q_THD.dtype).functions
    if "attention_paged_into" in functions and out_THD.is_contiguous() and out_THD.data_ptr() % 16 == 0:
        return registry.call("attention", "attention_paged_into", q_THD, out_THD, q_THD, kv_cache, block_table_BM, seq_lens_B,
                             query_start_loc_B1, float(scale), plan)
    return out_THD.copy_(attention_paged(q_THD, kv_cache, block_table_BM, seq_lens_B, query_start_loc_B1, scale))


def _check_paged(q_THD: torch.Tensor, kv_cache: torch.Tensor, block_table_BM: torch.Tensor, seq_lens_B: torch.Tensor,
                 query_start_loc_B1: torch.Tensor) -> None:
    if q_THD.dim() != 3 or block_table_BM.dim() != 2 or query_start_loc_B1.shape[0] != seq_lens_B.shape[0] + 1 \
            or block_table_BM.shape[0] < seq_lens_B.shape[0]:
        raise ValueError(f"attention_paged: q {tuple(q_THD.shape)}, block table {tuple(block_table_BM.shape)}, seq_lens "
                         f"{tuple(seq_lens_B.shape)}, query_start_loc {tuple(query_start_loc_B1.shape)} do not fit")
    if kv_cache.dtype != q_THD.dtype:
        raise ValueError(f"attention_paged: q is {q_THD.dtype}, the cache {kv_cache.dtype}; both must have the model dtype")


def _check_qkv(name: str, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> None:
    if q_THD.dim() != 3 or k_TGD.dim() != 3 or k_TGD.shape != v_TGD.shape or q_THD.shape[2] != k_TGD.shape[2] \
            or q_THD.shape[0] != k_TGD.shape[0] or k_TGD.shape[1] == 0 or q_THD.shape[1] % k_TGD.shape[1]:
        raise ValueError(f"{name}: q {tuple(q_THD.shape)}, k {tuple(k_TGD.shape)}, v {tuple(v_TGD.shape)} do not fit; expected "
                         "[T, heads, D], [T, groups, D] twice, heads a multiple of groups")
    if not q_THD.dtype == k_TGD.dtype == v_TGD.dtype:
        raise ValueError(f"{name}: dtypes differ: {q_THD.dtype}, {k_TGD.dtype}, {v_TGD.dtype}")
