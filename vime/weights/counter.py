"""Weights that are made of a counter and lie in no file: each element is a function of its tensor's name and its own number.

For models too large to write down. Every rank and every engine makes the tensors that it holds, on its own device, and all of
them get the same bits: the arithmetic is int64 (which wraps everywhere alike) and single fp32 operations, none of which a
device may evaluate otherwise.

    z = mix(mix(i + key(name))),  s = the sum of the four 16-bit parts of z,  w[i] = round(mean + scale * (s - 131070) / 37837)

The sum of four uniform numbers is close to normal; 37837 is its standard deviation. The key is 64 bits of SHA-256 over the seed
and the name; ``mix`` is a multiplication and a shift (after Stafford's variants of MurmurHash3's finaliser).
"""
from __future__ import annotations

import hashlib

import torch

#: Elements made at once: what is held besides the result stays below 1 GiB.
CHUNK = 1 << 24
_PARTS, _CENTRE, _DEVIATION = 4, 131070, 37837.0
_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # odd, as int64


def key_of(name: str, seed: int = 0) -> int:
    """The 64-bit key of a tensor, as a signed number."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _down(z: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right: torch's is arithmetic and would carry the sign along."""
    return (z >> bits) & ((1 << 64 - bits) - 1)


def _mix(z: torch.Tensor) -> torch.Tensor:
    for shift, factor in zip((30, 27), _MULTIPLIERS, strict=True):
        z = (z ^ _down(z, shift)) * factor
    return z ^ _down(z, 31)


def elements(name: str, first: int, count: int, mean: float, scale: float, dtype: torch.dtype, device: torch.device | str = "cpu",
             seed: int = 0) -> torch.Tensor:
    """Elements ``first .. first + count`` of a tensor in the order of its memory, ``[count]``."""
    i = torch.arange(first, first + count, dtype=torch.int64, device=device)
    z = _mix(_mix(i + key_of(name, seed)))
    s = z & 0xFFFF
    for part in range(1, _PARTS):
        s = s + ((z >> 16 * part) & 0xFFFF)
    x = (s - _CENTRE).to(torch.float32)  # exact: below 2**24
    factor = torch.tensor(scale / _DEVIATION, dtype=torch.float32, device=device)
    return (x * factor + torch.tensor(mean, dtype=torch.float32, device=device)).to(dtype)


def tensor(name: str, shape: tuple[int, ...], mean: float, scale: float, dtype: torch.dtype, device: torch.device | str = "cpu",
           seed: int = 0) -> torch.Tensor:
    """A whole tensor, made in chunks. Mean and scale (the standard deviation) are of the distribution."""
    out = torch.empty(shape, dtype=dtype, device=device)
    flat = out.view(-1)
    for first in range(0, flat.numel(), CHUNK):
        count = min(CHUNK, flat.numel() - first)
        flat[first:first + count] = elements(name, first, count, mean, scale, dtype, device, seed)
    return out
