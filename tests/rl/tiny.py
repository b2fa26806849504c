"""A tiny random Llama, Qwen2 or Qwen3 checkpoint with a byte tokenizer, and a file of word problems, for tests of the loop."""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from vime.rl.data import Problem

VOCAB, EOS = 272, 256


def write_checkpoint(folder: Path, kind: str = "llama", layers: int = 2, hidden: int = 64, seed: int = 0, tied: bool = True) -> Path:
    """Write the checkpoint to ``folder`` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    heads, kv_heads, head_dim, ffn = 4, 2, 32, 2 * hidden
    arch = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
    config = {
        "architectures": [arch], "model_type": kind, "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "tie_word_embeddings": tied, "attention_bias": False, "eos_token_id": EOS, "bos_token_id": EOS, "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 0.08) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    state = {"model.embed_tokens.weight": normal(VOCAB, hidden, scale=0.3), "model.norm.weight": 1 + normal(hidden)}
    if not tied:
        state["lm_head.weight"] = normal(VOCAB, hidden, scale=0.3)
    for i in range(layers):
        p = f"model.layers.{i}."
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            state[f"{p}self_attn.{name}_proj.weight"] = normal(rows * head_dim, hidden)
            if kind == "qwen2":
                state[f"{p}self_attn.{name}_proj.bias"] = normal(rows * head_dim)
            if kind == "qwen3" and name != "v":
                state[f"{p}self_attn.{name}_norm.weight"] = 1 + normal(head_dim)
        state[f"{p}self_attn.o_proj.weight"] = normal(hidden, heads * head_dim)
        state[f"{p}mlp.gate_proj.weight"], state[f"{p}mlp.up_proj.weight"] = normal(ffn, hidden), normal(ffn, hidden)
        state[f"{p}mlp.down_proj.weight"] = normal(hidden, ffn)
        state[f"{p}input_layernorm.weight"] = 1 + normal(hidden)
        state[f"{p}post_attention_layernorm.weight"] = 1 + normal(hidden)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder)
    return folder


def write_jsonl(problems: Sequence[Problem], path: Path) -> None:
    """Word problems in GSM8K's layout, one a line."""
    path.write_text("".join(json.dumps({"question": p.question, "answer": p.answer}) + "\n" for p in problems), encoding="utf-8")


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}))
