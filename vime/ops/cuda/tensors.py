"""One memory form for every kernel input, so that one compiled kernel serves every call.

Triton compiles a kernel anew when a pointer is not 16-byte aligned or a stride has another divisibility, and the new
code may add in another order. So the wrappers bring rows into one form first: contiguous, aligned, inner stride 1.
"""
from __future__ import annotations

import torch

ALIGNMENT = 16
#: Fewest rows a GEMM is launched with, see :mod:`vime.ops.cuda.gemm`.
MIN_ROWS = 64


def dense(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself where it is contiguous and 16-byte aligned, else a copy that is."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``x`` with all leading dimensions folded into one: [..., H] -> [T, H], dense."""
    return dense(x.reshape(-1, x.shape[-1]))


def empty_rows(rows: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """[rows, width] in memory that has room for :data:`MIN_ROWS`, so that a GEMM that follows need not copy it."""
    return torch.empty(max(rows, MIN_ROWS), width, dtype=like.dtype, device=like.device)[:rows]


def with_min_rows(a_MK: torch.Tensor) -> torch.Tensor:
    """``a`` with at least :data:`MIN_ROWS` rows; what the added ones hold is arbitrary."""
    M, K = a_MK.shape
    if M >= MIN_ROWS:
        return a_MK
    size = (MIN_ROWS, K)
    room = a_MK.untyped_storage().nbytes() // a_MK.element_size() - a_MK.storage_offset()
    if a_MK.is_contiguous() and room >= MIN_ROWS * K:
        return a_MK.as_strided(size, (K, 1))
    wide = a_MK.new_empty(size)
    wide[:M].copy_(a_MK)
    return wide
