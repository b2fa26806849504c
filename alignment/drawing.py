"""Geometry of the pictures: from plain data to the numbers that the page's SVG needs. No markup here."""
from __future__ import annotations

import math
from typing import Any

STEPS = 5  # shades of a heat map above zero


def draw(picture: dict[str, Any]) -> dict[str, Any]:
    """Add what the template needs. Raises KeyError or ValueError on a picture of another form."""
    return {**picture, **{"heat": _heat, "ledger": _ledger, "series": _series}[picture["kind"]](picture)}


def _heat(p: dict[str, Any]) -> dict[str, Any]:
    rows, columns = p["rows"], p["columns"]
    # JSON has no NaN: a picture that was stored and read again carries its name.
    values = [[math.nan if isinstance(v, str) else v for v in row] for row in p["values"]]
    cell_w = max(5, min(22, 860 // max(len(columns), 1)))
    cell_h = 16 if len(rows) <= 40 else 11
    left = min(220, 12 + 7 * max((len(r) for r in rows), default=1))
    top = 22
    numbers = [v for row in values for v in row if v is not None and math.isfinite(v)]
    most = max(numbers, default=0)
    cells, first = [], True
    for r, row in enumerate(values):
        for c, v in enumerate(row):
            shade = "none" if v is None else "bad" if not math.isfinite(v) else str(_shade(v, most))
            is_first = first and shade not in ("none", "0")
            first = first and not is_first
            cells.append({"x": left + c * cell_w, "y": top + r * cell_h, "shade": shade, "first": is_first,
                          "text": f"{p['row_name']} {rows[r]}, {p['column_name']} {columns[c]}: "
                                  + ("not compared" if v is None else f"{v:g} {p['unit']}")})
    every = max(1, math.ceil((14 + 7 * max((len(c) for c in columns), default=1)) / cell_w))
    ticks = [{"x": left + (c + 0.5) * cell_w, "text": columns[c]} for c in range(0, len(columns), every)]
    edges = [0.0, *(most ** (s / STEPS) for s in range(1, STEPS + 1))] if most > 1 else [0.0, float(most)]
    return {"cells": cells, "cell_w": cell_w, "cell_h": cell_h, "left": left, "top": top, "ticks": ticks,
            "width": left + len(columns) * cell_w + 30, "height": top + len(rows) * cell_h + 10,
            "labels": [{"y": top + (r + 0.5) * cell_h, "text": name} for r, name in enumerate(rows)
                       if cell_h > 12 or r % 2 == 0], "legend": edges, "most": most}


def _shade(value: float, most: float) -> int:
    """0 for equal, else 1 to STEPS on a logarithmic scale up to the largest value."""
    if value == 0:
        return 0
    if most <= 1 or value <= 1:
        return STEPS if most <= 1 else 1
    return min(STEPS, 1 + int((STEPS - 1) * math.log(value) / math.log(most) + 1e-9))


def _ledger(p: dict[str, Any]) -> dict[str, Any]:
    return {"marks": {"equal": "=", "absent": "·", "downstream": "↓", "first": "✕", "missing": "∅", "invalid": "!"}}


def _series(p: dict[str, Any]) -> dict[str, Any]:
    width, height, left, right, top, bottom = 880, 200, 58, 12, 10, 26
    lines = p["lines"]
    finite = [v for values in lines.values() for v in values if v is not None]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if high - low < 1e-12:
        low, high = low - 1, high + 1
    count = len(p["x"])

    def px(i: int) -> float:
        return round(left + (width - left - right) * (i / max(count - 1, 1)), 2)

    def py(v: float) -> float:
        return round(top + (height - top - bottom) * (high - v) / (high - low), 2)

    paths = []
    for name, values in lines.items():
        segments, pen = [], False
        for i, v in enumerate(values):
            if v is None:
                pen = False
                continue
            segments.append(f"{'L' if pen else 'M'}{px(i)} {py(v)}")
            pen = True
        paths.append({"name": name, "d": " ".join(segments)})
    names = list(lines)
    marks = []
    for i, differs in enumerate(p["differs"]):
        values = [lines[n][i] for n in names]
        if differs:
            at = next((v for v in values if v is not None), low)
            shown = ", ".join(f"{n} {'non-finite' if v is None else format(v, '.9g')}"
                              for n, v in zip(names, values, strict=True))
            marks.append({"x": px(i), "y": py(at), "text": f"{p['x_name']} {p['x'][i]}: {shown}"})
    every = max(1, count // 8)
    return {"paths": paths, "points": marks, "w": width, "h": height, "left": left, "plot_bottom": height - bottom,
            "right": width - right,
            "x_ticks": [{"x": px(i), "text": p["x"][i]} for i in range(0, count, every)],
            "y_ticks": [{"y": py(low + (high - low) * k / 4), "text": f"{low + (high - low) * k / 4:.3g}"}
                        for k in range(5)]}
