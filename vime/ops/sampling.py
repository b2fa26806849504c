"""Sampling that depends on nothing but the row: logits, seed, position.

A generator with state makes a token depend on who else was in the batch. A counter-based generator does not: the
random number of (seed, position, vocabulary index) is a pure function (Philox4x32-10, Salmon et al., SC'11).
"""
from __future__ import annotations

import torch

from vime.ops import registry


def sample(logits_TV: torch.Tensor, seed_T: torch.Tensor, position_T: torch.Tensor, temperature_T: torch.Tensor,
           top_k_T: torch.Tensor | None = None, top_p_T: torch.Tensor | None = None) -> torch.Tensor:
    """``argmax_v(logits[v] / temperature + g[v])``, ``g = -log(-log(u))``, ``u = philox(seed, position, v)``.

    The Gumbel-max form of sampling from the softmax. Lowest id wins ties. Temperature 0 is greedy.

    Args:
        logits_TV: fp32 or bf16 ``[T, V]``.
        seed_T: int64 ``[T]``, any value.
        position_T: int ``[T]``: position of the token being drawn in its sequence.
        temperature_T: fp32 ``[T]``, >= 0.
        top_k_T: int ``[T]``, keep the k largest logits; <= 0 or >= V: all.
        top_p_T: fp32 ``[T]``, keep the shortest prefix, by falling probability, whose mass reaches p (at least one
            token), after top-k; >= 1: all. Ties in both: lower id first.

    Returns:
        int64 ``[T]``.
    """
    rows = logits_TV.shape[:1]
    if logits_TV.dim() != 2:
        raise ValueError(f"sample: logits must be [T, V], found {tuple(logits_TV.shape)}")
    for name, value in (("seed", seed_T), ("position", position_T), ("temperature", temperature_T),
                        ("top_k", top_k_T), ("top_p", top_p_T)):
        if value is not None and value.shape != rows:
            raise ValueError(f"sample: {name} {tuple(value.shape)} does not fit logits {tuple(logits_TV.shape)}; expected [T]")
    device = logits_TV.device

    def cast(value: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        return None if value is None else value.to(device, dtype)

    return registry.call("sampling", "sample", logits_TV, logits_TV.detach(), cast(seed_T, torch.int64),
                         cast(position_T, torch.int64), cast(temperature_T, torch.float32),
                         cast(top_k_T, torch.int64), cast(top_p_T, torch.float32))
