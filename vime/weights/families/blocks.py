"""The parts that families share: attention, MLA, MLP, MoE, embedding and head, MTP, FP8 scales.

Megatron names are those of megatron-core's local spec (separate norms). HF names are those of the files that
``transformers`` writes. Shapes are ``[out, in]``.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from vime.weights.errors import ConfigMismatch
from vime.weights.families.base import Config
from vime.weights.families.units import SCALE, Ref, Unit, prefixed

Layer = Callable[[Config, int], Iterable[Unit]]


def copy(megatron: str, hf: str, *shape: int, split: str = "none", **fields) -> Unit:
    """A tensor that is the same on both sides."""
    return Unit(megatron, (Ref(hf, shape),), split=split, **fields)


def linear(megatron: str, hf: str, out: int, inner: int, split: str, bias: bool = False) -> Iterator[Unit]:
    """A projection. The bias of a row-parallel one is replicated."""
    yield copy(f"{megatron}.weight", f"{hf}.weight", out, inner, split=split)
    if bias:
        yield copy(f"{megatron}.bias", f"{hf}.bias", out, split="column" if split == "column" else "none")


def gqa(c: Config, *, qkv_bias: bool, out_bias: bool, qk_norm: bool) -> Iterator[Unit]:
    """Grouped-query attention with one fused, group-interleaved QKV projection."""
    h, d, heads, kv = c.hidden_size, c.head_dim, c.num_attention_heads, c.kv_heads
    if heads % kv:
        raise ConfigMismatch(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv}")
    rows = (("q_proj", heads * d), ("k_proj", kv * d), ("v_proj", kv * d))
    yield from fused_qkv(rows, h, kv, qkv_bias)
    yield from linear("self_attention.linear_proj", "self_attn.o_proj", h, heads * d, "row", out_bias)
    if qk_norm:
        yield copy("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", d)
        yield copy("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", d)


def fused_qkv(rows: Iterable[tuple[str, int]], hidden: int, kv: int, bias: bool) -> Iterator[Unit]:
    rows = tuple(rows)
    for kind, tail in (("weight", (hidden,)), *([("bias", ())] if bias else [])):
        refs = tuple(Ref(f"self_attn.{name}.{kind}", (n, *tail)) for name, n in rows)
        yield Unit(f"self_attention.linear_qkv.{kind}", refs, groups=kv, split="column")


def mla(c: Config) -> Iterator[Unit]:
    """Multi-head latent attention. Both sides keep the rotary pairs interleaved, so every tensor is a copy."""
    h, heads, bias = c.hidden_size, c.num_attention_heads, bool(c.get("attention_bias", False))
    nope, rope, v, kv_rank = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim, c.kv_lora_rank
    if q_rank := c.count("q_lora_rank"):
        yield from linear("self_attention.linear_q_down_proj", "self_attn.q_a_proj", q_rank, h, "none", bias)
        yield copy("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight", q_rank)
        yield from linear(
            "self_attention.linear_q_up_proj", "self_attn.q_b_proj", heads * (nope + rope), q_rank, "column"
        )
    else:
        yield from linear("self_attention.linear_q_proj", "self_attn.q_proj", heads * (nope + rope), h, "column")
    yield from linear(
        "self_attention.linear_kv_down_proj", "self_attn.kv_a_proj_with_mqa", kv_rank + rope, h, "none", bias
    )
    yield copy("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight", kv_rank)
    yield from linear("self_attention.linear_kv_up_proj", "self_attn.kv_b_proj", heads * (nope + v), kv_rank, "column")
    yield from linear("self_attention.linear_proj", "self_attn.o_proj", h, heads * v, "row", bias)


def glu(megatron: str, hf: str, hidden: int, ffn: int, bias: bool = False) -> Iterator[Unit]:
    """A gated MLP: ``linear_fc1`` is gate on top of up, cut by TP within each half."""
    for kind, tail in (("weight", (hidden,)), *([("bias", ())] if bias else [])):
        refs = (Ref(f"{hf}gate_proj.{kind}", (ffn, *tail)), Ref(f"{hf}up_proj.{kind}", (ffn, *tail)))
        yield Unit(f"{megatron}linear_fc1.{kind}", refs, split="glu")
    yield from linear(f"{megatron}linear_fc2", f"{hf}down_proj", hidden, ffn, "row", bias)


def moe(c: Config, experts: int, *, expert_bias: bool, shared_ffn: int = 0) -> Iterator[Unit]:
    """Router, its correction bias (a buffer, in its own dtype), routed experts and the shared expert."""
    h = c.hidden_size
    yield copy("mlp.router.weight", "mlp.gate.weight", experts, h)
    if expert_bias:
        yield copy("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", experts, buffer=True)
    for e in range(experts):
        block = glu(f"mlp.experts.local_experts.{e}.", f"mlp.experts.{e}.", h, c.moe_intermediate_size)
        yield from (dataclasses.replace(unit, expert=e) for unit in block)
    if shared_ffn:
        yield from glu("mlp.shared_experts.", "mlp.shared_experts.", h, shared_ffn)


def norms(c: Config) -> Iterator[Unit]:
    """The two norms of a pre-norm layer."""
    yield copy("input_layernorm.weight", "input_layernorm.weight", c.hidden_size)
    yield copy("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", c.hidden_size)


def decoder(layer: Layer, *, mtp: bool = False, hf: str = "model.", extra: Callable[[Config], Iterable[Unit]] | None = None,
            spare: Layer | None = None):
    """The whole model around ``layer(config, i)``: embedding, layers, final norm, head, MTP layers, FP8 scales.

    ``extra`` lists further tensors that live beside the embedding, on the first pipeline stage. ``spare(config, i)`` lists
    tensors of a layer that nobody evaluates: all of a layer are in if the checkpoint holds one of them.
    """

    def list_units(c: Config, has: Callable[[str], bool]) -> Iterator[Unit]:
        for unit in _model(c, has, layer, mtp, hf, extra, spare):
            yield unit
            if (scale := scale_unit(c, unit, has)) is not None:
                yield scale

    return list_units


def _model(c: Config, has: Callable[[str], bool], layer: Layer, mtp: bool, hf: str, extra, spare) -> Iterator[Unit]:
    n, h, v = c.num_hidden_layers, c.hidden_size, c.vocab_size
    tied = bool(c.get("tie_word_embeddings", False))
    mtp_ids = [i for i in range(n, n + 16) if has(f"{hf}layers.{i}.eh_proj.weight")] if mtp else []
    copies = tuple(f"{hf}layers.{i}.embed_tokens.weight" for i in mtp_ids)
    heads = tuple(f"{hf}layers.{i}.shared_head.head.weight" for i in mtp_ids)
    yield copy(
        "embedding.word_embeddings.weight", f"{hf}embed_tokens.weight", v, h, split="column", place="embedding",
        hf_alias=(("lm_head.weight", *heads) if tied else ()) + copies,
        megatron_alias=("output_layer.weight",) if tied else (),
    )
    if extra is not None:
        yield from prefixed(extra(c), "embedding.", hf, place="embedding")
    for i in range(n):
        yield from prefixed(layer(c, i), f"decoder.layers.{i}.", f"{hf}layers.{i}.", layer=i)
        unused = [] if spare is None else list(prefixed(spare(c, i), f"decoder.layers.{i}.", f"{hf}layers.{i}.", layer=i, spare=True))
        if any(has(ref.name) for unit in unused for ref in unit.hf):
            yield from unused
    yield copy("decoder.final_layernorm.weight", f"{hf}norm.weight", h, place="final")
    if not tied:
        yield copy("output_layer.weight", "lm_head.weight", v, h, split="column", place="head", hf_alias=heads)
    for i in mtp_ids:
        to, at = f"mtp.layers.{i - n}.", f"{hf}layers.{i}."
        own = (
            copy("enorm.weight", "enorm.weight", h),
            copy("hnorm.weight", "hnorm.weight", h),
            copy("eh_proj.weight", "eh_proj.weight", h, 2 * h, split="column"),
            copy("final_layernorm.weight", "shared_head.norm.weight", h),
        )
        yield from prefixed(own, to, at, layer=i, place="mtp")
        yield from prefixed(layer(c, i), to + "transformer_layer.", at, layer=i, place="mtp")


def scale_unit(c: Config, unit: Unit, has: Callable[[str], bool]) -> Unit | None:
    """The block scales of an FP8 weight, laid out as the weight is, one row per block of rows.

    Only where ``config.json`` declares block FP8 and the checkpoint holds scales for this weight: bytes and scales
    travel together or not at all.
    """
    quant = c.raw.get("quantization_config") or {}
    block = quant.get("weight_block_size") if isinstance(quant, dict) else quant
    if block and not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise ConfigMismatch(f"config.json: quantization_config is {quant!r}; expected an object with weight_block_size of two numbers, or none")
    if not block or len(unit.shape) != 2 or unit.place not in ("layer", "mtp"):
        return None
    if not any(has(ref.name + SCALE) for ref in unit.hf):
        return None
    refs = []
    for ref in unit.hf:
        rows, columns = ref.shape
        if len(unit.hf) > 1 and (rows // unit.groups) % block[0]:
            raise ConfigMismatch(
                f"{ref.name}: {rows // unit.groups} rows a group are no multiple of the FP8 block of {block[0]}, so a "
                f"block would straddle two tensors in {unit.name}"
            )
        refs.append(dataclasses.replace(ref, name=ref.name + SCALE, shape=(-(-rows // block[0]), -(-columns // block[1]))))
    return dataclasses.replace(unit, name=unit.name + SCALE, hf=tuple(refs))
