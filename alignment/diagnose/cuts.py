"""Causes of two shapes: one side is a slice of the other, a shard, or the other and then padding, along any one axis."""
from __future__ import annotations

import torch

from alignment import bits
from alignment.diagnose.numbers import eps, varied
from alignment.sources import Source
from alignment.verdict import Cause

#: Equal parts among which a shard is looked for: more ranks than one tensor is split over.
_PARTS = 1024


def sliced(a: Source, b: Source, name: str = "tensor") -> Cause | None:
    """One side is a contiguous part [lo:hi] of the other along one axis, bit by bit. Called below the size of what is loaded.

    What is beyond the part tells the cause: zeros or minus infinity at the end are padding; an equal part of the whole is a shard
    (of one rank, never gathered); anything else was truncated.
    """
    axis = _axis(a, b)
    if axis is None or a.dtype != b.dtype or not min(a.size, b.size):
        return None
    whole, part, side = (a, b, "b") if a.shape[axis] > b.shape[axis] else (b, a, "a")
    n, total = part.shape[axis], whole.shape[axis]
    full, piece = whole.tensor(), part.tensor()
    if full.dtype.itemsize == 1 or full.is_complex():
        full, piece = full.view(torch.uint8), piece.view(torch.uint8)  # patterns are enough; complex numbers have both words here
        if axis == full.ndim - 1 and whole.format.itemsize > 1:
            n, total = n * whole.format.itemsize, total * whole.format.itemsize
    starts = [0, total - n, *(i * n for i in range(1, total // n))] if total % n == 0 and total // n <= _PARTS else [0, total - n]
    start = next((s for s in dict.fromkeys(starts) if _same(full.narrow(axis, s, n), piece)), None)
    if start is None or (not varied(piece) and not (start == 0 and _padding(whole, axis, part.shape[axis]))):
        return None  # a few numbers, or one many times, are found in many places
    other = "b" if side == "a" else "a"
    n, total, start = part.shape[axis], whole.shape[axis], start * part.shape[axis] // n
    at = f"axis {axis}" if len(a.shape) > 1 else "its only axis"
    if start == 0 and (pad := _padding(whole, axis, n)) is not None:
        last = axis == len(a.shape) - 1 and axis > 0
        text = f"side {other} keeps {total - n} padding element(s) {n} to {total - 1} along {at} ({pad}); the first {n} are equal"
        return Cause("padded_vocabulary" if last and _vocabulary(name) else "padding", text, 0.0,
                     {"side": other, "axis": axis, "padding": total - n, "size": n})  # fmt: skip
    if total % n == 0 and start % n == 0 and n * 2 <= total:
        text = (f"side {side} holds part {start // n} of {total // n} equal parts of side {other} along {at}: the shard of one rank, "
                "not gathered")  # fmt: skip
        return Cause("shard", text, 0.0, {"side": side, "axis": axis, "part": start // n, "parts": total // n})
    lost = f"{n} to {total - 1}" if start == 0 else f"0 to {start - 1}"
    text = f"side {side} lacks {lost} of {total} along {at}, which have content on side {other}: truncated"
    return Cause("truncated", text, 0.0, {"side": side, "axis": axis, "lost": [n, total - 1] if start == 0 else [0, start - 1]})


def vocabularies(a: Source, b: Source) -> list[Cause]:
    """Log-probabilities [..., V] of two vocabularies: the shorter is the softmax of the same logits over its first entries."""
    if len(a.shape) < 2 or a.shape[:-1] != b.shape[:-1] or not (a.format.is_float and b.format.is_float) or max(a.size, b.size) > 1 << 22:
        return []
    (short, long), side = ((a.tensor(), b.tensor()), "a") if a.shape[-1] < b.shape[-1] else ((b.tensor(), a.tensor()), "b")
    n = short.shape[-1]
    if n < 2 or not bool(short.isfinite().all()) or not bool(long.isfinite().all()):
        return []
    tol = 40 * eps(short, long) * (1 + float(long.double().abs().max()))
    head = long[..., :n].double()
    d = short.double() - head
    rest = float((d - d.mean(-1, keepdim=True)).abs().max())
    mass = head.logsumexp(-1)
    if not rest <= tol or float((d.mean(-1) + mass).abs().max()) > tol or float(mass.abs().max()) <= 4 * tol:
        return []
    text = (f"truncated vocabulary: side {side} is the softmax over the first {n} of {long.shape[-1]} entries, each log-prob higher by "
            f"minus the log of their mass ({float(-d.mean(-1).flatten()[0]):.6g} in the first)")  # fmt: skip
    return [Cause("truncated_vocabulary", text, rest, {"side": side, "kept": n, "of": long.shape[-1]})]


def _axis(a: Source, b: Source) -> int | None:
    if len(a.shape) != len(b.shape):
        return None
    differ = [i for i, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y]
    return differ[0] if len(differ) == 1 else None


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    from alignment.digest import digest  # bits of what is not finite as well: padding is often minus infinity

    return digest(x) == digest(y)


def _padding(whole: Source, axis: int, start: int) -> str | None:
    rest = whole.tensor().narrow(axis, start, whole.shape[axis] - start)
    if rest.is_floating_point() and rest.dtype.itemsize > 1 and bool((rest == -torch.inf).all()):
        return "all minus infinity"
    return "all zero" if bits.is_equal(rest, torch.zeros_like(rest)) else None


def _vocabulary(name: str) -> bool:
    return any(w in name.lower() for w in ("logits", "logprob", "log_prob", "vocab", "lm_head", "output_layer", "embed", "wte"))
