"""The same rows in batches of many sizes: is a row the same whatever comes with it, and where does it change.

Kernels are chosen by size, so equality at 1 and 4 says nothing about 255 and 256. A sweep knows which switch points
it crossed; one that crossed none is not a proof of invariance, and says so.
"""
from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from alignment import bits, mapping
from alignment.errors import InputError
from alignment.sources import as_tensor
from alignment.verdict import Cause, Coverage, Place, Status, Verdict

#: Sizes at which launchers are known to switch, where the caller names none: powers of two up to 256.
COMMON = (2, 4, 8, 16, 32, 64, 128, 256)


def crossed(sizes: Sequence[int], boundaries: Sequence[int]) -> list[int]:
    """The boundaries (first size of the upper class) that have a size on both sides."""
    return [b for b in boundaries if any(s < b for s in sizes) and any(s >= b for s in sizes)]


def judge_sweep(
    fn: Callable[..., Any],
    inputs: Any,
    sizes: Sequence[int],
    *,
    boundaries: Sequence[int] | int | None = None,
    name: str = "sweep",
    op: str = "op",
    what: str = "rows",
    locate: bool = True,
) -> Verdict:
    """Feed the rows of ``inputs`` to ``fn`` in chunks of each size and compare with the first size, row by row.

    Args:
        fn: takes the rows of each input ([n, ...]) and returns a tensor [n, ...] or {output name: tensor}.
        inputs: a tensor [N, ...] or a tuple of them with one N.
        sizes: chunk sizes; the last chunk of a size may be smaller, and is then left out of the comparison of that
            size if it is smaller than the smallest size (it would test another size).
        boundaries: where the dispatch is known to switch (the first size of the upper class), e.g. (256,). Default:
            the powers of two up to 256. Boundaries not crossed make the sweep NOT_RUN. ``()`` claims nothing.
        locate: bisect between two sizes that differ for the exact boundary.
    """
    rows = tuple(as_tensor(x, "inputs") for x in (inputs if isinstance(inputs, tuple) else (inputs,)))
    count = rows[0].shape[0] if rows[0].ndim else 0
    if not sizes or any(x.ndim == 0 or x.shape[0] != count for x in rows) or any(type(s) is not int or s < 1 for s in sizes):
        raise InputError(f"sizes {list(sizes)} for inputs {[list(x.shape) for x in rows]}", "positive sizes and inputs of N rows each")
    usable = [s for s in dict.fromkeys(sizes) if s <= count]
    outputs = {s: _chunks(fn, rows, s, count) for s in usable}
    children: list[Verdict] = []
    reference = usable[0] if usable else 0
    for size in usable[1:]:
        child = _against(outputs[reference], outputs[size], reference, size, name, op, what)
        children.append(child)
    bad = next((c for c in children if c.status is Status.FAIL), None)
    wanted = tuple(COMMON if boundaries is None else [boundaries] if isinstance(boundaries, int) else boundaries)
    hit = crossed(usable, wanted)
    if bad is None and wanted:
        left = [b for b in wanted if b not in hit]
        text = f"dispatch boundary not crossed: sizes {min(usable, default=0)} to {max(usable, default=0)} cross {hit or 'none'}, not {left}"
        children.append(Verdict(f"{name}.boundaries", Status.NOT_RUN if left else Status.PASS, text if left else "",
                                coverage={"boundaries": Coverage(len(hit), len(wanted))}))  # fmt: skip
    out = mapping.in_order(name, children)
    if not children:
        out.reason = f"sizes {list(sizes)} of {count} {what}: fewer than two sizes to compare"
    out.coverage["sizes"] = Coverage(len(usable), len(set(sizes)))
    if out.status is Status.PASS:
        out = dataclasses.replace(out)  # a Verdict checks its coverage on construction
    out.info["sizes"] = {str(reference): "reference", **{str(s): c.status.value for s, c in zip(usable[1:], children, strict=False)}}
    if bad is not None and locate:
        _bisect(fn, rows, outputs, usable, out, op, what)
    return out


def _chunks(fn: Callable[..., Any], rows: tuple[torch.Tensor, ...], size: int, count: int) -> dict[str, torch.Tensor]:
    """Outputs of the whole chunks of ``size`` rows (a smaller rest would be another size)."""
    parts: dict[str, list[torch.Tensor]] = {}
    for start in range(0, count - size + 1, size):
        got = fn(*(x[start : start + size].clone() for x in rows))  # fn may write to what it is given
        got = got if isinstance(got, Mapping) else {"output": got}
        for key, value in got.items():
            tensor = as_tensor(value, key)
            if tensor.ndim == 0 or tensor.shape[0] != size:
                raise InputError(f"output {key} of {size} rows has shape {list(tensor.shape)}", "one row a row")
            parts.setdefault(key, []).append(tensor.clone())  # fn may fill one buffer every time
    return {k: torch.cat(v) for k, v in parts.items()}


def _against(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor], sa: int, sb: int, name: str, op: str, what: str) -> Verdict:
    both = {k: min(len(a[k]), len(b[k])) for k in a if k in b}  # rows that both sizes filled with whole chunks
    left = {f"{op}.{k}": a[k][: both.get(k, len(a[k]))] for k in a}
    right = {f"{op}.{k}": b[k][: both.get(k, len(b[k]))] for k in b}
    options = mapping.Options(place=Place(run=f"{what} {sa} vs {sb}", module=op), unit="outputs")
    return mapping.compare(left, right, f"{name}[{what} {sa} vs {sb}]", None, options)


def _bisect(fn: Any, rows: Any, outputs: dict[int, Any], sizes: list[int], out: Verdict, op: str, what: str) -> None:
    """The smallest step of size at which a row changes."""
    def same(x: int, y: int) -> bool:
        pairs = ((outputs[x][k], outputs[y][k]) for k in outputs[x])
        return all(bits.compare(u[: len(v)], v[: len(u)]).equal for u, v in pairs)

    ordered = sorted(sizes)
    pair = next(((x, y) for x, y in itertools.pairwise(ordered) if not same(x, y)), None)
    if pair is None:
        return
    low, high = pair
    again = {size: _chunks(fn, rows, size, rows[0].shape[0]) for size in pair}
    for size in pair:
        if not all(bits.compare(again[size][k], outputs[size][k]).equal for k in outputs[size] if k in again[size]):
            text = f"{op} differs from itself at {size} {what} when called again: not deterministic, which no size explains"
            out.causes.insert(0, Cause("nondeterministic", text, None, {"size": size}))
            return
    while high - low > 1:
        mid = (low + high) // 2
        outputs[mid] = _chunks(fn, rows, mid, rows[0].shape[0])
        low, high = (mid, high) if same(low, mid) else (low, mid)
    text = f"dispatch boundary between {low} and {high} {what}"
    out.causes.insert(0, Cause("dispatch_boundary", text, 0.0, {"below": low, "from": high}))
    out.info["boundary"] = [low, high]
    if out.first_bad is not None:
        out.first_bad = dataclasses.replace(out.first_bad, run=f"{what} {low} vs {high}")
