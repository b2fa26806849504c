"""Names and keys of a ``torch_dist`` checkpoint, and what writing and reading one need in common."""
from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Collection

from vime.weights.families.units import Unit

TRACKER = "latest_checkpointed_iteration.txt"
EXPERT = re.compile(r"local_experts\.(\d+)\.")
#: local spec's name -> the name under which a model of TransformerEngine modules saves the same tensor
_FUSED = [(re.compile(pattern), name) for pattern, name in (
    (r"\.input_layernorm\.", ".self_attention.linear_qkv.layer_norm_"),
    (r"\.pre_mlp_layernorm\.", ".mlp.linear_fc1.layer_norm_"),
    (r"\.self_attention\.q_layernorm\.", ".self_attention.linear_q_up_proj.layer_norm_"),
    (r"\.self_attention\.kv_layernorm\.", ".self_attention.linear_kv_up_proj.layer_norm_"),
)]  # fmt: skip


def names_of(unit: Unit) -> list[str]:
    """Names under which Megatron may save a unit: its own and, for a norm, that of the projection it can be fused into."""
    return [unit.name, *(pattern.sub(name, unit.name) for pattern, name in _FUSED if pattern.search(unit.name))]


def keys_of(unit: Unit, plan_names: Collection[str]) -> list[str]:
    """Keys under which a unit is written. Norms go under each of their names: layers of TransformerEngine modules and
    layers of the local spec look for different ones (for an MoE layer even in one version), and they are small."""
    own, *fused = names_of(unit)
    kept = [n for n in fused if ".mlp.linear_fc1." in n or n.partition("layer_norm_")[0] + "weight" in plan_names]
    return [EXPERT.sub("experts.", name) for name in (own, *kept)]


def return_large_blocks() -> None:
    """Have glibc give every freed block of 1 MiB or more back to the system, as it does at first.

    By itself it raises that limit up to 32 MiB as blocks are freed. Aligned blocks below it then leave holes that the next
    one doesn't fit, and a conversion's memory grows by every fused tensor, as if none had been freed.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
