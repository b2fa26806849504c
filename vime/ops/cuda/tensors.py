"""One memory form for every kernel input, so that one compiled kernel serves every call.

Triton compiles a kernel anew when a pointer is not 16-byte aligned or a stride has another divisibility, and the new
code may add in another order. So the wrappers bring rows into one form first: contiguous, aligned, inner stride 1.
"""
from __future__ import annotations

import torch

ALIGNMENT = 16


def dense(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself where it is contiguous and 16-byte aligned, else a copy that is."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``x`` with all leading dimensions folded into one: [..., H] -> [T, H], dense."""
    return dense(x.reshape(-1, x.shape[-1]))
