"""What a Hugging Face config says of latent attention, its indexer and its experts, read once for both sides.

Where releases of the same model read a config differently, one reading is chosen here and said: the norms inside MLA
have epsilon 1e-6 whatever ``rms_norm_eps`` is (``transformers`` builds them so, vLLM takes ``rms_norm_eps``), the
indexer of GLM rotates interleaved pairs (``transformers`` always, vLLM where ``indexer_rope_interleave`` says so).
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vime.errors import BadInput

#: Epsilon of ``q_a_layernorm``, ``kv_a_layernorm`` and of the indexer's LayerNorm.
LATENT_EPS = 1e-6
#: Architectures by ``model_type``: which have latent attention, which have experts.
LATENT = ("deepseek_v3", "glm_moe_dsa")
EXPERTS = ("qwen3_moe", "deepseek_v3", "glm_moe_dsa")


class UnsupportedLatent(BadInput):
    """A field asks for something that neither side can evaluate. The message names it and what is covered."""


@dataclasses.dataclass(frozen=True)
class Indexer:
    """The indexer of a sparse model. ``full[i]``: layer ``i`` computes its own indices, else it takes the last ones."""

    heads: int
    dim: int
    top_k: int
    full: tuple[bool, ...]
    interleaved: bool


@dataclasses.dataclass(frozen=True)
class Latent:
    """Latent attention. ``scale`` is the factor of the scores; ``indexer`` is None for a dense model."""

    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    v: int
    scale: float
    base: float
    indexer: Indexer | None

    @property
    def row(self) -> int:
        """Width of a cache row: compressed key and value, then the rotated key."""
        return self.kv_rank + self.rope


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts. ``sparse[i]``: layer ``i`` has experts; ``shared`` is the width of the shared expert, or 0."""

    count: int
    top_k: int
    ffn: int
    shared: int
    kind: str
    bias: bool
    normalise: bool
    scaling: float
    groups: int
    top_groups: int
    sparse: tuple[bool, ...]

    def route_options(self) -> dict[str, Any]:
        """Keyword arguments of :func:`vime.ops.route` besides the bias."""
        return {"groups": self.groups, "top_groups": self.top_groups, "normalise": self.normalise, "scaling": self.scaling}


def latent(config: Mapping[str, Any]) -> Latent | None:
    """Latent attention of a config, or None for a model without it.

    Raises:
        UnsupportedLatent: no low rank for queries, a scaled rotary embedding, or an attention bias.
    """
    if config.get("model_type") not in LATENT:
        return None
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UnsupportedLatent(f"rope_parameters of type {kind!r}; latent attention covers: default")
    if not config.get("q_lora_rank"):
        raise UnsupportedLatent(f"q_lora_rank is {config.get('q_lora_rank')!r}; covered: a low rank for queries")
    if config.get("attention_bias"):
        raise UnsupportedLatent("attention_bias is true; covered for latent attention: false")
    if config.get("rope_interleave", True) is not True:
        raise UnsupportedLatent("rope_interleave is false; covered: interleaved pairs")
    nope, rotary = int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])
    return Latent(
        heads=int(config["num_attention_heads"]), q_rank=int(config["q_lora_rank"]), kv_rank=int(config["kv_lora_rank"]),
        nope=nope, rope=rotary, v=int(config["v_head_dim"]), scale=float((nope + rotary) ** -0.5),
        base=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0), indexer=_indexer(config))


def indexer_types(config: Mapping[str, Any]) -> list[str]:
    """``full`` (computes its own indices) or ``shared`` (takes the last ones) of every layer of a sparse model.

    ``indexer_types`` says so; without it ``index_topk_pattern`` (one letter a layer, F or S), without that the schedule of
    ``index_topk_freq`` and ``index_skip_topk_offset``.

    Raises:
        UnsupportedLatent: another number of layers, other words, or a first layer without indices.
    """
    layers = int(config["num_hidden_layers"])
    field = "index_topk_pattern" if config.get("indexer_types") is None and config.get("index_topk_pattern") is not None else "indexer_types"
    kinds = said = config.get(field)
    if field == "index_topk_pattern" and isinstance(said, str | list | tuple):
        kinds = [{"F": "full", "S": "shared"}.get(str(letter), letter) for letter in said]
    elif said is None:
        freq, offset = max(_whole(config, "index_topk_freq", 1), 1), _whole(config, "index_skip_topk_offset", 2)
        kinds = ["full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(layers)]
    if not kinds or not isinstance(kinds, list | tuple) or len(kinds) != layers or kinds[0] != "full" or any(k not in ("full", "shared") for k in kinds):
        raise UnsupportedLatent(f"{field} is {said if said is not None else kinds!r}; expected {layers} of full and shared, the first one full")
    return list(kinds)


def _whole(config: Mapping[str, Any], field: str, default: int) -> int:
    value = config.get(field)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnsupportedLatent(f"{field} is {value!r}; expected an integer")
    return value


def _indexer(config: Mapping[str, Any]) -> Indexer | None:
    if config["model_type"] != "glm_moe_dsa":
        return None
    kinds = indexer_types(config)
    return Indexer(int(config["index_n_heads"]), int(config["index_head_dim"]), int(config["index_topk"]),
                   tuple(kind == "full" for kind in kinds), bool(config.get("indexer_rope_interleave", True)))


def require_frozen(config: Mapping[str, Any], freeze_indexer: bool) -> None:
    """Raise :class:`UnsupportedLatent` where the indexer of a sparse model is to be trained."""
    if config.get("model_type") == "glm_moe_dsa" and not freeze_indexer:
        raise UnsupportedLatent("freeze_indexer is false (--no-freeze-indexer), but which keys are read is a choice, through which no "
                                "gradient of the policy flows, and the loss that would train the indexer by itself is not there; leave "
                                "--freeze-indexer on: everything else of the model is trained")


def experts(config: Mapping[str, Any]) -> Experts | None:
    """The experts of a config, or None for a dense model.

    Raises:
        UnsupportedLatent: an activation other than SiLU.
    """
    kind = config.get("model_type")
    if kind not in EXPERTS:
        return None
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedLatent(f"hidden_act is {config.get('hidden_act')!r}; covered: silu")
    layers, ffn = range(int(config["num_hidden_layers"])), int(config["moe_intermediate_size"])
    if kind == "qwen3_moe":
        step, dense = int(config.get("decoder_sparse_step", 1)), set(config.get("mlp_only_layers") or ())
        count = int(config.get("num_experts") or config["num_local_experts"])
        return Experts(count, int(config["num_experts_per_tok"]), ffn, 0, "softmax", False,
                       bool(config.get("norm_topk_prob", False)), 1.0, 1, 1,
                       tuple(i not in dense and (i + 1) % step == 0 for i in layers))
    kinds = config.get("mlp_layer_types") or ["dense" if i < int(config["first_k_dense_replace"]) else "sparse" for i in layers]
    return Experts(int(config["n_routed_experts"]), int(config["num_experts_per_tok"]), ffn,
                   ffn * int(config.get("n_shared_experts") or 0), "sigmoid", True, bool(config.get("norm_topk_prob", True)),
                   float(config.get("routed_scaling_factor", 1.0)), int(config.get("n_group") or 1),
                   int(config.get("topk_group") or 1), tuple(k == "sparse" for k in kinds))
