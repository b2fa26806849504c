"""The ordinary Megatron model for a config with latent attention and experts: what :mod:`ci.step_cuda` times vime against.

Megatron-core's multi-latent attention and grouped experts under TransformerEngine's spec, with the fusions it has. Its attention is
dense: Megatron's own sparse variant materialises the scores of all keys, which is slower, and over sequences no longer than the
indexer's top-k both attend to the same keys. It has no indexer to compute.
"""
from __future__ import annotations

from typing import Any


def build(hf: dict[str, Any], dtype: Any, device: str) -> Any:
    """A ``GPTModel`` in train mode of the sizes of ``hf``, a ``deepseek_v3`` or ``glm_moe_dsa`` config, with random weights.

    Args:
        hf: the parsed ``config.json``.
        dtype: of parameters and activations, a ``torch.dtype``.
    """
    import torch.nn.functional as F
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from vime import latent as latents
    from vime.megatron.experts import config_fields

    experts = latents.experts(hf)
    assert experts is not None, "a model without experts has an ordinary counterpart in vime.megatron.model"
    base = float((hf.get("rope_parameters") or {}).get("rope_theta") or hf.get("rope_theta") or 10000.0)
    config = MLATransformerConfig(
        num_layers=hf["num_hidden_layers"], hidden_size=hf["hidden_size"], ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"], q_lora_rank=hf["q_lora_rank"], kv_lora_rank=hf["kv_lora_rank"],
        qk_head_dim=hf["qk_nope_head_dim"], qk_pos_emb_head_dim=hf["qk_rope_head_dim"], v_head_dim=hf["v_head_dim"],
        rope_type="rope", rotary_base=base, normalization="RMSNorm", layernorm_epsilon=float(hf["rms_norm_eps"]), qk_layernorm=True,
        add_bias_linear=False, gated_linear_unit=True, activation_func=F.silu, hidden_dropout=0.0, attention_dropout=0.0,
        params_dtype=dtype, pipeline_dtype=dtype, bf16=True, transformer_impl="transformer_engine", bias_activation_fusion=True,
        bias_dropout_fusion=True, cross_entropy_loss_fusion=True, masked_softmax_fusion=True, gradient_accumulation_fusion=False,
        **{**config_fields(experts), "moe_grouped_gemm": True, "moe_permute_fusion": True, "moe_router_fusion": True})
    specs = [get_gpt_layer_with_transformer_engine_spec(num_experts=experts.count if experts.sparse[i] else None, moe_grouped_gemm=True,
                                                        qk_layernorm=True, multi_latent_attention=True)
             for i in range(config.num_layers)]
    model = GPTModel(config=config, transformer_layer_spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=TENorm),
                     vocab_size=hf["vocab_size"], max_sequence_length=8192, parallel_output=False,
                     share_embeddings_and_output_weights=False, position_embedding_type="rope", rotary_base=base)
    return model.to(device=device)
