"""DeepSeek-V3 and R1: MLA, leading dense layers, expert bias in fp32, shared experts, MTP layers, block FP8."""
from vime.weights.families.base import Config, Family
from vime.weights.families.blocks import decoder, glu, mla, moe, norms


def mlp(c: Config, i: int):
    """Dense or sparse, for this family and for those built on it."""
    kinds = c.kinds("mlp_layer_types", c.num_hidden_layers)
    if kinds[i] == "dense" if kinds and i < len(kinds) else i < c.first_k_dense_replace:
        yield from glu("mlp.", "mlp.", c.hidden_size, c.intermediate_size)
    else:
        shared = c.moe_intermediate_size * c.count("n_shared_experts")
        yield from moe(c, c.n_routed_experts, expert_bias=True, shared_ffn=shared)


def layer(c: Config, i: int):
    yield from norms(c)
    yield from mla(c)
    yield from mlp(c, i)


FAMILY = Family("deepseek_v3", ("DeepseekV3ForCausalLM",), decoder(layer, mtp=True))
