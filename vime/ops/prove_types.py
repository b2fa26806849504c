"""What a proof of invariance reports: counts, places, errors and costs. No judgement; that is ``alignment``'s."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch


def bits(x: torch.Tensor) -> torch.Tensor:
    """The integers behind ``x``: +0 and -0 differ, NaN payloads count."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def differing_rows(got: Any, want: Any) -> torch.Tensor:
    """bool [rows]: rows with a differing bit, or with a number that is not finite, in any of the outputs."""
    bad = None
    for a, b in zip(as_tuple(got), as_tuple(want), strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(f"compared {tuple(a.shape)} {a.dtype} with {tuple(b.shape)} {b.dtype}")
        a, b = a.reshape(a.shape[0], -1), b.reshape(b.shape[0], -1)
        rows = (bits(a) != bits(b)).any(1)
        if a.is_floating_point():
            rows |= ~torch.isfinite(a).all(1)
        bad = rows if bad is None else bad | rows
    assert bad is not None
    return bad


def as_tuple(x: Any) -> tuple[torch.Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def relative_error(got: Any, exact: Any) -> float:
    """Largest over the outputs of ``||got - exact|| / ||exact||`` in float64."""
    return max(float((a.double() - b).norm() / b.norm().clamp_min(1e-300)) for a, b in zip(as_tuple(got), as_tuple(exact), strict=True))


def geomean(values: Iterable[float]) -> float | None:
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


@dataclasses.dataclass
class Timing:
    """Alternating pairs at one number of rows: median time of both, median of the ratios of the pairs."""

    rows: str
    ours_us: float
    stock_us: float
    ratio: float
    stock_route: str
    pairs: int


@dataclasses.dataclass
class CaseResult:
    """One operation at one shape and dtype.

    ``rows_compared`` of ``rows_expected`` rows were compared with the same rows of the largest batch;
    ``differing_rows`` of them differ. ``first_bad`` names the first, with the batch it was in.
    """

    op: str
    function: str
    dtype: str
    shape: str
    implementation: str
    rows_expected: int = 0
    rows_compared: int = 0
    differing_rows: int = 0
    first_bad: dict[str, Any] | None = None
    error: float | None = None
    stock_error: float | None = None
    timings: list[Timing] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def compare(self, got: Any, want: Any, place: dict[str, Any]) -> None:
        bad = differing_rows(got, want)
        self.rows_compared += len(bad)
        count = int(bad.sum())
        self.differing_rows += count
        if count and self.first_bad is None:
            row = int(bad.nonzero()[0])
            self.first_bad = {**place, "row": row}

    @property
    def ratio(self) -> float | None:
        return geomean(t.ratio for t in self.timings)


@dataclasses.dataclass
class ProofReport:
    """All cases of a run. ``geomean_ratio[dtype]`` is the mean over operations of :attr:`op_ratio`."""

    device: str
    subject: str
    quick: bool
    threads: list[int]
    processor: str
    cases: list[CaseResult] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    @property
    def op_ratio(self) -> dict[str, dict[str, float]]:
        """dtype -> function -> geometric mean over shapes and row counts of time over the fastest stock route."""
        table: dict[str, dict[str, list[float]]] = {}
        for case in self.cases:
            for timing in case.timings:
                table.setdefault(case.dtype, {}).setdefault(case.function, []).append(timing.ratio)
        return {dtype: {f: geomean(r) or 0.0 for f, r in ops.items()} for dtype, ops in table.items()}

    @property
    def geomean_ratio(self) -> dict[str, float]:
        return {dtype: geomean(ops.values()) or 0.0 for dtype, ops in self.op_ratio.items()}

    @property
    def rows_compared(self) -> int:
        return sum(c.rows_compared for c in self.cases)

    @property
    def rows_expected(self) -> int:
        return sum(c.rows_expected for c in self.cases)

    @property
    def differing_rows(self) -> int:
        return sum(c.differing_rows for c in self.cases)

    @property
    def first_bad(self) -> dict[str, Any] | None:
        for case in self.cases:
            if case.first_bad is not None:
                return {"op": case.op, "function": case.function, "dtype": case.dtype, "shape": case.shape,
                        "implementation": case.implementation, **case.first_bad}
        return None

    def to_dict(self) -> dict[str, Any]:
        out = dataclasses.asdict(self)
        for entry, case in zip(out["cases"], self.cases, strict=True):
            entry["ratio"] = case.ratio
        out.update(rows_compared=self.rows_compared, rows_expected=self.rows_expected, differing_rows=self.differing_rows,
                   first_bad=self.first_bad, geomean_ratio=self.geomean_ratio, op_ratio=self.op_ratio)
        return out
