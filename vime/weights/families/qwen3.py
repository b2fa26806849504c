"""Qwen3 dense: a head dimension of its own, RMSNorm on Q and K per head."""
from vime.weights.families.base import Config, Family
from vime.weights.families.blocks import decoder, glu, gqa, norms


def layer(c: Config, i: int):
    bias = bool(c.get("attention_bias", False))
    yield from norms(c)
    yield from gqa(c, qkv_bias=bias, out_bias=bias, qk_norm=True)
    yield from glu("mlp.", "mlp.", c.hidden_size, c.intermediate_size)


FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), decoder(layer), defaults={"head_dim": 128})
