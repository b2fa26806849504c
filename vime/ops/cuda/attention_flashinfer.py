"""Causal grouped-query attention on CUDA by FlashInfer's prefill kernel, the form that ``--vllm-attention-backend flashinfer`` asks for.

The functions of :mod:`vime.ops.cuda.attention`, with the same cache and the same backward; only the forward kernel is another
(:mod:`vime.ops.providers.flashinfer` says why it has one order of additions). Both sides take it, or neither does: its id is in
the contract. It reads lengths from tensors only, so a captured step serves any mix of prompts and decodes.
"""
from __future__ import annotations

import torch

from vime.ops.cuda.attention import _extent, _zeros_like, kv_cache_shape, kv_cache_write
from vime.ops.cuda.tensors import dense
from vime.ops.providers import fa3, flashinfer

IMPLEMENTATION = "cuda/attention/flashinfer-tile128@2"

__all__ = ["IMPLEMENTATION", "attention_paged", "attention_paged_into", "attention_plan", "attention_varlen", "kv_cache_shape",
           "kv_cache_write"]


def _int32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.int32).contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THD, k_TGD, v_TGD, cu_seqlens_B1, scale, causal):
        rows, heads, _ = q_THD.shape
        if not causal:
            raise ValueError("attention_varlen: FlashInfer's kernel is used in its causal form only; causal was False")
        o_THD, lse_TH = torch.zeros_like(q_THD), torch.zeros(rows, heads, dtype=torch.float32, device=q_THD.device)
        k_TGD, v_TGD = dense(k_TGD), dense(v_TGD)
        one_B = torch.ones(cu_seqlens_B1.shape[0] - 1, dtype=torch.int32, device=q_THD.device)
        each_T = torch.arange(rows, dtype=torch.int32, device=q_THD.device)
        flashinfer.forward(q_THD, k_TGD[:, None], v_TGD[:, None], cu_seqlens_B1, cu_seqlens_B1, each_T, one_B, scale, o_THD, lse_TH=lse_TH)
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, o_THD, lse_TH)
        ctx.scale, ctx.cu_seqlens_B1 = scale, cu_seqlens_B1
        return o_THD

    @staticmethod
    def backward(ctx, do_THD):
        (q_THD, k_TGD, v_TGD, o_THD, lse_TH), cu_seqlens_B1 = ctx.saved_tensors, ctx.cu_seqlens_B1
        longest, packed = _extent(cu_seqlens_B1)
        grads = fa3.backward(dense(do_THD), q_THD, k_TGD, v_TGD, o_THD, flashinfer.natural(lse_TH), cu_seqlens_B1, longest, ctx.scale, True)
        if packed < q_THD.shape[0]:
            for grad in grads:
                grad[packed:].zero_()
        return *grads, None, None, None


def attention_varlen(
    q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, cu_seqlens_B1: torch.Tensor, scale: float, causal: bool
) -> torch.Tensor:
    """Packed sequences. q: bf16 [T, heads, D]; k, v: [T, groups, D]; cu_seqlens: [B + 1]. Rows past the last: zeros."""
    if q_THD.shape[0] == 0 or cu_seqlens_B1.numel() < 2:
        return torch.zeros_like(q_THD)
    return _Attention.apply(dense(q_THD), k_TGD, v_TGD, cu_seqlens_B1.to(q_THD.device, torch.int32), scale, causal)


def attention_paged(
    q_THD: torch.Tensor, kv_cache: torch.Tensor, block_table_BM: torch.Tensor, seq_lens_B: torch.Tensor,
    query_start_loc_B1: torch.Tensor, scale: float,
) -> torch.Tensor:
    """The same rows over the paged cache (:func:`kv_cache_shape`). Rows past the last query: zeros."""
    if q_THD.shape[0] == 0:
        return torch.zeros_like(q_THD)
    return attention_paged_into(_zeros_like(q_THD), q_THD, kv_cache, block_table_BM, seq_lens_B, query_start_loc_B1, scale, None)


def attention_plan(
    q_THD: torch.Tensor, kv_cache: torch.Tensor, block_table_BM: torch.Tensor, seq_lens_B: torch.Tensor, query_start_loc_B1: torch.Tensor,
) -> torch.Tensor:
    """For :func:`attention_paged_into` with these shapes and lengths, in all layers of a step."""
    del block_table_BM, seq_lens_B
    return flashinfer.schedule(query_start_loc_B1, q_THD.shape[0], q_THD.shape[1] // kv_cache.shape[3])


def attention_paged_into(
    out_THD: torch.Tensor, q_THD: torch.Tensor, kv_cache: torch.Tensor, block_table_BM: torch.Tensor, seq_lens_B: torch.Tensor,
    query_start_loc_B1: torch.Tensor, scale: float, plan: torch.Tensor | None,
) -> torch.Tensor:
    """:func:`attention_paged`, written into ``out`` (contiguous, aligned). Rows past the last query keep what they held."""
    if q_THD.shape[0] == 0:
        return out_THD
    sequences, width, page = seq_lens_B.shape[0], block_table_BM.shape[1], kv_cache.shape[2]
    start_B1 = torch.arange(sequences + 1, dtype=torch.int32, device=q_THD.device) * width  # every row of the table, to its end
    last_B = _int32(seq_lens_B - (width - 1) * page)
    flashinfer.forward(dense(q_THD), kv_cache[:, 0], kv_cache[:, 1], _int32(query_start_loc_B1), start_B1,
                       _int32(block_table_BM[:sequences]).view(-1), last_B, scale, out_THD, plan)
    return out_THD
