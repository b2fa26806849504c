"""Qwen3-MoE: Qwen3 attention; sparse and dense layers by ``decoder_sparse_step`` and ``mlp_only_layers``."""
from vime.weights.families.base import Config, Family
from vime.weights.families.blocks import decoder, glu, gqa, moe, norms


def layer(c: Config, i: int):
    bias = bool(c.get("attention_bias", False))
    yield from norms(c)
    yield from gqa(c, qkv_bias=bias, out_bias=bias, qk_norm=True)
    if i in c.get("mlp_only_layers", []) or (i + 1) % c.get("decoder_sparse_step", 1):
        yield from glu("mlp.", "mlp.", c.hidden_size, c.intermediate_size)
    else:
        yield from moe(c, c.num_experts, expert_bias=False)


FAMILY = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), decoder(layer), defaults={"head_dim": 128})
