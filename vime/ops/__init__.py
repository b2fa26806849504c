"""The one set of numerics that trainer and engine share.

Every operation that both sides evaluate is defined here once: its equation in the docstring, a plain reference in
:mod:`vime.ops.reference`, an implementation per device behind :mod:`vime.ops.registry`. Each row of a result depends
on that row of the input only: not on the batch, its place in it, or the number of threads.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from vime.ops import registry
from vime.ops.activation import silu_and_mul
from vime.ops.attention import (
    KEY_TILE,
    attention_paged,
    attention_paged_into,
    attention_plan,
    attention_varlen,
    kv_cache_shape,
    kv_cache_write,
)
from vime.ops.blockwise import (
    contract_id,
    keep_quantised,
    linear_fp8,
    quantise_weight_blocks,
    refresh_quantised,
    row_blocks,
    stale_quantised,
)
from vime.ops.embedding import embedding
from vime.ops.fp8 import dequantise_blocks, quantise_blocks, through_fp8_cache
from vime.ops.grouped import expert_linear, expert_rows, linear_heads
from vime.ops.indexer import index_scores, layer_norm, select
from vime.ops.linear import linear, weight_gradient
from vime.ops.logprob import log_softmax, token_logprob
from vime.ops.mla import index_query, index_row, latent_query, latent_row
from vime.ops.moe import combine_slots, route, router_scores
from vime.ops.norm import add_rms_norm, rms_norm
from vime.ops.registry import UnsupportedOp
from vime.ops.rope import apply_rope, rope_cos_sin, rotate
from vime.ops.sampling import sample
from vime.ops.sparse_attention import causal_index, into_latent, out_of_latent, sparse_attention


def params(fp8: str = "off", fp8_layers: str = "0") -> dict[str, Any]:
    """Parameters that fix an order or a rounding, for ``Contract.params``.

    Args:
        fp8: how linear layers are quantised (:func:`vime.ops.blockwise.contract_id`), or ``"off"``.
        fp8_layers: which of them (:func:`vime.fp8.summary`).
    """
    return {
        "activation.internal": "float32",
        "attention.key_tile": KEY_TILE,
        "attention.softmax": "float32",
        "indexer.score": "float32",
        "indexer.ties": "lowest_position",
        "indexer.order": "rising_position",
        "kv_cache.fp8": "e4m3_block128_amax/448",
        "linear.accumulate": "float32",
        "linear.bias": "model_dtype_after_rounding",
        "linear.fp8": fp8,
        "linear.fp8_layers": fp8_layers,
        "logprob.internal": "float32",
        "mla.form": "latent",
        "moe.combine": "float32_slot_order",
        "moe.router": "float32",
        "moe.slots": "falling_score_then_lowest_id",
        "norm.internal": "float32",
        "norm.residual_rounding": "model_dtype",
        "rope.rotation": "float32",
        "rope.table": "float64_rounded_to_float32",
        "sampling.generator": "philox4x32-10",
        "sampling.ties": "lowest_id",
    }


def proven(device: torch.device, dtype: torch.dtype, linears: Iterable[tuple[int, int]], apart: Iterable[tuple[int, int]],
           attention: Iterable[tuple[int, int, int]], training: bool) -> dict[str, str]:
    """Prove on the device what these shapes run by, for ``Contract.params``; nothing on a CPU, where it holds by construction.

    Arguments as in :class:`vime.ops.cuda.needs.Needs`, errors as of :func:`vime.ops.cuda.needs.require`.
    """
    if device.type != "cuda":
        return {}
    registry.implementation("linear", device, dtype)  # loads the kernels, and starves cuBLAS before its first product
    from vime.ops.cuda import needs

    return needs.require(needs.Needs(dtype, frozenset(linears), frozenset(apart), frozenset(attention), training), device)


__all__ = [
    "KEY_TILE",
    "UnsupportedOp",
    "add_rms_norm",
    "apply_rope",
    "attention_paged",
    "attention_paged_into",
    "attention_plan",
    "attention_varlen",
    "causal_index",
    "combine_slots",
    "contract_id",
    "dequantise_blocks",
    "embedding",
    "expert_linear",
    "expert_rows",
    "index_query",
    "index_row",
    "index_scores",
    "into_latent",
    "keep_quantised",
    "kv_cache_shape",
    "kv_cache_write",
    "latent_query",
    "latent_row",
    "layer_norm",
    "linear",
    "linear_fp8",
    "linear_heads",
    "log_softmax",
    "out_of_latent",
    "params",
    "proven",
    "quantise_blocks",
    "quantise_weight_blocks",
    "refresh_quantised",
    "registry",
    "rms_norm",
    "rope_cos_sin",
    "rotate",
    "route",
    "router_scores",
    "row_blocks",
    "sample",
    "select",
    "silu_and_mul",
    "sparse_attention",
    "stale_quantised",
    "through_fp8_cache",
    "token_logprob",
    "weight_gradient",
]
