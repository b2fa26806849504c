"""The device form of :func:`alignment.digest.device_digest` in one pass over the memory, on a GPU.

The same text, bit for bit: two 64-bit sums over the 32-bit words of a tensor, each word mixed with its position. Written with
torch's operations that is about two hundred kernels a chunk; here a word is read once and the sums are added up by integer
atomics, whose order changes nothing. Elsewhere than on a GPU :func:`device_digest` is that of :mod:`alignment`, which stays the
definition and what this is tested against.
"""
from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import xxhash

from alignment import digest as plain

#: Bytes of tensors on a CPU from which threads take less time than they cost.
_THREADS_FROM = 1 << 28
_BLOCK = 4096


class Begun(NamedTuple):
    """A digest that the device is at. ``sums``: int64 ``[4]``, first and second mix under either seed."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sums: torch.Tensor


def device_digest(value: torch.Tensor) -> str:
    """``lanes:`` and 32 hex digits of a tensor, computed where it lies; four numbers leave the device."""
    return finish([begin(value)])[0]


def begin(value: torch.Tensor) -> Begun | str:
    """Have a GPU start on the digest of what ``value`` holds now and wait for nothing; elsewhere, the digest itself."""
    if not value.is_cuda or value.is_complex() or value.is_quantized:
        return plain.device_digest(value)
    return begun(value)


def finish(digests: Sequence[Begun | str]) -> list[str]:
    """The texts of what was begun, all on one device, in that order. Waits once."""
    under_way = [one for one in digests if not isinstance(one, str)]
    numbers = iter(torch.stack([one.sums for one in under_way]).tolist() if under_way else ())
    return [one if isinstance(one, str) else _text(one, next(numbers)) for one in digests]


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Of each tensor: the host's digest for one on a CPU, else the device's. A GPU has them all before it and is waited for once; on a CPU
    as many threads share many of them as torch has (xxhash lets go of the interpreter)."""
    found: dict[str, Begun | str] = {name: "" if tensor.device.type == "cpu" else begin(tensor) for name, tensor in tensors.items()}
    on_host = sorted((name for name, one in found.items() if one == ""), key=lambda name: -tensors[name].nbytes)
    large = sum(tensors[name].nbytes for name in on_host) >= _THREADS_FROM
    threads = max(1, torch.get_num_threads()) if large else 1
    shares = [on_host[first::threads] for first in range(threads)]  # by size, so that they are alike

    def share(names: Sequence[str]) -> dict[str, str]:
        return {name: plain.digest(tensors[name]) for name in names}

    if threads == 1:
        found.update(share(on_host))
    else:
        with ThreadPoolExecutor(threads) as pool:  # a share a thread: handing out tensor by tensor costs a third of the time
            for part in pool.map(share, shares):
                found.update(part)
    return dict(zip(found, finish(list(found.values())), strict=True))


def _text(one: Begun, numbers: Sequence[int]) -> str:
    lanes = [((first << 32) + second) & (1 << 64) - 1 for first, second in (numbers[:2], numbers[2:])]
    state = xxhash.xxh3_128(f"{one.dtype}|{','.join(map(str, one.shape))}|".encode())
    state.update(f"{one.nbytes}|{lanes[0]:016x}|{lanes[1]:016x}".encode())
    return "lanes:" + state.hexdigest()


def begun(value: torch.Tensor) -> Begun:
    """Launch the kernel over the bytes of ``value`` in row-major order."""
    flat = value.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    out = torch.zeros(4, dtype=torch.int64, device=flat.device)
    if flat.data_ptr() % 4:  # a view that begins in the middle of a word
        flat = flat.clone()
    whole, rest = divmod(flat.numel(), 4)
    parts = [(flat[:4 * whole], 0)]
    if rest:
        parts.append((torch.nn.functional.pad(flat[4 * whole:], (0, 4 - rest)), whole))
    for part, first in parts:
        if words := part.numel() // 4:
            _kernel()[(-(-words // _BLOCK),)](part.view(torch.int32), out, words, first, BLOCK=_BLOCK, num_warps=8)
    return Begun(str(value.dtype).removeprefix("torch."), tuple(value.shape), flat.numel(), out)


@functools.cache
def _kernel() -> Any:
    """Made when first needed: Triton is there where a GPU is."""
    from vime.weights.lanes_triton import lanes

    return lanes
