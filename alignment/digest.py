"""Digests that agree with :mod:`alignment.bits`: equal digest if and only if equal dtype, shape and bits.

Two forms, never mixed (each carries its own prefix):

``xxh3:`` xxh3_128 over dtype, shape and the bytes in row-major order, on the host. The default.
``lanes:`` computed where the tensor is, with integer operations of torch, so that a weight on a GPU is digested
without copying it. Each 32-bit word of the data, its position mixed in, goes through the finaliser of MurmurHash3
under two seeds and is added into two 64-bit lanes. Sums do not depend on order, so the result is the same on every
device and for every chunking. It is not a cryptographic hash; neither is xxh3.

A digest says nothing about NaN: equal digests of non-finite tensors are equal bits and still INVALID as a comparison
(:func:`judge` asks for finiteness separately).
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from alignment.errors import InputError
from alignment.sources import Source, as_source, as_tensor
from alignment.verdict import Coverage, Place, Status, Verdict

_STEP = 1 << 21


def _head(source: Source) -> bytes:
    return f"{source.dtype}|{','.join(map(str, source.shape))}|".encode()


def digest(value: Any, name: str = "tensor") -> str:
    """``xxh3:`` and 32 hex digits. ``value`` is a tensor on any device, an array, a list, or a tensor in a file."""
    source = as_source(value, name)
    state = xxhash.xxh3_128(_head(source))
    step = max(1, _STEP // max(1, source.format.itemsize)) * source.format.words
    for start in range(0, source.words, step):
        state.update(memoryview(np.ascontiguousarray(source.read(start, min(start + step, source.words)))).cast("B"))
    return "xxh3:" + state.hexdigest()


def digest_all(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Digest by name."""
    return {name: digest(value, name) for name, value in tensors.items()}


def combined(digests: Mapping[str, str]) -> str:
    """One digest of a set of named digests; the order of the mapping does not matter."""
    state = xxhash.xxh3_128()
    for name in sorted(digests):
        state.update(f"{len(name)}:{name}={digests[name]};".encode())
    return "xxh3:" + state.hexdigest()


def judge(expected: str | Mapping[str, str], actual: str | Mapping[str, str], name: str = "digest") -> Verdict:
    """Compare digests, or mappings name -> digest. A missing or extra name is INVALID, a different digest FAIL.

    Raises InputError if the two digests are of different forms: they cannot be compared.
    """
    left = {name: expected} if isinstance(expected, str) else dict(expected)
    right = {name: actual} if isinstance(actual, str) else dict(actual)
    names = list(left) + [n for n in right if n not in left]
    bad: list[tuple[Status, str, str]] = []
    for n in names:
        if n not in left or n not in right:
            bad.append((Status.INVALID, n, f"{n} is missing on the {'first' if n not in left else 'second'} side"))
        elif left[n].partition(":")[0] != right[n].partition(":")[0]:
            raise InputError(f"digests of {n} are {left[n]} and {right[n]}", "two digests of one form",
                             "compute both with digest() or both with device_digest()")
        elif left[n] != right[n]:
            bad.append((Status.FAIL, n, f"{n}: {left[n]} vs {right[n]}"))
    both = sum(n in left and n in right for n in names)
    places = [Place(tensor=n) for _, n, _ in bad]
    status = Status.PASS if not bad else Status.FAIL if any(s is Status.FAIL for s, _, _ in bad) else Status.INVALID
    return Verdict(name, status, reason="; ".join(t for _, _, t in bad[:3]),
                   coverage={"tensors": Coverage(both, len(names))},
                   first_bad=places[0] if places else None, downstream=places[1:])


# --- the device form ---------------------------------------------------------------------------------------------

_M32 = 0xFFFFFFFF
_SEEDS = (0x9E3779B1, 0x85EBCA77)


def _fmix32(h: torch.Tensor) -> torch.Tensor:
    """The 32-bit finaliser of MurmurHash3 (public domain), in int64 so that no product overflows silently."""
    h = h ^ (h >> 16)
    h = _mul32(h, 0x85EBCA6B)
    h = h ^ (h >> 13)
    h = _mul32(h, 0xC2B2AE35)
    return h ^ (h >> 16)


def _mul32(h: torch.Tensor, k: int) -> torch.Tensor:
    # (h * k) mod 2**32 by halves of k: every intermediate stays below 2**48.
    return (h * (k & 0xFFFF) + (((h * (k >> 16)) & 0xFFFF) << 16)) & _M32


def device_digest(value: torch.Tensor, chunk: int = 1 << 22) -> str:
    """``lanes:`` and 32 hex digits, computed on the device of ``value``; only two numbers leave it.

    The same on every device, for every chunking and for every stride.
    """
    source = as_source(value)
    raw = as_tensor(value)
    raw = torch.view_as_real(raw.resolve_conj()) if raw.is_complex() else raw
    flat = raw.resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    lanes = [0, 0]
    size = flat.numel()
    for start in range(0, size, 4 * chunk):
        piece = flat[start : start + 4 * chunk]
        if piece.numel() % 4:
            piece = torch.nn.functional.pad(piece, (0, 4 - piece.numel() % 4))
        b = piece.reshape(-1, 4).to(torch.int64)
        word = b[:, 0] | (b[:, 1] << 8) | (b[:, 2] << 16) | (b[:, 3] << 24)
        at = torch.arange(start // 4, start // 4 + word.numel(), device=word.device, dtype=torch.int64)
        low, high = at & _M32, at >> 32
        for lane, seed in enumerate(_SEEDS):
            place = _fmix32((low + seed) & _M32) ^ _fmix32((high + (seed >> 1)) & _M32)
            # Two rounds give 64 well mixed bits a word; a word and its place enter both.
            first = _fmix32(word ^ place)
            second = _fmix32((first + place + seed) & _M32 ^ word)
            lanes[lane] += (int(first.sum()) << 32) + int(second.sum())
    state = xxhash.xxh3_128(_head(source))
    state.update(f"{size}|{lanes[0] & (1 << 64) - 1:016x}|{lanes[1] & (1 << 64) - 1:016x}".encode())
    return "lanes:" + state.hexdigest()
