"""RMSNorm: Megatron's ``WrappedTorchNorm`` yields ``torch.nn.RMSNorm``, whose ``forward`` is routed.

The residual order needs no route: Megatron adds in the model dtype (``bias_dropout_add``, unfused) and normalises the
rounded sum, which is the contract's ``norm.residual_rounding``. A fused bias-dropout-add is refused with the model.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from vime import ops
from vime.megatron.patch import HookPoint, note

OP = "norm"
MODULES = ("torch.nn.modules.normalization.RMSNorm",)

# torch's class serves other models of the process as well; only norms of a checked Megatron model are routed.
_of_megatron: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def adopt(module: torch.nn.Module) -> None:
    """Note that this norm belongs to a Megatron model."""
    _of_megatron.add(module)


def _route(stock: Any) -> Any:
    def forward(self: torch.nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
        if self not in _of_megatron:
            return stock(self, x)
        note(OP)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return ops.rms_norm(x, self.weight, eps)

    return forward


def hook_points() -> list[HookPoint]:
    return [HookPoint("torch.nn:RMSNorm", "forward", _route)]


def refusals(module: Any, config: Any) -> Iterator[str]:
    del config
    if len(module.normalized_shape) != 1:
        yield f"it normalises over {len(module.normalized_shape)} dimensions; only the last one is aligned"
    if module.weight is None:
        yield "it has no weight (elementwise_affine=False)"
