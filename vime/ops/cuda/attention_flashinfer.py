"""Causal grouped-query attention on CUDA by FlashInfer's prefill kernel, the form that ``--vllm-attention-backend flashinfer`` asks for.

The functions of :mod:`vime.ops.cuda.attention`, with the same cache and the same backward; only the forward kernel is another
(:mod:`vime.ops.providers.flashinfer` says why it has one order of additions). Both sides take it, or neither does: its id is in
the contract. It reads lengths from tensors only, so a captured step serves any mix of prompts and decodes.
"""
from __future__ import annotations

import torch

from vime.ops.cuda.attention import kv_cache_shape, kv_cache_write, packed_by, packed_gradients, paged_by
from vime.ops.cuda.tensors import dense
from vime.ops.providers import flashinfer

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
        one_B = torch.ones(cu_seqlens_B1.shape[0] - 1, dtype=torch.int32, device=q_THD.device)
        each_T = torch.arange(rows, dtype=torch.int32, device=q_THD.device)
        flashinfer.forward(q_THD, k_TGD[:, None], v_TGD[:, None], cu_seqlens_B1, cu_seqlens_B1, each_T, one_B, scale, o_THD, lse_TH=lse_TH)
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, o_THD, lse_TH)
        ctx.scale, ctx.causal, ctx.cu_seqlens_B1 = scale, causal, cu_seqlens_B1
        return o_THD

    @staticmethod
    def backward(ctx, do_THD):
        return packed_gradients(ctx, do_THD, flashinfer.natural(ctx.saved_tensors[4]))


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


attention_varlen, attention_paged = packed_by(_Attention), paged_by(attention_paged_into)
