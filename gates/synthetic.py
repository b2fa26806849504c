"""Hugging Face folders with random weights, for profiles that need a shape and no training.

Written once into the cache folder; of the large ones only what their weights are made of (:mod:`vime.weights.counted`). The
scales are chosen so that a random model is a fair subject: its distribution over tokens is neither flat (every token alike,
nothing to tell apart) nor a point (every log-probability 0).
"""
from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alignment.files import locked
from gates import byte_tokenizer, synthetic_experts

#: A dense shape: (family, layers, hidden, ffn, heads, KV heads, head dim, vocabulary, tied head).
DENSE: dict[str, tuple[str, int, int, int, int, int, int, int, bool]] = {
    "dense-tiny": ("qwen2", 4, 128, 320, 4, 2, 32, 320, False),
    "qwen2.5-0.5b": ("qwen2", 24, 896, 4864, 14, 2, 64, 151936, True),
    "dense-7b": ("llama", 32, 4096, 11008, 32, 8, 128, 32000, False),
}
_NAMES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def config_of(name: str) -> dict[str, Any]:
    """``config.json`` of one of :data:`DENSE`, or of :data:`gates.synthetic_experts.SPARSE`."""
    if name in synthetic_experts.SPARSE:
        return dict(synthetic_experts.SPARSE[name])
    family, layers, hidden, ffn, heads, kv_heads, head_dim, vocab, tied = DENSE[name]
    return {"architectures": [_NAMES[family]], "model_type": family, "num_hidden_layers": layers, "hidden_size": hidden,
            "intermediate_size": ffn, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
            "vocab_size": vocab, "tie_word_embeddings": tied, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
            "max_position_embeddings": 4096, "hidden_act": "silu", "attention_bias": False, "torch_dtype": "bfloat16",
            "bos_token_id": 0, "eos_token_id": 1, "attention_dropout": 0.0}


def ensure(name: str, cache: Path, counted: bool = False) -> Path:
    """The checkpoint folder of ``name`` under ``cache``; written first if it is not there, or of another config or form.

    Raises:
        vime.weights.folders.CheckpointError: it cannot be written.
    """
    from vime.weights.counted import is_counted

    folder = cache / name
    config, found = config_of(name), folder / "config.json"
    with locked(folder):  # gates and runs that start together on a fresh machine
        if found.is_file() and (json.loads(found.read_text()) != config or is_counted(folder) != counted):
            shutil.rmtree(folder)  # an earlier version of this profile
        if not found.is_file():
            (count if counted else write)(config, folder)
        if config["vocab_size"] >= byte_tokenizer.SIZE:
            byte_tokenizer.ensure(folder)
    return folder


def write(config: dict[str, Any], folder: Path) -> Path:
    """Write a checkpoint of that ``config.json`` to ``folder``. Weights are bf16, an expert bias fp32.

    Raises:
        vime.weights.folders.CheckpointError: it cannot be written.
    """
    import torch

    from vime.weights.writer import HfWriter

    def dtype(name: str) -> torch.dtype:
        return torch.float32 if synthetic_experts.is_fp32(name) else torch.bfloat16

    specs = {n: (dtype(n), shape) for n, shape, _ in entries(config)}
    config_file = folder.parent / f".{folder.name}.config" / "config.json"
    config_file.parent.mkdir(parents=True, exist_ok=True)
    config_file.write_text(json.dumps(config, indent=1))
    with HfWriter(folder, specs, copy=[config_file]) as writer:
        for number, (n, shape, (mean, scale)) in enumerate(entries(config)):
            generator = torch.Generator().manual_seed(number)
            writer.write(n, (mean + scale * torch.randn(*shape, generator=generator)).to(dtype(n)))
    return folder


def count(config: dict[str, Any], folder: Path) -> Path:
    """A folder of that ``config.json`` whose tensors are made of a counter: names, dtypes, shapes and scales as of :func:`write`,
    other numbers."""
    from vime.weights.counted import Drawn
    from vime.weights.counted import write as write_counted

    return write_counted(folder, config, (
        (n, Drawn("float32" if synthetic_experts.is_fp32(n) else "bfloat16", shape, mean, scale))
        for n, shape, (mean, scale) in entries(config)))


def entries(config: dict[str, Any]) -> Iterator[synthetic_experts.Entry]:
    """Name, shape, and (mean, scale) of every tensor of a config of any family here."""
    return _dense(config) if config["model_type"] in _NAMES else synthetic_experts.tensors(config)


def _dense(c: dict[str, Any]) -> Iterator[synthetic_experts.Entry]:
    hidden, ffn, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    inner = (0.0, 1.4 * hidden**-0.5)
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden), (0.0, 2.5 * hidden**-0.5)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield f"{p}self_attn.{name}_proj.weight", (rows, hidden), inner
            if c["model_type"] == "qwen2":
                yield f"{p}self_attn.{name}_proj.bias", (rows,), (0.0, 0.1)
        yield f"{p}self_attn.o_proj.weight", (hidden, q), inner
        yield f"{p}mlp.gate_proj.weight", (ffn, hidden), inner
        yield f"{p}mlp.up_proj.weight", (ffn, hidden), inner
        yield f"{p}mlp.down_proj.weight", (hidden, ffn), (0.0, ffn**-0.5)
        yield f"{p}input_layernorm.weight", (hidden,), (1.0, 0.1)
        yield f"{p}post_attention_layernorm.weight", (hidden,), (1.0, 0.1)
    yield "model.norm.weight", (hidden,), (1.0, 0.1)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], hidden), (0.0, 2.5 * hidden**-0.5)
