"""Tiny models with random weights as Hugging Face folders, and prompts for them."""
from __future__ import annotations

from pathlib import Path

import torch

VOCAB, HIDDEN, LAYERS = 320, 64, 3


def write_tiny(folder: Path, family: str = "llama", seed: int = 0, **changes: object) -> Path:
    """A 3-layer model of ``family`` (llama, qwen2, qwen3), grouped-query, head dim 32, saved in float32."""
    import transformers

    torch.manual_seed(seed)
    common = dict(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=160, num_hidden_layers=LAYERS, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=32, max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=False,
                  initializer_range=0.2)
    common.update(changes)
    kind = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    config = getattr(transformers, f"{kind}Config")(**common)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def hf_state(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, in float32."""
    from safetensors.torch import load_file

    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def prompts(count: int, seed: int = 1, shared: int = 40, longest: int = 50) -> list[list[int]]:
    """Prompts of different lengths with a common beginning, so that a warm prefix cache has something to hit."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(0, VOCAB, (n,), generator=generator).tolist()

    head = draw(shared)
    return [head + draw(3 + i * longest // count) for i in range(count)]
