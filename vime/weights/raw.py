"""A tensor as the bytes it is made of: what is digested, sent and compared, whatever the dtype."""
from __future__ import annotations

import torch


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in row-major order, uint8 ``[nbytes]``; a view, or a copy where it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same dtype, shape and bytes. Used to refuse bad input; verdicts come from ``alignment``."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw_bytes(a), raw_bytes(b))
