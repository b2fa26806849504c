"""RMSNorm, rotary embedding and SiLU-and-multiply of vLLM, routed to ``vime.ops``.

vLLM's own replacement mechanism is used: a subclass registered out of tree by the name of the class it stands for. Only
``forward`` is overridden, so parameters, loading and repr stay vLLM's.
"""
from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import LinearScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding

from vime import ops
from vime.errors import VimeError


class UnsupportedLayer(VimeError):
    """A layer that vime cannot align. The message names the layer, what it has and what is covered."""


class VimeRMSNorm(RMSNorm):
    """``ops.rms_norm``; with a residual ``ops.add_rms_norm``, which normalises the sum rounded to the model dtype."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.variance_size_override is not None or not self.has_weight:
            raise UnsupportedLayer(f"RMSNorm of width {self.hidden_size} with var_hidden_size {self.variance_size_override} and "
                                   f"has_weight={self.has_weight}; covered: variance over the whole row, with a weight")

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return ops.rms_norm(x, self.weight, self.variance_epsilon)
        return ops.add_rms_norm(x, residual, self.weight, self.variance_epsilon)


class _Rotary:
    """Rotation of query and key by the shared float64 table. Mixed into the vLLM classes that it covers."""

    vime_cos: torch.Tensor | None = None
    vime_sin: torch.Tensor | None = None

    def vime_scaling(self) -> dict[str, Any] | None:
        return None

    def _table(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if self.vime_cos is None or self.vime_sin is None or self.vime_cos.device != device:
            # Read from the module, not from the config: what is in effect is what has to agree.
            positions = torch.arange(self.cos_sin_cache.shape[0], device=device)  # type: ignore[attr-defined]
            self.vime_cos, self.vime_sin = ops.rope_cos_sin(
                positions, self.rotary_dim, self.base, self.vime_scaling())  # type: ignore[attr-defined]
        return self.vime_cos, self.vime_sin

    def forward(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        cos_PR, sin_PR = self._table(query.device)
        rows = positions.flatten()

        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.view(rows.shape[0], -1, self.head_size)  # type: ignore[attr-defined]

        q_THD, k_TGD = ops.rotate(heads(query), None if key is None else heads(key), cos_PR, sin_PR, rows,
                                  interleaved=not self.is_neox_style)  # type: ignore[attr-defined]
        return q_THD.reshape(query.shape), None if key is None or k_TGD is None else k_TGD.reshape(key.shape)


class VimeRotaryEmbedding(_Rotary, RotaryEmbedding):
    """Plain rotary embedding."""


class VimeLlama3RotaryEmbedding(_Rotary, Llama3RotaryEmbedding):
    """Llama 3's frequency scaling."""

    def vime_scaling(self) -> dict[str, Any]:
        return {"rope_type": "llama3", "factor": self.scaling_factor, "low_freq_factor": self.low_freq_factor,
                "high_freq_factor": self.high_freq_factor, "original_max_position_embeddings": self.orig_max_position}


class VimeLinearScalingRotaryEmbedding(_Rotary, LinearScalingRotaryEmbedding):
    """Positions divided by one factor. vLLM's class can hold several (one a LoRA); more than one is refused."""

    def vime_scaling(self) -> dict[str, Any]:
        if len(self.scaling_factors) != 1:
            raise UnsupportedLayer(f"LinearScalingRotaryEmbedding with factors {self.scaling_factors}; covered: one factor")
        return {"rope_type": "linear", "factor": self.scaling_factors[0]}


class VimeSiluAndMul(SiluAndMul):
    """``ops.silu_and_mul`` over the fused ``[gate | up]``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.silu_and_mul(x)


NORMS: dict[str, type] = {"RMSNorm": VimeRMSNorm}
ROPES: dict[str, type] = {"RotaryEmbedding": VimeRotaryEmbedding, "Llama3RotaryEmbedding": VimeLlama3RotaryEmbedding,
         "LinearScalingRotaryEmbedding": VimeLinearScalingRotaryEmbedding}
ACTIVATIONS: dict[str, type] = {"SiluAndMul": VimeSiluAndMul}


def _register(classes: dict[str, type]) -> None:
    for name, cls in classes.items():
        if op_registry_oot.get(name) is not cls:
            CustomOp.register_oot(name=name)(cls)


def install_norm() -> None:
    _register(NORMS)


def install_rope() -> None:
    _register(ROPES)


def install_activation() -> None:
    _register(ACTIVATIONS)
