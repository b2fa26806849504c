"""Gemma 4, language model: two attention shapes, V taken from K in full layers, dense MLP beside stacked experts.

Megatron-core has no Gemma 4; the names below are what its modules would be called, one for one with the HF ones.
Where ``attention_k_eq_v`` holds, full-attention layers have no V projection: their fused projection holds Q and K.
"""
from __future__ import annotations

import dataclasses

from vime.weights.families.base import Config, Family
from vime.weights.families.blocks import copy, decoder, fused_qkv, glu, linear
from vime.weights.families.units import Ref, Unit

# Megatron name -> HF name of the norms around the MLP and the experts
NORMS = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm",
         "pre_mlp_layernorm": "pre_feedforward_layernorm", "post_mlp_layernorm": "post_feedforward_layernorm"}
MOE_NORMS = {"post_dense_mlp_layernorm": "post_feedforward_layernorm_1",
             "pre_moe_layernorm": "pre_feedforward_layernorm_2", "post_moe_layernorm": "post_feedforward_layernorm_2"}


def is_full(c: Config, i: int) -> bool:
    kinds = c.kinds("layer_types", c.num_hidden_layers)
    full = kinds[i] == "full_attention" if kinds else (i + 1) % 6 == 0
    return full or i == c.num_hidden_layers - 1


def shares_kv(c: Config, i: int) -> bool:
    shared = c.count("num_kv_shared_layers")
    return shared > 0 and i >= c.num_hidden_layers - shared


def attention(c: Config, i: int):
    full, h, heads, bias = is_full(c, i), c.hidden_size, c.num_attention_heads, bool(c.get("attention_bias", False))
    own = Config(Config(c.table("per_layer_config")).table(str(i)))
    d = own.count("head_dim") or (c.count("global_head_dim", 512) if full else c.head_dim)
    k_is_v = full and bool(c.get("attention_k_eq_v", False))
    kv = own.count("num_key_value_heads") or (k_is_v and c.count("num_global_key_value_heads")) or c.kv_heads
    if shares_kv(c, i):
        yield from linear("self_attention.linear_q", "self_attn.q_proj", heads * d, h, "column", bias)
    else:
        rows = [("q_proj", heads * d), ("k_proj", kv * d)] + ([] if k_is_v else [("v_proj", kv * d)])
        yield from fused_qkv(rows, h, kv, bias)
        yield copy("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", d)
    yield copy("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", d)
    yield from linear("self_attention.linear_proj", "self_attn.o_proj", h, heads * d, "row", bias)


def experts(c: Config):
    """HF stacks the experts: ``gate_up_proj [E, 2F, H]``, ``down_proj [E, H, F]``. One unit an expert here."""
    n, h, f = c.num_experts, c.hidden_size, c.moe_intermediate_size
    yield copy("mlp.router.weight", "router.proj.weight", n, h)
    yield copy("mlp.router.scale", "router.scale", h)
    yield copy("mlp.router.per_expert_scale", "router.per_expert_scale", n)
    for e in range(n):
        name = f"mlp.experts.local_experts.{e}"
        up = Unit(f"{name}.linear_fc1.weight", (Ref("experts.gate_up_proj", (2 * f, h), e, n),), split="glu")
        down = Unit(f"{name}.linear_fc2.weight", (Ref("experts.down_proj", (h, f), e, n),), split="row")
        yield from (dataclasses.replace(unit, expert=e) for unit in (up, down))


def layer(c: Config, i: int):
    h = c.hidden_size
    names = dict(NORMS)
    yield from attention(c, i)
    ffn = c.intermediate_size * (2 if c.get("use_double_wide_mlp") and shares_kv(c, i) else 1)
    if c.get("enable_moe_block", False):
        names |= MOE_NORMS
        yield from glu("dense_mlp.", "mlp.", h, ffn)
        yield from experts(c)
    else:
        yield from glu("mlp.", "mlp.", h, ffn)
    yield from (copy(f"{to}.weight", f"{at}.weight", h) for to, at in names.items())
    if p := c.count("hidden_size_per_layer_input"):
        yield copy("per_layer_input_gate.weight", "per_layer_input_gate.weight", p, h)
        yield copy("per_layer_projection.weight", "per_layer_projection.weight", h, p)
        yield copy("post_per_layer_input_norm.weight", "post_per_layer_input_norm.weight", h)
    yield copy("layer_scalar", "layer_scalar", 1, buffer=True)


def per_layer_embeddings(c: Config):
    """The small models' per-layer inputs, all layers packed in one table."""
    if p := c.count("hidden_size_per_layer_input"):
        width = c.num_hidden_layers * p
        yield copy("embed_tokens_per_layer.weight", "embed_tokens_per_layer.weight", c.vocab_size_per_layer_input, width)
        yield copy("per_layer_model_projection.weight", "per_layer_model_projection.weight", width, c.hidden_size)
        yield copy("per_layer_projection_norm.weight", "per_layer_projection_norm.weight", p)


def list_units(c: Config, has):
    """``Gemma4ForCausalLM`` files say ``model.``, the multimodal ones ``model.language_model.``."""
    hf = "model.language_model." if c.raw.get("text_config") else "model."
    return decoder(layer, hf=hf, extra=per_layer_embeddings)(c, has)


FAMILY = Family(
    "gemma4",
    ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    list_units,
    defaults={"tie_word_embeddings": True, "hidden_size_per_layer_input": 256},
    carried_prefixes=("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
)
