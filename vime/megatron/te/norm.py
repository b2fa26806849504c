"""``TENorm`` makes TransformerEngine's ``RMSNorm``, whose ``forward`` is routed for the norms of a checked model."""
from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from vime import ops
from vime.megatron.patch import HookPoint, Refused, note

_MODULE = "transformer_engine.pytorch.module.rmsnorm"
CLASS = f"{_MODULE}.RMSNorm"

_of_megatron: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def adopt(module: torch.nn.Module) -> None:
    """Note that this norm belongs to a Megatron model."""
    _of_megatron.add(module)


def _route(stock: Any) -> Any:
    def forward(self: Any, input: torch.Tensor, *extra_inputs: Any, **kwargs: Any) -> Any:
        if self not in _of_megatron:
            return stock(self, input, *extra_inputs, **kwargs)
        if extra_inputs or kwargs:
            raise Refused(f"RMSNorm.forward was called with {len(extra_inputs)} more input(s) and {sorted(kwargs)}, which vime can't align")
        note("norm")
        return ops.rms_norm(input, self.weight, self.eps)

    return forward


def hook_points() -> list[HookPoint]:
    return [HookPoint(f"{_MODULE}:RMSNorm", "forward", _route)]


def refusals(module: Any, config: Any) -> Iterator[str]:
    del config
    if module.weight.dim() != 1:
        yield f"it normalises over {module.weight.dim()} dimensions; only the last one is aligned"
    if module.zero_centered_gamma:
        yield "zero_centered_gamma is on"
