"""Shapes with experts, latent attention and sparse attention, as Hugging Face folders hold them.

Tensor names are those of the files on the hub: experts one by one, the expert bias beside the gate in fp32. The fields
of ``config.json`` are what ``transformers`` writes and, where a release of vLLM reads another field for the same thing,
that field too (``topk_method``, ``scoring_func``, ``indexer_rope_interleave``, ``index_topk_freq``).
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: Name, shape, (mean, scale) of the normal distribution it is drawn from.
Entry = tuple[str, tuple[int, ...], tuple[float, float]]

_COMMON = {"tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
           "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
           "synthetic_weights": 2}  # raised whenever the weights change, so that a cached folder is written anew
_MLA = {"q_lora_rank": 64, "kv_lora_rank": 256, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
        "rope_interleave": True}
_SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
            "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "moe_layer_freq": 1, "num_nextn_predict_layers": 0}
_TINY = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
         "num_key_value_heads": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 4}


def _rope(base: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": base, "rope_type": "default"}}


#: Six layers of GLM-5.2: three dense, then three with experts; indices computed on layers 0 to 3 and shared after that.
_GLM = {**_COMMON, **_SIGMOID, **_rope(8000000.0), "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
        "num_hidden_layers": 6, "first_k_dense_replace": 3, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 3,
        "indexer_types": ["full"] * 4 + ["shared"] * 2, "index_topk_freq": 4, "index_skip_topk_offset": 4,
        "indexer_rope_interleave": True, "rope_interleave": True, "rms_norm_eps": 1e-5, "initializer_range": 0.02}

SPARSE: dict[str, dict[str, Any]] = {
    # 16 index heads: a key scores exactly 0 where every head's ReLU is 0, and with few heads such ties, which transformers
    # breaks in no order of its own, would often lie at the border of the selection.
    "glm5.2-6layer-tiny": {**_GLM, **_TINY, **_MLA, "n_routed_experts": 16, "index_n_heads": 16, "index_head_dim": 32,
                           "index_topk": 16},
    "glm5.2-6layer": {**_GLM, "vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288,
                      "num_attention_heads": 64, "num_key_value_heads": 64, "moe_intermediate_size": 2048,
                      "num_experts_per_tok": 8, "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
                      "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 256, "index_n_heads": 32,
                      "index_head_dim": 128, "index_topk": 2048, "max_position_embeddings": 202752, "synthetic_weights": 3},
    "deepseek-v3-tiny": {**_COMMON, **_SIGMOID, **_TINY, **_MLA, **_rope(10000.0), "architectures": ["DeepseekV3ForCausalLM"],
                         "model_type": "deepseek_v3", "num_hidden_layers": 4, "first_k_dense_replace": 1,
                         "n_routed_experts": 16, "rms_norm_eps": 1e-6},
    "qwen3-moe-tiny": {**_COMMON, **_TINY, **_rope(1000000.0), "architectures": ["Qwen3MoeForCausalLM"],
                       "model_type": "qwen3_moe", "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 32,
                       "num_experts": 16, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
                       "rms_norm_eps": 1e-6, "use_sliding_window": False},
}
SPARSE["glm5.2-6layer-128e"] = SPARSE["glm5.2-6layer"] | {"n_routed_experts": 128}


def is_fp32(name: str) -> bool:
    """The expert bias is kept in fp32 whatever the model's dtype: it decides ties of the choice of experts."""
    return name.endswith(".e_score_correction_bias")


def tensors(c: dict[str, Any]) -> Iterator[Entry]:
    """Every tensor of a config of one of the three families.

    Scales: the outputs of all layers together are as large as the embedding, and fp32 rounding (1e-7 of each) is not
    amplified beyond 1e-5 in a log-probability, so that another order of additions can be told from another equation.
    """
    from vime import latent

    hidden, norm = c["hidden_size"], (1.0, 0.1)
    experts, mla = latent.experts(c), latent.latent(c)
    assert experts is not None
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden), (0.0, 12 * 128**-0.5)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        yield from _gqa(c, f"{p}self_attn.") if mla is None else _mla(mla, hidden, i, f"{p}self_attn.")
        if experts.sparse[i]:
            yield f"{p}mlp.gate.weight", (experts.count, hidden), _inner(hidden)
            if experts.bias:
                # The more experts, the closer their scores: with 0.1 every fifth of 256 would never be chosen.
                yield f"{p}mlp.gate.e_score_correction_bias", (experts.count,), (0.0, 0.1 if experts.count <= 16 else 0.02)
            for e in range(experts.count):
                yield from _glu(f"{p}mlp.experts.{e}.", hidden, experts.ffn)
            if experts.shared:
                yield from _glu(f"{p}mlp.shared_experts.", hidden, experts.shared)
        else:
            yield from _glu(f"{p}mlp.", hidden, c["intermediate_size"])
        yield f"{p}input_layernorm.weight", (hidden,), norm
        yield f"{p}post_attention_layernorm.weight", (hidden,), norm
    yield "model.norm.weight", (hidden,), norm
    yield "lm_head.weight", (c["vocab_size"], hidden), (0.0, 1.5 * hidden**-0.5)


def _inner(width: int) -> tuple[float, float]:
    return 0.0, width**-0.5


def _glu(prefix: str, hidden: int, ffn: int) -> Iterator[Entry]:
    yield f"{prefix}gate_proj.weight", (ffn, hidden), _inner(hidden)
    yield f"{prefix}up_proj.weight", (ffn, hidden), _inner(hidden)
    yield f"{prefix}down_proj.weight", (hidden, ffn), (0.0, ffn**-0.5)


def _gqa(c: dict[str, Any], prefix: str) -> Iterator[Entry]:
    hidden, dim = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        yield f"{prefix}{name}_proj.weight", (rows, hidden), _inner(hidden)
    yield f"{prefix}o_proj.weight", (hidden, q), _inner(q)
    yield f"{prefix}q_norm.weight", (dim,), (1.0, 0.1)
    yield f"{prefix}k_norm.weight", (dim,), (1.0, 0.1)


def _mla(m: Any, hidden: int, layer: int, prefix: str) -> Iterator[Entry]:
    yield f"{prefix}q_a_proj.weight", (m.q_rank, hidden), _inner(hidden)
    yield f"{prefix}q_a_layernorm.weight", (m.q_rank,), (1.0, 0.1)
    yield f"{prefix}q_b_proj.weight", (m.heads * (m.nope + m.rope), m.q_rank), _inner(m.q_rank)
    yield f"{prefix}kv_a_proj_with_mqa.weight", (m.row, hidden), _inner(hidden)
    yield f"{prefix}kv_a_layernorm.weight", (m.kv_rank,), (1.0, 0.1)
    yield f"{prefix}kv_b_proj.weight", (m.heads * (m.nope + m.v), m.kv_rank), _inner(m.kv_rank)
    yield f"{prefix}o_proj.weight", (hidden, m.heads * m.v), _inner(m.heads * m.v)
    if m.indexer is not None and m.indexer.full[layer]:
        index = m.indexer
        yield f"{prefix}indexer.wq_b.weight", (index.heads * index.dim, m.q_rank), _inner(m.q_rank)
        yield f"{prefix}indexer.wk.weight", (index.dim, hidden), _inner(hidden)
        yield f"{prefix}indexer.k_norm.weight", (index.dim,), (1.0, 0.1)
        yield f"{prefix}indexer.k_norm.bias", (index.dim,), (0.0, 0.1)
        yield f"{prefix}indexer.weights_proj.weight", (index.heads, hidden), _inner(hidden)
