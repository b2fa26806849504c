"""Tiny models of the covered families: the Hugging Face one as third party, and Megatron's with the same weights."""
from __future__ import annotations

import functools
import zlib
from typing import Any

import torch

from vime.megatron import model as models

VOCAB = 131
_DIMS = dict(vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.08)
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}
#: family -> (classes, fields)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", dict(_DIMS, tie_word_embeddings=True)),
    "llama3": ("Llama", dict(_DIMS, tie_word_embeddings=False, rope_parameters=_LLAMA3)),
    "qwen2": ("Qwen2", dict(_DIMS, tie_word_embeddings=False)),
    "qwen3": ("Qwen3", dict(_DIMS, head_dim=16, tie_word_embeddings=True)),
}
_MLA = dict(q_lora_rank=32, kv_lora_rank=40, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12)
_EXPERTS = dict(num_experts_per_tok=3, moe_intermediate_size=20)
_SIGMOID = dict(n_routed_experts=8, n_shared_experts=1, norm_topk_prob=True, routed_scaling_factor=2.5)
_BASE = {"rope_theta": 10000.0, "rope_type": "default"}
#: The same with experts: (classes, fields). The indexer has many heads, so that no score is zero and none are tied.
SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", dict(_DIMS, **_EXPERTS, head_dim=16, num_experts=8, norm_topk_prob=True, mlp_only_layers=[1],
                                   tie_word_embeddings=False, rope_parameters=_BASE)),
    "deepseek_v3": ("DeepseekV3", dict(_DIMS | dict(num_key_value_heads=6), **_EXPERTS, **_MLA, **_SIGMOID, n_group=1, topk_group=1,
                                       first_k_dense_replace=1, tie_word_embeddings=False, rope_parameters=_BASE)),
    "deepseek_v3 in groups": ("DeepseekV3", dict(_DIMS | dict(num_key_value_heads=6), **(_EXPERTS | dict(num_experts_per_tok=2)),
                                                 **_MLA, **_SIGMOID, n_group=2, topk_group=1, first_k_dense_replace=1, tie_word_embeddings=False,
                                                 rope_parameters=_BASE)),
    "glm_moe_dsa": ("GlmMoeDsa", dict(_DIMS | dict(num_key_value_heads=6, num_hidden_layers=4), **_EXPERTS, **_MLA, **_SIGMOID,
                                      n_group=1, topk_group=1, mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
                                      indexer_types=["full", "full", "shared", "shared"], index_n_heads=24, index_head_dim=16,
                                      index_topk=8, tie_word_embeddings=False, rope_parameters=_BASE)),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@functools.cache
def huggingface(family: str) -> tuple[Any, dict[str, Any]]:
    """A random fp32 model and its config; every tensor is random, norms and biases too."""
    import transformers

    kind, fields = (FAMILIES | SPARSE)[family]
    config = getattr(transformers, f"{kind}Config")(**fields)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(
        config, attn_implementation="eager", experts_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(zlib.crc32(family.encode()))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1.0 + 0.2 * noise if "norm" in name else 0.15 * noise)
        for name, tensor in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return model, {**config.to_dict(), "architectures": [f"{kind}ForCausalLM"]}


def as_files(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a Hugging Face model under the names its files have: experts one by one."""
    import tempfile

    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(f"{folder}/model.safetensors")


def build(family: str, dtype: torch.dtype, recompute: bool = False, **options: Any) -> Any:
    """A fresh Megatron model with the weights of :func:`huggingface`. With experts: build it with vime on."""
    reference, config = huggingface(family)
    model = models.build_model(config, dtype, recompute=recompute, **options)
    models.load_weights(model, as_files(reference) if family in SPARSE else reference.state_dict(), config)
    return model


shared = functools.cache(build)


def sequences(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bits, and finite."""
    if a.dtype != b.dtype or a.shape != b.shape or not bool(torch.isfinite(a).all()):
        return False
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[a.dtype]
    return torch.equal(a.detach().contiguous().view(integers), b.detach().contiguous().view(integers))
