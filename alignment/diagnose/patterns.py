"""Causes that show in the bit patterns, whatever numbers they stand for: order of nibbles or bytes, an offset of integers.

Patterns are read a piece at a time, so packed weights of any size are explained.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from alignment.sources import Source
from alignment.verdict import Cause

_PIECE = 1 << 20
_PROBE = 4096


def _pieces(a: Source, b: Source, length: int = _PIECE) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for start in range(0, a.words, length):
        stop = min(start + length, a.words)
        yield np.array(a.read(start, stop)), np.array(b.read(start, stop))


def _all(a: Source, b: Source, fits: Callable[[np.ndarray], np.ndarray]) -> bool:
    return all(np.array_equal(fits(x), y) for x, y in _pieces(a, b))


def _swapped(x: np.ndarray) -> np.ndarray:
    return (x >> 4) | (x << 4)


def _nibbles(x: np.ndarray) -> np.ndarray:
    """[N, nibbles of a word], the lowest first."""
    count = 2 * x.dtype.itemsize
    shifts = np.arange(count, dtype=x.dtype) * x.dtype.type(4)
    return (x[:, None] >> shifts) & x.dtype.type(15)


def _permuted(x: np.ndarray, order: list[int]) -> np.ndarray:
    """Words whose nibble ``i`` is nibble ``order[i]`` of ``x``."""
    out = np.zeros_like(x)
    for i, j in enumerate(order):
        out |= ((x >> x.dtype.type(4 * j)) & x.dtype.type(15)) << x.dtype.type(4 * i)
    return out


def words(a: Source, b: Source) -> Cause | None:
    """Bytes reversed (any format of more than one byte), nibbles in another order, or another zero point (integers
    and packed formats): exactly, in every word."""
    if a.shape != b.shape or a.dtype != b.dtype or a.words < 2 or a.format.kind == "bool":
        return None
    x, y = (np.array(s.read(0, min(_PROBE, s.words))) for s in (a, b))
    if x.itemsize == 1 and not a.format.is_float and len(np.unique(x)) > 1 and np.array_equal(_swapped(x), y) and _all(a, b, _swapped):
        return Cause("nibble_order", "the two 4-bit numbers of every byte are swapped: low nibble first on one side, high nibble "
                     "first on the other", 0.0, {"order": [1, 0]})  # fmt: skip
    if len(np.unique(x)) < 4 or np.array_equal(x, y):
        return None
    if x.itemsize > 1 and np.array_equal(x.byteswap(), y) and _all(a, b, lambda w: w.byteswap()):
        return Cause("byte_order", f"side b has the bytes of every {a.dtype} in the reverse order (big-endian against little-endian)", 0.0)
    if a.format.is_float:
        return None
    for name, mask in (("8 of every 4-bit number", "8" * (2 * x.itemsize)), (f"{1 << (8 * x.itemsize - 1)}", "8" + "0" * (2 * x.itemsize - 1))):
        flip = x.dtype.type(int(mask, 16))
        if np.array_equal(x ^ flip, y) and _all(a, b, functools.partial(np.bitwise_xor, flip)):
            return Cause("zero_point", f"the numbers of the two sides differ by the zero point {name}: signed on one side, with an "
                         "offset on the other", 0.0, {"mask": mask})  # fmt: skip
    if x.itemsize >= 4:
        na, nb = _nibbles(x), _nibbles(y)
        order = [next((j for j in [i, *range(na.shape[1])] if np.array_equal(na[:, j], nb[:, i])), -1) for i in range(na.shape[1])]
        if sorted(order) == list(range(len(order))) and _all(a, b, lambda w: _permuted(w, order)):
            text = f"the {len(order)} 4-bit numbers of every word are in another order: nibble i of side b is nibble {order} of side a"
            return Cause("nibble_order", text, 0.0, {"order": order})
    return None


def integers(a: Source, b: Source) -> Cause | None:
    """Integers that differ by one constant everywhere: ids that count from another number."""
    if a.shape != b.shape or a.dtype != b.dtype or a.format.kind != "int" or a.words < 3:
        return None
    signed = np.dtype(f"i{np.dtype(a.format.word).itemsize}") if a.dtype.startswith("int") else np.dtype(a.format.word)
    offset: int | None = None
    values: set[int] = set()
    for x, y in _pieces(a, b):
        d = y.view(signed).astype(object if signed == np.uint64 else np.int64) - x.view(signed).astype(object if signed == np.uint64 else np.int64)
        if offset is None:
            offset = int(d[0])
        if not offset or not bool((d == offset).all()):
            return None
        values.update(int(v) for v in x[:64])
    if offset is None or len(values) < 2:
        return None
    return Cause("constant_offset", f"every number of side b is {abs(offset)} {'more' if offset > 0 else 'less'} than on side a: they count "
                 "from another place (local against global ids, or off by one)", 0.0, {"offset": offset})  # fmt: skip


def renumbered(a: Source, b: Source, name: str = "") -> Cause | None:
    """Ids that are those of the other side under one other numbering: a bijection that every place confirms."""
    if a.shape != b.shape or a.dtype != b.dtype or a.format.kind != "int" or not 8 <= a.words <= 1 << 20:
        return None
    x, y = (np.array(s.read(0, s.words)) for s in (a, b))
    pairs = np.unique(np.stack([x, y], 1), axis=0)
    if len(np.unique(pairs[:, 0])) != len(pairs) or len(np.unique(pairs[:, 1])) != len(pairs) or not 3 <= len(pairs) <= len(x) // 2:
        return None
    wrong = [(int(u), int(v)) for u, v in pairs if u != v]
    shown = ", ".join(f"{u}→{v}" for u, v in wrong[:8]) + (" ..." if len(wrong) > 8 else "")
    if any(w in name.lower() for w in ("expert", "topk", "top_k", "router")):
        return Cause("expert_permutation", f"experts are numbered otherwise: side b has {shown} for the same choices", 0.0, {"map": dict(wrong)})
    return Cause("renumbered", f"side b has the same ids under another numbering: {shown}", 0.0, {"map": dict(wrong[:64])})
