"""GLM-4.5 and 4.6: biased QKV, optional QK norm, leading dense layers, expert bias, a shared expert, MTP layers."""
from vime.weights.families.base import Config, Family
from vime.weights.families.blocks import decoder, glu, gqa, moe, norms


def layer(c: Config, i: int):
    yield from norms(c)
    yield from gqa(c, qkv_bias=bool(c.get("attention_bias", False)), out_bias=False, qk_norm=bool(c.get("use_qk_norm")))
    if i < c.first_k_dense_replace:
        yield from glu("mlp.", "mlp.", c.hidden_size, c.intermediate_size)
    else:
        shared = c.moe_intermediate_size * c.count("n_shared_experts")
        yield from moe(c, c.n_routed_experts, expert_bias=True, shared_ffn=shared)


FAMILY = Family("glm4_moe", ("Glm4MoeForCausalLM",), decoder(layer, mtp=True))
