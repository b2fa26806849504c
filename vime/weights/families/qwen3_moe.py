"""Qwen3-MoE: Qwen3 attention; sparse and dense layers by ``decoder_sparse_step`` and ``mlp_only_layers``."""
from vime.weights.errors import ConfigMismatch
from vime.weights.families.base import Config, Family
from vime.weights.families.blocks import decoder, glu, gqa, moe, norms


def layer(c: Config, i: int):
    bias = bool(c.get("attention_bias", False))
    yield from norms(c)
    yield from gqa(c, qkv_bias=bias, out_bias=bias, qk_norm=True)
    only = c.get("mlp_only_layers", [])
    if not isinstance(only, list):
        raise ConfigMismatch(f"config.json: mlp_only_layers is {only!r}; expected a list of layer numbers")
    if not (step := c.count("decoder_sparse_step", 1)):
        raise ConfigMismatch("config.json: decoder_sparse_step is 0; expected at least 1")
    if i in only or (i + 1) % step:
        yield from glu("mlp.", "mlp.", c.hidden_size, c.intermediate_size)
    else:
        yield from moe(c, c.num_experts, expert_bias=False)


FAMILY = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), decoder(layer), defaults={"head_dim": 128})
