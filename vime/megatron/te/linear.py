"""Linear layers of TransformerEngine: plain, and with the norm before them fused in.

The bias is added after the product was rounded, as in the local spec; TransformerEngine's own kernel adds it before.
The backward is that of ``vime.ops.linear``: no product of TransformerEngine is left in either direction.
"""
from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from vime import ops
from vime.megatron import gradients
from vime.megatron.patch import HookPoint, Refused, note

# Attribute of a module -> (values that change nothing, what another one means).
_SETTINGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "tp_size": ((1,), "only tensor parallel size 1 is aligned"),
    "sequence_parallel": ((False, None), "sequence parallelism is on"),
    "te_quant_params": ((None,), "a quantization recipe is set for it"),
    "fuse_wgrad_accumulation": ((False, None), "gradient_accumulation_fusion is on (a fused kernel)"),
    "ub_name": ((None,), "communication overlap (user buffers) is on"),
    "symmetric_ar_type": ((None,), "symmetric-memory all-reduce is on"),
    "fsdp_group": ((None,), "TransformerEngine's FSDP is on"),
}


def settings_refusals(module: Any, but: Collection[str] = ()) -> Iterator[str]:
    """What the settings shared by all of TransformerEngine's linear modules, ``but`` these, ask for that can't be aligned."""
    for name, (neutral, why) in _SETTINGS.items():
        value = getattr(module, name, neutral[0])
        if name not in but and value not in neutral:
            yield f"{name} is {value!r}: {why}"
    store = getattr(module, "wgrad_store", None)
    if store is not None and store.delay_wgrad_compute():
        yield "delay_wgrad_compute is on: its weight gradient would be computed by TransformerEngine"


def plain_weight(name: str, weight: Any) -> Iterator[str]:
    """A weight that is stored in another form than bf16 or fp32 numbers."""
    if type(weight) is not torch.nn.Parameter or weight.dtype not in (torch.float32, torch.bfloat16):
        yield f"its {name} is a {type(weight).__name__} of {getattr(weight, 'dtype', '?')}; aligned are plain fp32 and bf16 parameters"
    elif getattr(weight, "gtp_remat_size", None) not in (None, 1):
        yield f"its {name} is cut over {weight.gtp_remat_size} ranks"


def refusals(module: Any, config: Any) -> Iterator[str]:
    del config
    yield from settings_refusals(module)
    if list(getattr(module, "weight_names", ["weight"])) != ["weight"]:
        yield f"its weight is split into {', '.join(module.weight_names)}"
    else:
        yield from plain_weight("weight", module.weight)


def fused_refusals(module: Any, config: Any) -> Iterator[str]:
    yield from refusals(module, config)
    if module.normalization != "RMSNorm":
        yield f"its norm is {module.normalization}; aligned is RMSNorm"
    if module.zero_centered_gamma:
        yield "zero_centered_gamma is on"
    if module.return_layernorm_output:
        yield "it returns the output of its norm as well"
    yield from plain_weight("layer_norm_weight", module.layer_norm_weight)


def refuse_fp8() -> None:
    """Raise :class:`Refused` inside one of TransformerEngine's FP8 contexts: nobody would see that it has no effect."""
    from megatron.core.extensions import transformer_engine as extension

    if extension.FP8GlobalStateManager.is_fp8_enabled():
        raise Refused("an FP8 context of TransformerEngine is open around a linear layer that vime aligns; leave it, or exclude 'linear' "
                      "on both sides")


def biases(module: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(bias to add, bias to return) of a module: Megatron adds a skipped one later."""
    bias = module.bias if module.use_bias else None
    return (None, bias) if module.te_return_bias else (bias, None)


def _product(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    refuse_fp8()
    note("linear")
    added, returned = biases(module)
    module.is_first_microbatch = False
    return gradients.linear(x, module.weight, added), returned


def _route(stock: Any) -> Any:
    del stock

    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return _product(self, x)

    return forward


def _route_fused(stock: Any) -> Any:
    del stock

    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        note("norm")
        return _product(self, ops.rms_norm(x, self.layer_norm_weight, self.eps))

    return forward


def hook_points(extension: str) -> list[HookPoint]:
    """Column and row parallel ones inherit this ``forward``."""
    return [HookPoint(f"{extension}:TELinear", "forward", _route)]


def fused_hook_points(extension: str) -> list[HookPoint]:
    return [HookPoint(f"{extension}:TELayerNormColumnParallelLinear", "forward", _route_fused)]
