"""Tables of cosines and sines under any name and in any form: of one wave, of both side by side, or as complex numbers."""
from __future__ import annotations

import re

import torch

from alignment.diagnose.numbers import same_bits
from alignment.diagnose.rotary import tables
from alignment.verdict import Cause

_WAVE = re.compile(r"(?:^|[._])(cos|sin)(?=[._]|$)")
_CACHE = re.compile(r"cos_?sin|sin_?cos")
_COMPLEX = re.compile(r"freqs?_cis|cis|freqs?_complex|rope|rotary")


def wave_of(name: str) -> str | None:
    """"cos" or "sin" where the last part of a name says that a table is one of them."""
    leaf = name.lower().rpartition(".")[2]
    found = {m.group(1) for m in _WAVE.finditer(leaf)}
    return found.pop() if len(found) == 1 else None


def is_cache(name: str) -> bool:
    return bool(_CACHE.search(name.lower().rpartition(".")[2]))


def cache(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    """Tables [P, 2R], the cosines of R lanes and then their sines (as vLLM keeps them): exchanged, interleaved, or one of them made
    of other frequencies."""
    if a.shape != b.shape or a.ndim < 2 or a.shape[-1] % 2 or a.shape[-1] < 4:
        return None
    first, second = (t.chunk(2, -1) for t in (a, b))
    if same_bits(first[0], second[1]) and same_bits(first[1], second[0]):
        return Cause("cos_sin_swapped", "cos and sin are swapped: side b has the sines first and then the cosines, side a the other way round", 0.0)
    for x, y, side in ((a, b, "b"), (b, a, "a")):
        if same_bits(torch.stack(x.chunk(2, -1), -1).flatten(-2), y):
            return Cause("interleaved", f"side {side} has cosines and sines in turn, the other side in two halves", 0.0, {"b": side == "b"})
    for wave, x, y in zip(("cos", "sin"), first, second, strict=True):
        if not torch.equal(x, y):
            return tables(x, y, what=wave)
    return None


def turned(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    """Complex tables, cos + i sin: with both exchanged, or turning the other way."""
    if a.shape != b.shape or a.dtype != b.dtype or not a.is_complex() or not a.numel():
        return None
    x, y = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if torch.equal(x, y.flip(-1)):
        return Cause("cos_sin_swapped", "cos and sin are swapped: side b is sin + i cos, side a cos + i sin", 0.0)
    if torch.equal(x[..., 0], y[..., 0]) and torch.equal(x[..., 1], -y[..., 1]):
        return Cause("rotary_direction", "rotary: side b is the complex conjugate of side a: it rotates in the other direction", 0.0)
    for wave, i in (("cos", 0), ("sin", 1)):
        if not torch.equal(x[..., i], y[..., i]):
            return tables(x[..., i].contiguous(), y[..., i].contiguous(), what=wave)
    return None
