"""Qwen2 and Qwen2.5: biases on Q, K and V, none on the output projection."""
from vime.weights.families.base import Config, Family
from vime.weights.families.blocks import decoder, glu, gqa, norms


def layer(c: Config, i: int):
    yield from norms(c)
    yield from gqa(c, qkv_bias=True, out_bias=False, qk_norm=False)
    yield from glu("mlp.", "mlp.", c.hidden_size, c.intermediate_size)


FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), decoder(layer))
