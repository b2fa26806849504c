"""Tiny checkpoints of every covered family, made by ``transformers`` itself, so that names and shapes are not ours.

Every tensor is random, the norms and the buffers too: a tensor that is lost and comes back at its initial value
must not go unnoticed.
"""
from __future__ import annotations

import json
import zlib
from pathlib import Path

import torch

DIMS = dict(vocab_size=136, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64)
MOE = dict(moe_intermediate_size=24, num_experts_per_tok=2)
MLA = dict(num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=20, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10)

#: case -> (model class, config class, fields)
CASES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", dict(DIMS, attention_bias=True, mlp_bias=True)),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", dict(DIMS, tie_word_embeddings=True)),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", dict(DIMS)),
    "qwen2-tied": ("Qwen2ForCausalLM", "Qwen2Config", dict(DIMS, tie_word_embeddings=True)),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", dict(DIMS, head_dim=16)),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", dict(DIMS, **MOE, head_dim=16, num_experts=8)),
    "qwen3_moe-sparse2": (
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", dict(DIMS, **MOE, head_dim=16, num_experts=8, decoder_sparse_step=2)),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {
        **DIMS, **MOE, **MLA, "n_routed_experts": 8, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
        "n_shared_experts": 2}),
    "glm4_moe": ("Glm4MoeForCausalLM", "Glm4MoeConfig", dict(
        DIMS, **MOE, head_dim=16, n_routed_experts=8, first_k_dense_replace=1, use_qk_norm=True, attention_bias=True)),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", {
        **DIMS, **MOE, **MLA, "n_routed_experts": 8, "first_k_dense_replace": 1, "index_n_heads": 4,
        "index_head_dim": 16, "index_topk": 4, "index_topk_freq": 2, "index_skip_topk_offset": 1}),
    "gemma4": ("Gemma4ForCausalLM", "Gemma4TextConfig", dict(
        DIMS, head_dim=8, global_head_dim=16, num_global_key_value_heads=2, attention_k_eq_v=True,
        enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=24, hidden_size_per_layer_input=0,
        layer_types=["sliding_attention", "full_attention"] * 2)),
    "gemma4-ple": ("Gemma4ForCausalLM", "Gemma4TextConfig", dict(
        DIMS, head_dim=8, global_head_dim=16, num_kv_shared_layers=2, use_double_wide_mlp=True,
        hidden_size_per_layer_input=4, vocab_size_per_layer_input=136,
        layer_types=["sliding_attention", "full_attention"] * 2)),
}


def make_checkpoint(case: str, folder: Path, dtype: torch.dtype = torch.float32, **overrides) -> Path:
    """Write the checkpoint of ``case`` into ``folder`` (several files and an index) and return the folder."""
    import transformers

    model_class, config_class, fields = CASES[case]
    config = getattr(transformers, config_class)(**{**fields, **overrides})
    model = getattr(transformers, model_class)(config).to(dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(case.encode()))
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator))
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder


def load(folder: Path) -> tuple[dict[str, torch.Tensor], dict]:
    """All tensors and the config of a checkpoint folder."""
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= load_file(file)
    return state, json.loads((folder / "config.json").read_text())


def write(folder: Path, state: dict[str, torch.Tensor], config: Path | dict) -> Path:
    """Write a checkpoint folder from tensors."""
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config) if isinstance(config, dict) else config.read_text())
    return folder


def to_fp8(state: dict[str, torch.Tensor], cfg: dict, block=(8, 8)) -> tuple[dict[str, torch.Tensor], dict]:
    """The same with every projection in FP8 and random block scales beside it."""
    state = dict(state)
    cfg = {**cfg, "quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
    for name in [n for n in state if n.endswith("_proj.weight")]:
        rows, columns = state[name].shape
        state[name] = state[name].to(torch.float8_e4m3fn)
        state[name + "_scale_inv"] = torch.rand(-(-rows // block[0]), -(-columns // block[1]))
    return state, cfg


def with_spare_indexers(state: dict[str, torch.Tensor], cfg: dict) -> dict[str, torch.Tensor]:
    """The same with an indexer in the layers that share their indices, too, as published files of GLM-5 have them."""
    shared = [i for i, kind in enumerate(cfg["indexer_types"]) if kind == "shared"]
    model = {n: t.shape for n, t in state.items() if n.startswith("model.layers.0.self_attn.indexer.")}
    more = {n.replace("layers.0.", f"layers.{i}."): torch.randn(shape, dtype=state["model.norm.weight"].dtype) for i in shared for n, shape in model.items()}
    return state | more


def with_mtp(state: dict[str, torch.Tensor], cfg: dict) -> tuple[dict[str, torch.Tensor], dict]:
    """The same with one multi-token-prediction layer, in the layout of DeepSeek-V3's files."""
    h, last = cfg["hidden_size"], cfg["num_hidden_layers"] - 1
    before, at = f"model.layers.{last}.", f"model.layers.{last + 1}."
    state = state | {at + n.removeprefix(before): torch.randn(t.shape) for n, t in state.items() if n.startswith(before)}
    state |= {at + "enorm.weight": torch.randn(h), at + "hnorm.weight": torch.randn(h), at + "eh_proj.weight": torch.randn(h, 2 * h),
              at + "shared_head.norm.weight": torch.randn(h), at + "shared_head.head.weight": state["lm_head.weight"].clone(),
              at + "embed_tokens.weight": state["model.embed_tokens.weight"].clone()}
    return state, {**cfg, "num_nextn_predict_layers": 1, "mtp_layers_in_files": 1}
