"""GLM-5 and DeepSeek-V3.2 style sparse attention: MLA with an indexer in those layers that compute their own top-k.

Published files also hold indexers of layers that take their indices from a layer before. Nobody evaluates those; they are
converted as they are, or not at all if they are not there.
"""
from vime.latent import indexer_types
from vime.weights.families.base import Config, Family
from vime.weights.families.blocks import copy, decoder, linear, mla, norms
from vime.weights.families.deepseek_v3 import mlp


def has_indexer(c: Config, i: int) -> bool:
    """Whether a layer computes its own indices. MTP layers do."""
    return i >= c.num_hidden_layers or indexer_types(c.raw)[i] == "full"


def indexer(c: Config):
    heads, d, h = c.index_n_heads, c.index_head_dim, c.hidden_size
    to, at = "self_attention.core_attention.indexer.", "self_attn.indexer."
    yield from linear(f"{to}linear_wq_b", f"{at}wq_b", heads * d, c.q_lora_rank, "none")
    yield from linear(f"{to}linear_wk", f"{at}wk", d, h, "none")
    yield copy(f"{to}k_norm.weight", f"{at}k_norm.weight", d)
    yield copy(f"{to}k_norm.bias", f"{at}k_norm.bias", d)
    yield from linear(f"{to}linear_weights_proj", f"{at}weights_proj", heads, h, "none")


def layer(c: Config, i: int):
    yield from norms(c)
    yield from mla(c)
    if has_indexer(c, i):
        yield from indexer(c)
    yield from mlp(c, i)


def spare(c: Config, i: int):
    if not has_indexer(c, i):
        yield from indexer(c)


FAMILY = Family("glm_moe_dsa", ("GlmMoeDsaForCausalLM",), decoder(layer, mtp=True, spare=spare))
