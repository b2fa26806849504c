"""Both ways between whole state dicts, by what the product itself converts with."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vime.weights.convert import AsMegatron, Stacker, to_pieces
from vime.weights.families import family_for
from vime.weights.families.base import Plan
from vime.weights.raw import same_bits


def to_megatron(state: Mapping[str, torch.Tensor], cfg: Mapping[str, Any], vocab_multiple: int = 1) -> tuple[Plan, dict[str, torch.Tensor]]:
    """The plan of an HF state dict, and its full Megatron tensors (TP 1, PP 1, EP 1)."""
    plan = family_for(cfg).plan(cfg, hf_names=state.keys(), vocab_multiple=vocab_multiple)
    return plan, dict(AsMegatron({unit.name: unit for unit in plan.units}, state))


def to_hf(plan: Plan, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse, under every name that the plan was made for."""
    stacker, out = Stacker(plan), {}
    for key, piece in to_pieces(((unit, state[unit.name]) for unit in plan.units), plan):
        out.update(stacker.add(key, piece))
    stacker.finish()
    return out


def differing(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> list[str]:
    """Names that one side lacks, or whose tensors have other bits."""
    return sorted(a.keys() ^ b.keys()) + [name for name in a.keys() & b.keys() if not same_bits(a[name], b[name])]
