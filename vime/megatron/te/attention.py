"""``TEDotProductAttention.forward``, batched and packed: the route of the local ``DotProductAttention``.

Its three backends (flash, cuDNN, unfused) are never chosen between, so neither a length nor an environment variable
decides what a row is.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vime.megatron.patch import HookPoint, Refused
from vime.megatron.routes.attention import core_attention


def scale_of(module: Any) -> float:
    """The factor of the scores; the module itself hands it on to its backends and keeps none."""
    return float(module.unfused_attention.softmax_scale)


def _route(stock: Any) -> Any:
    del stock

    def forward(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
                attn_mask_type: Any = None, attention_bias: Any = None, packed_seq_params: Any = None,
                num_splits: int | None = None) -> torch.Tensor:
        if num_splits not in (None, 1):
            raise Refused(f"attention was called with num_splits={num_splits}; vime never splits the keys of a row")
        kind = attn_mask_type if attn_mask_type is not None else self.attn_mask_type
        return core_attention(query, key, value, attention_mask, getattr(kind, "name", kind), attention_bias, packed_seq_params,
                              scale_of(self))

    return forward


def hook_points(extension: str) -> list[HookPoint]:
    return [HookPoint(f"{extension}:TEDotProductAttention", "forward", _route)]


def refusals(module: Any, config: Any) -> Iterator[str]:
    if config.apply_query_key_layer_scaling:
        yield "apply_query_key_layer_scaling is on"
    for name in ("window_size", "attention_chunk_size"):
        if getattr(config, name, None) is not None:
            yield f"{name} is {getattr(config, name)} (not every key is seen)"
    if module.softmax_type != "vanilla":
        yield f"softmax_type is {module.softmax_type!r}"
    if module.attention_dropout > 0 and module.training:
        yield f"attention dropout is {module.attention_dropout} in train mode"
    for name in ("qk_clip", "log_max_attention_logit"):
        if getattr(config, name, False):
            yield f"{name} is on: it reads the largest score, which only TransformerEngine's kernel returns"
    if module.tp_size != 1:
        yield f"its tensor parallel size is {module.tp_size}; only 1 is aligned"
    if module.cp_group is not None:
        yield "it has a context parallel group"
    if module.attention_type != "self":
        yield f"it is {module.attention_type} attention"
