"""A running Megatron model as a mapping from global name to tensor, whatever its layer spec called things.

Local layer numbers become global ones (pipeline stages, virtual chunks), local expert numbers become global ids
(each EP rank counts its own from 0), and the names of TransformerEngine's fused modules become those of the local
spec. Parameters and persistent buffers are both weights: the router's expert bias is a buffer.
"""
from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence

import torch

from vime.weights.errors import WeightError
from vime.weights.families.base import Plan
from vime.weights.families.units import read_pieces
from vime.weights.topology import Topology

#: Names of other layer specs and versions -> names of the local spec of megatron-core 0.16.
CANONICAL = [(re.compile(pattern), name) for pattern, name in (
    (r"self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r"input_layernorm.\1"),
    (r"(?<!experts\.)mlp\.linear_fc1\.layer_norm_(weight|bias)$", r"pre_mlp_layernorm.\1"),
    (r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_(weight|bias)$", r"self_attention.\1_layernorm.\2"),
    (r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r"mlp.experts.local_experts.\3.\1.\2"),
    (r"^(mtp\.layers\.\d+)\.mtp_model_layer\.", r"\1.transformer_layer."),
)]  # fmt: skip


@functools.cache
def canonical(name: str) -> str:
    """The local spec's name of a parameter."""
    for pattern, replacement in CANONICAL:
        name = pattern.sub(replacement, name)
    return name


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """Without the data-parallel and precision wrappers."""
    while not hasattr(chunk, "decoder") and hasattr(chunk, "module"):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def layers_of_chunk(chunk: torch.nn.Module) -> tuple[int, ...]:
    """Global numbers of the decoder layers a model chunk holds, as Megatron numbered them."""
    return tuple(layer.layer_number - 1 for layer in unwrap(chunk).decoder.layers)  # type: ignore[union-attr]


def named_weights(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers with the chunk's own names."""
    for prefix, module in unwrap(chunk).named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, tensor in module._parameters.items():
            if tensor is not None:
                yield dot + name, tensor.detach()
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield dot + name, tensor


def local_state(chunks: Sequence[torch.nn.Module], topology: Topology, rank: int) -> dict[str, torch.Tensor]:
    """Global Megatron name -> this rank's tensor (the tensors themselves, not copies)."""
    out: dict[str, torch.Tensor] = {}
    for number, chunk in enumerate(chunks):
        for name, tensor in named_weights(chunk):
            key = topology.global_name(number, canonical(name), rank)
            if key in out:
                raise WeightError(f"rank {rank}: two tensors of the model are called {key} (one of them {name} in chunk {number})")
            out[key] = tensor
    return out


def load(chunks: Sequence[torch.nn.Module], plan: Plan, topology: Topology, rank: int,
         source: Mapping[str, torch.Tensor]) -> int:
    """Copy this rank's shards of an HF checkpoint into its model. Returns the number of tensors written.

    Dtypes are converted to the model's where they differ (a bf16 file into fp32 weights). Everything is checked
    before the first tensor is written; raises :class:`WeightError` for names and shapes that do not fit.
    """
    state = local_state(chunks, topology, rank)
    wanted = {name: unit for unit in plan.units for name in topology.names_on(rank, unit)}
    wanted |= {u.name: u for u in plan.units if u.place == "embedding" and u.name in state}  # Megatron's copy for MTP
    missing, surplus = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
    if missing or surplus:
        raise WeightError(f"rank {rank}: the model lacks {missing[:4] or 'nothing'} and has no weights for {surplus[:4] or 'nothing'}")
    for name, unit in wanted.items():
        shape = unit.shard_shape(topology.shard_size(unit))
        if tuple(state[name].shape) != shape:
            raise WeightError(f"rank {rank}: {name} has shape {list(state[name].shape)}, expected {list(shape)}")
    with torch.no_grad():
        for name, unit in wanted.items():
            full = unit.to_megatron(read_pieces(unit, source))
            state[name].copy_(unit.shard(full, topology.shard_index(unit, rank), topology.shard_size(unit)))
    return len(wanted)
