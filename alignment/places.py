"""Where a named tensor is in a model, read off its name; and in what order a model computes.

Names of Megatron, Hugging Face and vLLM all carry ``layers.N`` and ``experts.N``. A name without them still gives a
place: its own.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from alignment.verdict import Place

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|blocks|h)\.(\d+)(?=\.|$)")
_EXPERT = re.compile(r"(?:^|\.)(?:local_experts|experts|expert)\.(\d+)(?=\.|$)")
_EXPERT_TAIL = re.compile(r"experts\..*?(?:weight|bias)(\d+)$")  # grouped GEMM: experts.linear_fc1.weight3
_STACKED = re.compile(r"(?:^|\.)(?:local_)?experts(?:[._]|$)")
_LEAVES = ("weight", "bias", "output", "input", "residual", "weight_scale", "weight_scale_inv", "scale")


def rank_dict(rank: Any) -> dict[str, int]:
    """``3`` -> {"rank": 3}; pairs and mappings as they are; ``"dp0-tp1"`` -> {"dp": 0, "tp": 1}."""
    if isinstance(rank, Mapping):
        return {str(k): int(v) for k, v in rank.items()}
    if isinstance(rank, int):
        return {"rank": rank}
    if isinstance(rank, tuple) and all(isinstance(x, tuple) and len(x) == 2 for x in rank):
        return {str(k): int(v) for k, v in rank}
    found = re.findall(r"([A-Za-z]+)[ _=]?(\d+)", str(rank))
    return {k: int(v) for k, v in found} or {str(rank): 0}


def rank_text(rank: Any) -> str:
    return "/".join(f"{k}{v}" for k, v in rank_dict(rank).items())


def layer_of(name: str) -> int | None:
    found = _LAYER.search(name)
    return int(found.group(1)) if found else None


def expert_of(name: str) -> int | None:
    found = _EXPERT.search(name) or _EXPERT_TAIL.search(name)
    return int(found.group(1)) if found else None


def stacked_experts(name: str, shape: Sequence[int]) -> bool:
    """Is the first axis of this tensor that of all experts of a layer: stacked weights [E, ..], their biases or scales [E, N]."""
    if expert_of(name) is not None or not _STACKED.search(name) or not 2 <= (shape[0] if len(shape) else 0) <= 1024:
        return False
    return len(shape) > 2 or (len(shape) == 2 and any(w in name.rpartition(".")[2] for w in ("bias", "scale")))


def place_of(name: str, **extra: object) -> Place:
    """The Place of a tensor: layer and expert from its name, the module where the name ends in a known leaf."""
    module, _, leaf = name.rpartition(".")
    fields: dict[str, object] = {
        "layer": layer_of(name),
        "expert": expert_of(name),
        "module": module if module and leaf in _LEAVES else None,
        "tensor": name,
    }
    return Place(**{**fields, **extra})  # type: ignore[arg-type]


# Within a layer, what comes before what: (rank, pattern), searched in this order; unknown names come late.
_STAGES = [(rank, re.compile(pattern)) for rank, pattern in [
    (0, r"input_layernorm|attn_norm|ln_1|pre_attention|input_norm"),
    (6, r"post_attention_layernorm|pre_mlp_layernorm|mlp_norm|ln_2|ffn_norm|pre_feedforward"),
    (12, r"post_feedforward"),
    (3, r"after_rope"),
    (1, r"(^|\.)(inv_freq|rope|rotary|rotary_emb|cos|sin)(\.|_|$)"),
    (5, r"o_proj|linear_proj|attention\.dense|out_proj"),
    (2, r"qkv|q_a_|q_b_|kv_a_|kv_b_|q_proj|k_proj|v_proj|q_norm|k_norm|in_proj|indexer|(^|\.)[qkv](\.|$)"),
    (4, r"attention|attn"),
    (7, r"(router|gate)\.(weight|bias|logits|e_score|expert_bias)"),
    (8, r"router|topk|(^|\.)gate(\.|$)"),
    (9, r"gate_up|gate_proj|up_proj|fc1|w1|w3"),
    (10, r"act|silu|gelu"),
    (11, r"down_proj|fc2|w2"),
    (12, r"combine|experts|mlp|ffn|feed_forward"),
]]  # fmt: skip


def causal_key(name: str) -> tuple[int, int, int, list[object]]:
    """A sort key that puts embeddings first, then the layers in order, then the final norm, the head, log-probs."""
    natural: list[object] = [(1, int(p), "") if p.isdigit() else (0, 0, p) for p in re.split(r"(\d+)", name)]
    layer = layer_of(name)
    if layer is not None:
        rest = name[_LAYER.search(name).end() :]  # type: ignore[union-attr]
        return 1, layer, next((rank for rank, p in _STAGES if p.search(rest)), 13), natural
    groups = ((0, r"embed|wte"), (5, r"logprob|log_prob"), (4, r"logits"), (3, r"lm_head|output_layer"))
    return next((group for group, p in groups if re.search(p, name)), 2), -1, 0, natural


def causal_order(names: Iterable[str]) -> list[str]:
    """Names in the order in which a decoder computes them, as far as names tell."""
    return sorted(names, key=causal_key)


def by_layer(names: Iterable[str]) -> list[str]:
    """Names in their own order, but the layers of each stack by number: ranks that hold other layers, or two pieces of the model
    each, write theirs one rank after another. What has no layer keeps its place."""
    out = list(names)
    slots: dict[str, list[int]] = {}
    for i, name in enumerate(out):
        found = _LAYER.search(name)
        if found is not None:
            slots.setdefault(name[: found.start(1)], []).append(i)
    for at in slots.values():
        for i, name in zip(at, sorted((out[i] for i in at), key=lambda n: layer_of(n) or 0), strict=True):
            out[i] = name
    return out
