"""Core attention: ``DotProductAttention.forward``, batched ``[s, b, heads, D]`` and packed (``thd``) alike.

Stock ``DotProductAttention`` refuses packed sequences; the route takes them.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vime import ops
from vime.megatron.patch import HookPoint, Refused, note

OP = "attention"
MODULES = ("megatron.core.transformer.dot_product_attention.DotProductAttention",)


def _require_causal(attention_mask: torch.Tensor | None, length: int) -> None:
    """Megatron's masks are True where a key is hidden; anything but the plain causal one is refused."""
    if attention_mask is None:
        return
    causal = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device).triu(1)
    if attention_mask.shape[-2:] != causal.shape or not bool((attention_mask.bool() == causal).all()):
        raise Refused(f"attention got a mask {tuple(attention_mask.shape)} that is not the plain causal one; pass None (or pack "
                      "the sequences), or exclude 'attention'")


def packed_boundaries(packed: Any) -> torch.Tensor:
    """``cu_seqlens`` of packed sequences, int32 ``[B + 1]``. Raises :class:`Refused` for padding between them."""
    cu_seqlens_B1 = packed.cu_seqlens_q
    for name in ("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        other = getattr(packed, name, None)
        if other is not None and other is not cu_seqlens_B1 and not torch.equal(other, cu_seqlens_B1):
            raise Refused(f"packed sequences with a {name} that differs from cu_seqlens_q are not aligned; pack without padding")
    return cu_seqlens_B1


def core_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, mask: str,
                   attention_bias: Any, packed_seq_params: Any, scale: float) -> torch.Tensor:
    """What a core attention of Megatron returns, of either spec. ``mask``: name of its mask type; ``scale``: of the scores."""
    if attention_bias is not None:
        raise Refused("attention with a bias is not aligned")
    if mask not in ("causal", "padding_causal"):
        raise Refused(f"attention with a {mask} mask is not aligned; only causal is")
    if packed_seq_params is not None:
        note(OP)
        return ops.attention_varlen(query, key, value, packed_boundaries(packed_seq_params), scale, True)
    length, batch, heads, dim = query.shape
    if key.shape[0] != length:
        raise Refused(f"attention over {key.shape[0]} keys for {length} queries (a key-value cache) is not aligned in Megatron")
    _require_causal(attention_mask, length)
    note(OP)
    cu_seqlens_B1 = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
    q_THD, k_TGD, v_TGD = (x.transpose(0, 1).reshape(batch * length, x.shape[2], dim) for x in (query, key, value))
    o_THD = ops.attention_varlen(q_THD, k_TGD, v_TGD, cu_seqlens_B1, scale, True)
    return o_THD.view(batch, length, heads * dim).transpose(0, 1).contiguous()


def _route(stock: Any) -> Any:
    del stock

    def forward(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
                attn_mask_type: Any = None, attention_bias: Any = None, packed_seq_params: Any = None) -> torch.Tensor:
        kind = attn_mask_type if attn_mask_type is not None else self.attn_mask_type
        return core_attention(query, key, value, attention_mask, kind.name, attention_bias, packed_seq_params, self.softmax_scale)

    return forward


def hook_points() -> list[HookPoint]:
    return [HookPoint("megatron.core.transformer.dot_product_attention:DotProductAttention", "forward", _route)]


def refusals(module: Any, config: Any) -> Iterator[str]:
    if config.apply_query_key_layer_scaling:
        yield "apply_query_key_layer_scaling is on"
    if getattr(config, "window_size", None) is not None:
        yield f"window_size is {config.window_size} (sliding window)"
    if getattr(config, "softmax_type", "vanilla") != "vanilla":
        yield f"softmax_type is {config.softmax_type!r}"
    if module.attention_dropout.p > 0 and module.training:
        yield f"attention dropout is {module.attention_dropout.p} in train mode"
