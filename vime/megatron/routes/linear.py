"""Linear layers: both parallel classes end in two functions of ``tensor_parallel.layers``, which are routed."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vime.megatron import gradients
from vime.megatron.patch import HookPoint, Refused, note

OP = "linear"
_LAYERS = "megatron.core.tensor_parallel.layers"
MODULES = (f"{_LAYERS}.ColumnParallelLinear", f"{_LAYERS}.RowParallelLinear")

# Keyword arguments of the stock functions that may only have a value that changes nothing here.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "gradient_accumulation_fusion": (False, None), "allreduce_dgrad": (False, None),
    "sequence_parallel": (False, None), "grad_output_buffer": (None,), "wgrad_deferral_limit": (None,),
    "async_grad_allreduce": (None, False), "gtp_remat_size": (1, None),
}


def _route(stock: Any) -> Any:
    name = stock.__name__

    def linear(input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Any:
        if args:
            raise Refused(f"{name} was called with {len(args)} more positional argument(s) than vime knows")
        kwargs.pop("tp_group", None)  # its size is 1, checked with the model
        for key, value in kwargs.items():
            if value not in _NEUTRAL.get(key, ()):
                raise Refused(f"{name} was called with {key}={value!r}, which vime can't align; switch it off in the "
                              "TransformerConfig or exclude 'linear' on both sides")
        note(OP)
        return gradients.linear(input, weight, bias)

    return linear


def hook_points() -> list[HookPoint]:
    return [HookPoint(_LAYERS, "linear_with_grad_accumulation_and_async_allreduce", _route),
            HookPoint(_LAYERS, "linear_with_frozen_weight", _route)]


def refusals(module: Any, config: Any) -> Iterator[str]:
    del config
    group = getattr(module, "tp_group", None)
    if group is not None and group.size() > 1:
        yield f"its tensor parallel size is {group.size()}; only 1 is aligned"
    if getattr(module, "sequence_parallel", False):
        yield "sequence parallelism is on"
    if getattr(module, "gradient_accumulation_fusion", False):
        yield "gradient_accumulation_fusion is on (a fused kernel)"
