"""The shapes of the models that the CUDA implementations are proven on."""
from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense decoder that decide which kernels run."""

    name: str
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int

    def linears(self) -> dict[str, tuple[int, int]]:
        """Name -> (N, K) of every linear layer."""
        width = self.heads * self.head_dim
        return {
            "qkv": (width + 2 * self.groups * self.head_dim, self.hidden),
            "proj": (self.hidden, width),
            "fc1": (2 * self.ffn, self.hidden),
            "fc2": (self.hidden, self.ffn),
            "lm_head": (self.vocab, self.hidden),
        }


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("smollm2-135m", 576, 9, 3, 64, 1536, 49152),
        ModelShape("qwen2.5-0.5b", 896, 14, 2, 64, 4864, 151936),
        ModelShape("dense-7b", 4096, 32, 8, 128, 14336, 32000),
    )
}
