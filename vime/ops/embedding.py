"""Token embedding. The forward is a copy and exact anywhere; the backward adds rows, and must do so in one order."""
from __future__ import annotations

import torch

from vime.ops import registry


def embedding(ids_T: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """``x[t] = weight[ids[t]]``.

    Args:
        ids_T: int32 or int64, any shape, ``0 <= id < V``.
        weight_VH: fp32 or bf16.

    Returns:
        ``[*ids.shape, H]``. Differentiable in ``weight_VH``: rows of one token are added in fp32 in the order of
        ``ids_T`` and rounded once.

    Raises:
        IndexError: an id is out of range (the first one is named).
    """
    if weight_VH.dim() != 2 or ids_T.is_floating_point():
        raise ValueError(f"embedding: expected integer ids and weight [V, H], found {ids_T.dtype} and {tuple(weight_VH.shape)}")
    return registry.call("embedding", "embedding", weight_VH, ids_T, weight_VH)
