"""The device form of :func:`alignment.digest.device_digest` in one pass over the memory, on a GPU.

The same text, bit for bit: two 64-bit sums over the 32-bit words of a tensor, each word mixed with its position. Written with
torch's operations that is about two hundred kernels a chunk; here a word is read once and the sums are added up by integer
atomics, whose order changes nothing. Elsewhere than on a GPU :func:`device_digest` is that of :mod:`alignment`, which stays the
definition and what this is tested against.
"""
from __future__ import annotations

import functools
from typing import Any

import torch
import xxhash

from alignment import digest as plain

_BLOCK = 4096


def device_digest(value: torch.Tensor) -> str:
    """``lanes:`` and 32 hex digits of a tensor, computed where it lies; four numbers leave the device."""
    if not value.is_cuda or value.is_complex() or value.is_quantized:
        return plain.device_digest(value)
    return text(value, sums(value))


def text(value: torch.Tensor, found: torch.Tensor) -> str:
    """The digest of ``value`` from its :func:`sums`."""
    first0, second0, first1, second1 = found.tolist()
    lanes = [((first << 32) + second) & (1 << 64) - 1 for first, second in ((first0, second0), (first1, second1))]
    dtype = str(value.dtype).removeprefix("torch.")
    state = xxhash.xxh3_128(f"{dtype}|{','.join(map(str, value.shape))}|".encode())
    state.update(f"{value.numel() * value.element_size()}|{lanes[0]:016x}|{lanes[1]:016x}".encode())
    return "lanes:" + state.hexdigest()


def sums(value: torch.Tensor) -> torch.Tensor:
    """``[4]`` int64 on the tensor's device: sums of the first and the second mix under either seed."""
    flat = value.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    out = torch.zeros(4, dtype=torch.int64, device=flat.device)
    whole = flat.numel() // 4
    if flat.data_ptr() % 4:  # a view that begins in the middle of a word
        flat = flat.clone()
    parts = [(flat[:4 * whole], 0)]
    if rest := flat.numel() % 4:
        parts.append((torch.nn.functional.pad(flat[4 * whole:], (0, 4 - rest)), whole))
    for part, first in parts:
        if words := part.numel() // 4:
            _kernel()[(-(-words // _BLOCK),)](part.view(torch.int32), out, words, first, BLOCK=_BLOCK, num_warps=8)
    return out


@functools.cache
def _kernel() -> Any:
    """Made when first needed: Triton is there where a GPU is."""
    from vime.weights.lanes_triton import lanes

    return lanes
