"""Whose content a bad tensor has: that of another name of the same set, of a renamed one, or of another layer.

What is asked is only about two mappings of names to tensors, read a piece at a time; every answer is bit by bit.
"""
from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from alignment import bits
from alignment.sources import Source, as_source
from alignment.verdict import Cause

_NUMBER = re.compile(r"((?:^|\.)(?:layers|layer|blocks|h|hidden_states)\.)(\d+)(?=\.|$)")
_WAVE = re.compile(r"cos|sin")
#: How many layers apart two numberings are looked for.
_FAR = 4


def causes(name: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Cause]:
    """Of the first bad tensor, which both sides hold: another layer's content, or another tensor's."""
    shifted = layer_shift(name, left, right)
    return [shifted] if shifted is not None else _exchanged(name, left, right)


def missing(name: str, left: Mapping[str, Any], right: Mapping[str, Any], side: str) -> list[Cause]:
    """Of a tensor that one side lacks: its content under a name that only that side has, or as another layer's."""
    shifted = layer_shift(name, left, right)
    if shifted is not None:
        return [shifted]
    held, other = (left, right) if side == "b" else (right, left)
    whole = as_source(held[name], name)
    for n in other:
        if n not in held and _equal(whole, as_source(other[n], n)):
            text = f"renamed: side {side} holds the content of {name} as {n}"
            return [Cause("renamed", text, 0.0, {"name": name, "as": n})]
    return []


def layer_shift(name: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> Cause | None:
    """Layers are numbered from another place: what side a holds as layer l is layer l + k on side b, for two layers at least
    and for every tensor of the same kind that has a counterpart, the last of which may be new."""
    found = _NUMBER.search(name)
    if found is None:
        return None
    numbers = sorted({number for side in (left, right) for number in _same_kind(name, side)})
    if len(numbers) < 3:
        return None
    for k in (s * i for i in range(1, _FAR + 1) for s in (1, -1)):
        pairs = [(_with(name, number), _with(name, number + k)) for number in numbers]
        pairs = [(x, y) for x, y in pairs if x in left and y in right]
        if len(pairs) < 2 or not all(_equal(as_source(left[x], x), as_source(right[y], y)) for x, y in pairs):
            continue
        if any(_equal(as_source(left[x], x), as_source(left[y], y)) for x, y in pairs if y in left):
            return None  # layers that are equal to each other tell no shift
        first = next(number for number in numbers if _with(name, number) == pairs[0][0])
        text = (f"layers are off by {abs(k)}: side b holds layer {first} of side a as layer {first + k}, and so on for {len(pairs)} layers "
                "(counted from another number, or one was left out)")  # fmt: skip
        return Cause("layer_shift", text, 0.0, {"shift": k, "layers": len(pairs)})
    return None


def _same_kind(name: str, side: Mapping[str, Any]) -> Iterator[int]:
    """The numbers of the layers in which a side has this tensor."""
    for n in side:
        found = _NUMBER.search(n)
        if found is not None and _with(name, int(found.group(2))) == n:
            yield int(found.group(2))


def _with(name: str, layer: int) -> str:
    return _NUMBER.sub(lambda m: f"{m.group(1)}{layer}", name, count=1)


def _equal(x: Source, y: Source) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype or not x.size or _head(x) != _head(y):
        return False
    return bits.is_equal(x, y)


def _head(x: Source) -> bytes:
    return x.read(0, min(x.words, 256)).tobytes()


def _exchanged(name: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Cause]:
    """Side b holds under this name what side a holds under another one that both sides have."""
    have = as_source(right[name], name)
    if have.size < 2 or len(set(_head(have))) < 2:  # a constant is in many places
        return []
    twins = [n for n in left if n != name and n in right and _equal(as_source(left[n], n), have)]
    if len(twins) != 1:
        return []
    n = twins[0]
    swapped = _equal(as_source(right[n], n), as_source(left[name], name))
    if _WAVE.sub("*", name) == _WAVE.sub("*", n):  # of one table
        text = (f"cos and sin are swapped: side b has {name} as {n}" + (" and the other way round" if swapped else ""))
        return [Cause("cos_sin_swapped", text, 0.0, {"name": name, "holds": n})]
    text = (f"swapped: {name} and {n} have each other's content on side b" if swapped else
            f"moved: side b holds the content of {n} as {name}")  # fmt: skip
    return [Cause("swapped" if swapped else "moved", text, 0.0, {"name": name, "holds": n})]
