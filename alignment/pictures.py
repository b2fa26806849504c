"""Pictures of a comparison, as plain data that travels in ``Verdict.info["pictures"]``.

A verdict names the first bad place; a picture shows the shape of the damage: one layer from which everything after
is wrong, one token, one rank's experts. A picture is made by the comparison (which has the arrays), stored as JSON
next to the verdict, and drawn by :mod:`alignment.report`. It is bounded in size however large the comparison was:
what does not fit is binned or left out, and the picture says so.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from alignment.verdict import Verdict

MAX_COLUMNS = 160
MAX_ROWS = 200
MAX_POINTS = 1200

#: What a cell of a weight ledger can say, best first.
CELL_STATES = ("equal", "absent", "downstream", "first", "missing", "invalid")


def heat(title: str, rows: Sequence[Any], columns: Sequence[Any], values: Sequence[Sequence[float | None]],
         row_name: str = "layer", column_name: str = "token", unit: str = "differing elements") -> dict[str, Any]:
    """A heat map: ``values[r][c]`` of ``rows`` x ``columns``, e.g. differing elements of layer r at token c.

    0 is "equal"; None is "not compared". More than :data:`MAX_COLUMNS` columns are binned by their sum, so that a
    single differing token never disappears; rows beyond :data:`MAX_ROWS` are dropped from the equal ones first.
    """
    grid = [list(r) for r in values]
    if len(grid) != len(rows) or any(len(r) != len(columns) for r in grid):
        raise ValueError(f"heat map {title!r}: {len(rows)} x {len(columns)} names and "
                         f"{len(grid)} x {sorted({len(r) for r in grid})} values")
    notes = []
    names = [str(c) for c in columns]
    if len(names) > MAX_COLUMNS:
        width = math.ceil(len(names) / MAX_COLUMNS)
        starts = range(0, len(names), width)
        grid = [[_sum(r[s:s + width]) for s in starts] for r in grid]
        names = [f"{names[s]}..{names[min(s + width, len(names)) - 1]}" for s in starts]
        notes.append(f"{width} {column_name}s a cell")
    labels = [str(r) for r in rows]
    labels, grid, left_out = _bound_rows(labels, grid, lambda row: any(v != 0 for v in row))
    if left_out:
        notes.append(f"{left_out} equal {row_name}(s) not shown")
    return {"kind": "heat", "title": title, "rows": labels, "columns": names, "values": grid, "unit": unit,
            "row_name": row_name, "column_name": column_name, "notes": notes}


def series(title: str, x: Sequence[Any], lines: Mapping[str, Sequence[float]], differs: Sequence[bool],
           x_name: str = "position", y_name: str = "log-probability") -> dict[str, Any]:
    """Two (or more) lines over ``x``, and which points differ, e.g. both sides' log-probs over position."""
    count = len(x)
    if any(len(v) != count for v in lines.values()) or len(differs) != count:
        raise ValueError(f"series {title!r}: lines and marks need {count} points each")
    keep: list[int] = list(range(count))
    notes = []
    if count > MAX_POINTS:  # every differing point first, then an even sample of the rest
        marked = [i for i in keep if differs[i]][:MAX_POINTS // 2]
        step = math.ceil(count / (MAX_POINTS - len(marked)))
        keep = sorted({*marked, *keep[::step]})
        notes.append(f"{len(keep)} of {count} points drawn")
    return {"kind": "series", "title": title, "x": [str(x[i]) for i in keep], "x_name": x_name, "y_name": y_name,
            "lines": {name: [_finite(v[i]) for i in keep] for name, v in lines.items()},
            "differs": [bool(differs[i]) for i in keep], "differing": sum(map(bool, differs)), "total": count,
            "notes": notes}


def ledger(title: str, stages: Sequence[str], tensors: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """A weight ledger: tensor -> stage -> one of :data:`CELL_STATES`. A stage a tensor does not pass is "absent"."""
    labels = list(tensors)
    grid = []
    for name in labels:
        unknown = set(tensors[name].values()) - set(CELL_STATES)
        if unknown:
            raise ValueError(f"ledger {title!r}, tensor {name!r}: unknown state {sorted(unknown)}, expected {CELL_STATES}")
        grid.append([tensors[name].get(stage, "absent") for stage in stages])
    total = len(labels)
    labels, grid, left_out = _bound_rows(labels, grid, lambda row: any(c not in ("equal", "absent") for c in row))
    notes = [f"{left_out} of {total} tensors not shown (equal at every stage first)"] if left_out else []
    return {"kind": "ledger", "title": title, "rows": labels, "columns": list(stages), "cells": grid, "notes": notes}


def attach(verdict: Verdict, *pictures: dict[str, Any]) -> Verdict:
    """Put pictures into ``verdict.info``. Returns the verdict."""
    # A combined verdict may share its info with the child it came from: a picture belongs to one of them.
    verdict.info = {**verdict.info, "pictures": [*verdict.info.get("pictures", []), *pictures]}
    return verdict


def walk(verdict: Verdict) -> Iterator[tuple[Verdict, dict[str, Any]]]:
    """Every picture of a verdict and of its children, with the verdict it belongs to."""
    for picture in verdict.info.get("pictures", []):
        yield verdict, picture
    for child in verdict.children:
        yield from walk(child)


def _sum(values: Sequence[float | None]) -> float | None:
    numbers = [v for v in values if v is not None]
    return sum(numbers) if numbers else None


def _finite(value: float) -> float | None:
    value = float(value)
    return value if math.isfinite(value) else None


def _bound_rows(labels: list[str], grid: list[list[Any]], notable: Any) -> tuple[list[str], list[list[Any]], int]:
    """At most MAX_ROWS rows, in order; notable ones are kept first."""
    if len(labels) <= MAX_ROWS:
        return labels, grid, 0
    ranked = sorted(range(len(labels)), key=lambda i: not notable(grid[i]))  # stable: keeps the order within each
    keep = sorted(ranked[:MAX_ROWS])
    return [labels[i] for i in keep], [grid[i] for i in keep], len(labels) - MAX_ROWS
