"""Bitwise equality that cannot be fooled.

``torch.equal`` promotes dtypes, says that +0 and -0 are equal, and that NaN is not; ``allclose`` has a tolerance
nobody looks at; an integer view says that NaN equals NaN. Here two tensors are equal if dtype, shape and every bit
are equal **and** every element is finite. Nothing is trimmed to the shorter, broadcast or converted. Tensors are
read a piece at a time, so files larger than memory are compared in bounded memory.
"""
from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from alignment.errors import InputError
from alignment.scan import distances, scan
from alignment.sources import Source, as_pair
from alignment.verdict import Coverage, Place, Status, Verdict


def bound_of(tier: str | float) -> float | None:
    """``"exact"`` is None; any other tier is a positive bound, e.g. ``"1e-6"``: equal is ``|a - b| < bound``."""
    if tier == "exact":
        return None
    try:
        bound = float("nan") if isinstance(tier, bool) else float(tier)  # True would be a bound of 1
    except (TypeError, ValueError):
        bound = float("nan")
    if not 0 < bound < float("inf"):
        raise InputError(f"tier {tier!r}", "'exact' or a positive bound such as '1e-6'")
    return bound


def tier_name(tier: str | float) -> str:
    """``"exact"``, or the bound in its short form: ``"1e-6"``."""
    bound = bound_of(tier)
    return "exact" if bound is None else f"{bound:g}".replace("e-0", "e-")


@dataclasses.dataclass(frozen=True)
class Result:
    """Two tensors, compared. Pairs are (a, b). ``problem`` is "dtype" or "shape" where the elements have no pair.

    ``differing`` counts elements whose bits differ, at least one of the two being finite; ``over`` those not within
    the bound of the tier (equal to ``differing`` in the exact tier). ``first``/``bits``/``values`` describe the
    first element that counts as different. ``mean_abs`` is over all elements, ``mean_signed`` is the mean of b - a:
    information only, never a judgement. All statistics are over elements that are finite on both sides.
    """

    name: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    total: int
    compared: int = 0
    differing: int = 0
    over: int = 0
    first: tuple[int, ...] | None = None
    bits: tuple[str, str] | None = None
    values: tuple[float, float] | None = None
    ulp_first: int | None = None
    ulp_max: int | None = None
    max_abs: float = 0.0
    max_index: tuple[int, ...] | None = None
    mean_abs: float = 0.0
    mean_signed: float = 0.0
    signed_zero: int = 0
    nonfinite: tuple[int, int] = (0, 0)
    nan: tuple[int, int] = (0, 0)
    first_nonfinite: tuple[int, ...] | None = None
    problem: str | None = None
    bound: float | None = None

    @property
    def equal(self) -> bool:
        """Same dtype, same shape, same bits, all finite, at least one element."""
        return not self.problem and self.compared > 0 and not self.differing and self.nonfinite == (0, 0)

    @property
    def status(self) -> Status:
        """A real difference is FAIL, also finite against NaN; a dtype difference is a difference. What has no pair
        (shape) or is not a number on both sides is INVALID. No element at all is NOT_RUN."""
        if self.problem == "dtype" or self.over:
            return Status.FAIL
        if self.problem or any(self.nonfinite):
            return Status.INVALID
        return Status.PASS if self.compared else Status.NOT_RUN

    @property
    def reason(self) -> str:
        out = []
        if self.dtypes[0] != self.dtypes[1]:
            out.append(f"dtype {self.dtypes[0]} vs {self.dtypes[1]}")
        if self.shapes[0] != self.shapes[1]:
            out.append(f"shape {list(self.shapes[0])} vs {list(self.shapes[1])}")
        if self.over and not self.problem and self.values and self.bits:
            parts = f"{2 * self.total} real and imaginary parts" if "complex" in self.dtypes[0] else f"{self.total} elements"
            kind = f"{self.over}/{parts} differ"
            if self.bound is not None:
                kind = f"{self.over}/{parts} differ by {self.bound:g} or more"
            ulp = f", {self.ulp_first} ulp" if self.ulp_first is not None else ""
            zero = f"; {self.signed_zero} only in the sign of a zero" if self.signed_zero else ""
            top = f", max {self.max_abs:.6g} at {list(self.max_index)}" if self.max_index is not None else ""
            out.append(
                f"{kind}{top}; first {self.values[0]:.9g} ({self.bits[0]}) vs "
                f"{self.values[1]:.9g} ({self.bits[1]}){ulp}{zero}"
            )
        if any(self.nonfinite):
            out.append(
                f"non-finite {self.nonfinite[0]}/{self.total} vs {self.nonfinite[1]}/{self.total}"
                f" (NaN {self.nan[0]} vs {self.nan[1]}), first at {list(self.first_nonfinite or ())}"
            )
        if not out and not self.compared:
            out.append("no elements")
        return "; ".join(out)

    def stats(self) -> dict[str, Any]:
        """JSON-ready numbers."""
        if self.problem and not self.compared:
            return {"dtypes": list(self.dtypes), "shapes": [list(s) for s in self.shapes]}
        keys = ("total", "compared", "differing", "over", "ulp_first", "ulp_max", "max_abs", "mean_abs", "mean_signed",
                "signed_zero")  # fmt: skip
        out: dict[str, Any] = {k: getattr(self, k) for k in keys}
        out["nonfinite"], out["dtypes"] = list(self.nonfinite), list(self.dtypes)
        for k in ("bits", "values", "max_index", "first"):
            if getattr(self, k) is not None:
                out[k] = list(getattr(self, k))
        return out


def compare(a: Any, b: Any, name: str = "tensor", tier: str | float = "exact") -> Result:
    """Compare two tensors (torch, numpy, lists, or a tensor inside a file) element by element, bit by bit.

    Shapes and dtypes are part of the value. A shape difference stops the comparison (elements have no pair). With a
    dtype difference the values are still compared, as numbers, for information: the result stays a difference.
    Raises InputError for what is not numbers.
    """
    (sa, sb), bound = as_pair(a, b, name), bound_of(tier)
    base = Result(name, (sa.dtype, sb.dtype), (sa.shape, sb.shape), max(sa.size, sb.size), bound=bound)
    if sa.shape != sb.shape:
        return dataclasses.replace(base, problem="dtype" if sa.dtype != sb.dtype else "shape")
    same = sa.dtype == sb.dtype
    if not same and sa.format.words != sb.format.words:
        return dataclasses.replace(base, problem="dtype")
    total = scan(sa, sb, bound)
    # Complex numbers are counted per real or imaginary word.
    words = sa.format.words

    def place(at: int | None) -> tuple[int, ...] | None:
        if at is None:
            return None
        return tuple(int(i) for i in np.unravel_index(at // words, sa.shape)) if sa.shape else ()

    found: dict[str, Any] = {}
    if total.first is not None:
        pa, pb = (np.array(s.read(total.first, total.first + 1)) for s in (sa, sb))
        comparable = same and sa.format.is_float and not (sa.format.nonfinite(pa) | sb.format.nonfinite(pb))[0]
        found = {
            "first": place(total.first),
            "bits": (sa.format.hex(pa[0]), sb.format.hex(pb[0])),
            "values": (float(sa.format.values(pa)[0]), float(sb.format.values(pb)[0])),
            "ulp_first": distances(sa.format, pa, pb).largest if comparable else None,
        }
    return dataclasses.replace(
        base,
        compared=sa.size,
        differing=total.differing,
        over=total.over,
        ulp_max=total.ulp_max if same and sa.format.is_float else None,
        max_abs=max(total.max_abs, 0.0),
        max_index=place(total.max_at),
        mean_abs=total.sum_abs / max(sa.words, 1),
        mean_signed=total.sum_signed / max(sa.words, 1),
        signed_zero=total.signed_zero,
        nonfinite=total.nonfinite,
        nan=total.nan,
        first_nonfinite=place(total.first_nonfinite),
        problem=None if same else "dtype",
        **found,
    )


def judge(
    a: Any, b: Any, name: str = "tensor", tier: str | float = "exact", place: Place | None = None,
    expected: int | None = None, explain: bool = True,
) -> Verdict:
    """:func:`compare` as a Verdict. ``place`` is completed with the index of the first difference.

    ``expected`` is the number of elements that should have been compared, where the caller holds only a part of the
    tensor: less than that is INVALID, however equal the part is. ``explain`` looks for a likely cause.
    """
    verdict = verdict_of(compare(a, b, name, tier), place, expected)
    if explain and verdict.status in (Status.FAIL, Status.INVALID):
        from alignment import diagnose  # which itself compares bits

        verdict.causes = diagnose.tensor(a, b, name)
    return verdict


def verdict_of(result: Result, place: Place | None = None, expected: int | None = None) -> Verdict:
    """The Verdict of a :class:`Result`."""
    place = Place(tensor=result.name) if place is None else place
    index = result.first if result.first is not None else result.first_nonfinite
    if index is not None and place.index is None:
        row = {"row": index[0]} if len(index) > 1 and place.row is None else {}
        place = dataclasses.replace(place, index=index, **row)
    status = result.status
    return Verdict(
        name=result.name,
        status=status,
        reason=result.reason,
        tier="exact" if result.bound is None else tier_name(result.bound),
        coverage={"elements": Coverage(result.compared, result.total if expected is None else expected)},
        first_bad=None if status in (Status.PASS, Status.NOT_RUN) else place,
        stats=result.stats(),
    )


def is_equal(a: Source | Any, b: Source | Any) -> bool:
    """True only for :attr:`Result.equal`: one question for code that needs no report."""
    return compare(a, b).equal
