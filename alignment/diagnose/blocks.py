"""Causes that move whole blocks, axes or columns. Exact or not given; what moves single rows is in ``structure``."""
from __future__ import annotations

import itertools

import torch

from alignment.diagnose.numbers import same_bits, varied
from alignment.digest import digest
from alignment.verdict import Cause


def moved_blocks(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    """Another shape, other axes, reversed, strided, or equal parts (shards) in another order or more than once."""
    if a.dtype != b.dtype or a.numel() != b.numel() or not varied(a):
        return None
    if a.shape != b.shape and same_bits(a.reshape(-1), b.reshape(-1)):
        text = f"the same numbers in the same order under another shape ({list(a.shape)} and {list(b.shape)}): reshaped"
        return Cause("reshaped", text, 0.0, {"a": list(a.shape), "b": list(b.shape)})
    if 3 <= a.ndim <= 4:
        for axes in itertools.permutations(range(a.ndim)):
            turned = a.permute(axes)
            if axes == tuple(range(a.ndim)) or turned.shape != b.shape or not torch.equal(turned[(0,) * (a.ndim - 1)], b[(0,) * (a.ndim - 1)]):
                continue
            if same_bits(turned.contiguous(), b):
                return Cause("axes", f"side b is side a with its axes in the order {list(axes)}", 0.0, {"axes": list(axes)})
    if a.shape != b.shape or not a.ndim:
        return None
    for axis in dict.fromkeys((0, a.ndim - 1, max(a.ndim - 2, 0))):  # of activations the last but one is that of heads
        if a.shape[axis] > 2 and same_bits(a.flip(axis), b):
            return Cause("reversed", f"side b is side a in the reverse order along axis {axis}", 0.0, {"axis": axis})
        thin_a, thin_b = (t.movedim(axis, 0).reshape(t.shape[axis], -1)[:, :4].contiguous() for t in (a, b))
        # What does not explain the thin part explains nothing.
        found = _parts(a, b, axis) if a.ndim == 1 or _parts(thin_a, thin_b, 0, least=1) else None
        found = found or _strided(a, b, axis, thin_a, thin_b)
        if found is not None:
            return found
    return None


def _parts(a: torch.Tensor, b: torch.Tensor, axis: int, least: int = 4) -> Cause | None:
    n = a.shape[axis]
    for count in (2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64):
        if n % count or a.numel() // count < least or n // count < 1 or (n == count and a.ndim == 1):
            continue
        at: dict[str, list[int]] = {}
        for i, part in enumerate(a.chunk(count, axis)):
            at.setdefault(digest(part), []).append(i)
        found = [at.get(digest(part)) for part in b.chunk(count, axis)]
        if any(i is None for i in found):
            continue
        source = [j if j in i else i[0] for j, i in enumerate(found) if i is not None]
        wrong = [(j, i) for j, i in enumerate(source) if i != j]
        if not wrong or len(at) < 2:
            continue
        if n == count and len(set(source)) == count:
            return None  # single rows: told better by the permutation of rows
        shown = ", ".join(f"{j}←{i}" for j, i in wrong[:8])
        twice = len(set(source)) < len(source)
        what = "some more than once (a shard or a head was repeated)" if twice else "in another order (shards or heads)"
        text = f"side b has the {count} equal parts of side a along axis {axis}, {what}: {shown}{' ...' if len(wrong) > 8 else ''}"
        return Cause("parts_repeated" if twice else "parts_moved", text, 0.0, {"axis": axis, "parts": count, "source": source})
    return None


def _strided(a: torch.Tensor, b: torch.Tensor, axis: int, thin_a: torch.Tensor, thin_b: torch.Tensor) -> Cause | None:
    """Index (i, j) of a split axis read as (j, i): interleaved against contiguous, repeated against tiled heads."""
    n = a.shape[axis]
    for f in range(2, n // 2 + 1):
        if n % f or not same_bits(thin_a.unflatten(0, (f, n // f)).transpose(0, 1).flatten(0, 1), thin_b):
            continue
        if same_bits(a.unflatten(axis, (f, n // f)).transpose(axis, axis + 1).flatten(axis, axis + 1), b):
            text = f"axis {axis} of {n} is {f} x {n // f} on side a and {n // f} x {f} on side b (interleaved against contiguous)"
            return Cause("interleaved", text, 0.0, {"axis": axis, "factor": f})
    return None


def columns(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    """A permutation of the columns of a matrix."""
    if a.ndim != 2 or a.shape != b.shape or a.dtype != b.dtype or not 2 <= a.shape[1] <= 8192 or not varied(a) or a.shape[0] < 2:
        return None
    if not torch.equal(a[0].sort().values, b[0].sort().values):
        return None
    at: dict[str, int] = {}
    for i, column in enumerate(a.T):
        at[digest(column)] = i
    found = [at.get(digest(column)) for column in b.T]
    if len(at) != a.shape[1] or any(i is None for i in found) or len(set(found)) != len(found):
        return None
    wrong = [(j, i) for j, i in enumerate(found) if i != j]
    shown = ", ".join(f"{j}←{i}" for j, i in wrong[:8])
    text = f"the columns are permuted ({len(wrong)} of {len(found)} moved: {shown}{' ...' if len(wrong) > 8 else ''})"
    return Cause("permutation", text, 0.0, {"columns": found[:256], "moved": len(wrong)})


#: Orders in which kernels keep the 4-bit numbers of a byte or a word, and their inverses.
_NIBBLES = ([1, 0], [0, 2, 4, 6, 1, 3, 5, 7], [0, 4, 1, 5, 2, 6, 3, 7], [7, 6, 5, 4, 3, 2, 1, 0])


def unpacked(a: torch.Tensor, b: torch.Tensor, weights: bool) -> Cause | None:
    """4-bit numbers that were unpacked in another order than they were packed: the same exchange in every pair, or every eight,
    along an axis. ``a`` and ``b`` are such integers, or weights made of them."""
    if a.shape != b.shape or a.dtype != b.dtype or not a.ndim or not varied(a) or not _four_bits(a, weights):
        return None
    for axis in dict.fromkeys((a.ndim - 1, 0)):
        for order in _NIBBLES:
            n = a.shape[axis]
            if n % len(order) or n // len(order) < 2:
                continue
            if same_bits(a.unflatten(axis, (-1, len(order))).index_select(axis + 1, torch.tensor(order)).flatten(axis, axis + 1), b):
                text = (f"along axis {axis} every {len(order)} numbers are in the order {order} of side a: 4-bit numbers were unpacked in "
                        "another order than they were packed (low nibble first against high nibble first)")  # fmt: skip
                return Cause("nibble_order", text, 0.0, {"order": order, "axis": axis})
    return None


def _four_bits(a: torch.Tensor, weights: bool) -> bool:
    """At most sixteen values in any 32 neighbours, along one axis or the other."""
    if not a.is_floating_point():
        return int(a.min()) >= -8 and int(a.max()) <= 15
    if not weights:
        return False
    for axis in dict.fromkeys((a.ndim - 1, 0)):
        lines = a.movedim(axis, -1).reshape(-1, a.shape[axis])[:64, :32]
        if lines.shape[1] > 16 and max(int(line.unique().numel()) for line in lines) <= 16:
            return True
    return False


def reordered(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    """A list with the same numbers, each once, in another order."""
    if a.ndim != 1 or a.shape != b.shape or a.dtype != b.dtype or a.numel() < 6 or torch.equal(a, b):
        return None
    if a.unique().numel() < a.numel() or not torch.equal(a.sort().values, b.sort().values):
        return None
    text = f"the same {a.numel()} numbers, each once, in another order"
    if torch.equal(a.sort().values, b) or torch.equal(a.sort(descending=True).values, b):
        text += ": side b is sorted"
    return Cause("permutation", text, 0.0, {"moved": int((a != b).sum())})
