"""The one set of numerics that trainer and engine share.

Every operation that both sides evaluate is defined here once: its equation in the docstring, a plain reference in
:mod:`vime.ops.reference`, an implementation per device behind :mod:`vime.ops.registry`. Each row of a result depends
on that row of the input only: not on the batch, its place in it, or the number of threads.
"""
from __future__ import annotations

from typing import Any

from vime.ops import registry
from vime.ops.activation import silu_and_mul
from vime.ops.attention import KEY_TILE, attention_paged, attention_varlen, kv_cache_shape, kv_cache_write
from vime.ops.embedding import embedding
from vime.ops.linear import linear
from vime.ops.logprob import log_softmax, token_logprob
from vime.ops.norm import add_rms_norm, rms_norm
from vime.ops.registry import UnsupportedOp
from vime.ops.rope import apply_rope, rope_cos_sin
from vime.ops.sampling import sample


def params() -> dict[str, Any]:
    """Parameters that fix an order or a rounding, for ``Contract.params``."""
    return {
        "activation.internal": "float32",
        "attention.key_tile": KEY_TILE,
        "attention.softmax": "float32",
        "linear.accumulate": "float32",
        "linear.bias": "model_dtype_after_rounding",
        "logprob.internal": "float32",
        "norm.internal": "float32",
        "norm.residual_rounding": "model_dtype",
        "rope.rotation": "float32",
        "rope.table": "float64_rounded_to_float32",
        "sampling.generator": "philox4x32-10",
        "sampling.ties": "lowest_id",
    }


__all__ = [
    "KEY_TILE", "UnsupportedOp", "add_rms_norm", "apply_rope", "attention_paged", "attention_varlen", "embedding",
    "kv_cache_shape", "kv_cache_write", "linear", "log_softmax", "params", "registry", "rms_norm", "rope_cos_sin",
    "sample", "silu_and_mul", "token_logprob",
]
