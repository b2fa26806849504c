"""Llama 2 and 3, SmolLM2, and everything else of that architecture."""
from vime.weights.families.base import Config, Family
from vime.weights.families.blocks import decoder, glu, gqa, norms


def layer(c: Config, i: int):
    bias = bool(c.get("attention_bias", False))
    yield from norms(c)
    yield from gqa(c, qkv_bias=bias, out_bias=bias, qk_norm=False)
    yield from glu("mlp.", "mlp.", c.hidden_size, c.intermediate_size, bool(c.get("mlp_bias", False)))


FAMILY = Family("llama", ("LlamaForCausalLM",), decoder(layer))
