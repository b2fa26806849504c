"""Causes that need earlier versions of a tensor: not updated, updated too late, or updated in part."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from alignment import bits
from alignment.sources import Source, as_source
from alignment.verdict import Cause


def versions(previous: Any, name: str = "tensor") -> list[tuple[int, Source]]:
    """(updates before the expected version, content); negative numbers are later versions.

    ``previous`` is one tensor (one update before), a sequence of tensors (the newest first), or a dict of them by
    the number of updates. A list of plain numbers is one tensor.
    """
    if previous is None:
        return []
    if isinstance(previous, dict):
        return [(int(k), as_source(v, name)) for k, v in sorted(previous.items(), key=lambda kv: (kv[0] < 0, abs(kv[0]))) if v is not None]
    if isinstance(previous, Sequence) and not isinstance(previous, range | str) and previous and hasattr(previous[0], "dtype"):
        return [(k, as_source(v, name)) for k, v in enumerate(previous, 1) if v is not None]
    return [(1, as_source(previous, name))]


def stale(a: Source, b: Source, previous: Any, name: str) -> Cause | None:
    """``b`` is bit by bit an earlier (or a later) version, or has parts of one."""
    held = [(k, old) for k, old in versions(previous, name) if old.shape == a.shape and old.dtype == a.dtype and not bits.is_equal(old, a)]
    for k, old in held:
        if bits.is_equal(old, b):
            if k < 0:
                text = f"ahead: {name} is bitwise equal to the version {_updates(-k)} later"
                return Cause("ahead", text, 0.0, {"updates": -k})
            before = "the version before" if k == 1 else f"the version {_updates(k)} before"
            return Cause("stale", f"stale: {name} is bitwise equal to {before}, not to the new one", 0.0, {"updates": k})
    for k, old in held:
        found = _torn(a, b, old)
        if found is not None:
            rows, old_rows = found
            text = (f"torn: {old_rows} of {rows} rows of {name} are those of {_updates(abs(k))} {'before' if k > 0 else 'later'}, the others "
                    "are new: the update ended, or was read, half-way")  # fmt: skip
            return Cause("torn", text, 0.0, {"rows": rows, "old": old_rows, "updates": k})
    return None


def _updates(k: int) -> str:
    return "one update" if k == 1 else f"{k} updates"


def _torn(a: Source, b: Source, old: Source) -> tuple[int, int] | None:
    """(rows, rows of the old version) if every row of b is that of a or that of ``old``, and both occur."""
    if not a.shape or a.shape != b.shape or a.dtype != b.dtype or a.shape[0] < 2:
        return None
    n, per = a.shape[0], a.words // a.shape[0]
    step, stale_rows, new_rows = max(1, (1 << 20) // max(per, 1)), 0, 0
    for start in range(0, n, step):
        stop = min(start + step, n)
        x, y, z = (np.array(s.read(start * per, stop * per)).reshape(stop - start, per) for s in (a, b, old))
        new, was = (x == y).all(-1), (z == y).all(-1)
        if not bool((new | was).all()):
            return None
        stale_rows += int((was & ~new).sum())
        new_rows += int((new & ~was).sum())
    return (n, stale_rows) if stale_rows and new_rows and stale_rows + new_rows > 2 else None
