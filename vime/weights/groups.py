"""The process groups of a rank, made from a topology or taken from megatron-core as it made them."""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from vime.weights.errors import WeightError
from vime.weights.topology import KINDS, Topology


class OwnershipError(WeightError):
    """A rank does not hold what its place in the groups says, or holds it in another shape or dtype."""


@dataclasses.dataclass(frozen=True)
class Groups:
    """The process groups this rank is in. ``handles[kind]`` is None for groups of one."""

    topology: Topology
    rank: int
    handles: Mapping[str, Any]
    world: Any = None

    @classmethod
    def create(cls, topology: Topology) -> Groups:
        """Make all groups of a topology. Every rank of the default group must call this."""
        rank, handles = dist.get_rank(), {}
        for kind in KINDS:
            for members in topology.groups[kind]:
                handle = dist.new_group(list(members)) if len(members) > 1 else None
                if rank in members:
                    handles[kind] = handle
        return cls(topology, rank, handles)

    @classmethod
    def of_megatron(cls, chunks: list[torch.nn.Module], experts: int) -> Groups:
        """The groups megatron-core has made, read from the groups themselves, and the layers each rank really has."""
        from megatron.core import parallel_state as ps

        from vime.weights.megatron_state import layers_of_chunk

        made = {"tp": ps.get_tensor_model_parallel_group(), "pp": ps.get_pipeline_model_parallel_group(),
                "ep": ps.get_expert_model_parallel_group(), "etp": ps.get_expert_tensor_parallel_group()}
        mine = {kind: tuple(dist.get_process_group_ranks(group)) for kind, group in made.items()}
        layers = tuple(layers_of_chunk(chunk) for chunk in chunks)
        everyone = all_gather_object((mine, layers))
        groups = {kind: tuple(dict.fromkeys(member[kind] for member, _ in everyone)) for kind in KINDS}
        rank = dist.get_rank()
        stages = tuple(everyone[r][1] for r in mine["pp"])
        for other, (member, found) in enumerate(everyone):
            if found != stages[member["pp"].index(other)]:
                raise OwnershipError(f"rank {other} holds layers {found}, others of its pipeline stage hold "
                                     f"{stages[member['pp'].index(other)]}")
        return cls(Topology(groups, stages, experts), rank, {k: g if len(mine[k]) > 1 else None for k, g in made.items()})


def all_gather_object(value: Any) -> list[Any]:
    """``value`` of every rank, in rank order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out
