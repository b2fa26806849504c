"""Gated SiLU: inline in ``MLP.forward``, between the two linear layers, so that method is routed as a whole."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from vime import ops
from vime.megatron.patch import HookPoint, Refused, note

OP = "activation"
MODULES = ("megatron.core.transformer.mlp.MLP",)


def _route(stock: Any) -> Any:
    del stock

    def forward(self: Any, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if per_token_scale is not None or any(value is not None for value in kwargs.values()):
            raise Refused(f"MLP.forward was called with {['per_token_scale', *kwargs]}, which vime can't align")
        gate_up, bias = self.linear_fc1(hidden_states)
        if bias is not None:
            gate_up = gate_up + bias
        note(OP)
        return self.linear_fc2(ops.silu_and_mul(gate_up))

    return forward


def hook_points() -> list[HookPoint]:
    return [HookPoint("megatron.core.transformer.mlp:MLP", "forward", _route)]


def refusals(module: Any, config: Any) -> Iterator[str]:
    if not config.gated_linear_unit or config.activation_func is not F.silu:
        name = getattr(config.activation_func, "__name__", config.activation_func)
        yield f"its activation is {name}{' (gated)' if config.gated_linear_unit else ' (not gated)'}; aligned is gated silu (SwiGLU)"
    if getattr(config, "use_te_activation_func", False):
        yield "use_te_activation_func is on (a fused kernel)"
    if config.bias_activation_fusion:
        yield "bias_activation_fusion is on (a fused kernel)"
    if getattr(config, "activation_func_clamp_value", None) is not None:
        yield "activation_func_clamp_value is set"
    if getattr(config, "glu_linear_offset", 0.0) != 0.0:
        yield f"glu_linear_offset is {config.glu_linear_offset}"
