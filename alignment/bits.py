"""Bitwise equality that cannot be fooled.

``torch.equal`` promotes dtypes, says that +0 and -0 are equal, and that NaN is not; ``allclose`` has a tolerance
nobody looks at; an integer view says that NaN equals NaN. Here two tensors are equal if dtype, shape and every bit
are equal **and** every element is finite. Nothing is trimmed to the shorter, broadcast or converted. Tensors are
read a piece at a time, so files larger than memory are compared in bounded memory.
"""
from __future__ import annotations

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from alignment.errors import InputError
from alignment.formats import Format
from alignment.sources import Source, as_pair
from alignment.verdict import Coverage, Place, Status, Verdict

#: Bytes of each side compared at a time: small enough that they and their temporaries stay in the cache of one core.
CHUNK_BYTES = 1 << 18
_THREADS = min(4, os.cpu_count() or 1)


def bound_of(tier: str | float) -> float | None:
    """``"exact"`` is None; any other tier is a positive bound, e.g. ``"1e-6"``: equal is ``|a - b| < bound``."""
    if tier == "exact":
        return None
    try:
        bound = float(tier)
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
            kind = f"{self.over}/{self.total} elements differ"
            if self.bound is not None:
                kind = f"{self.over}/{self.total} elements differ by {self.bound:g} or more"
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


@dataclasses.dataclass
class _Part:
    """What one chunk found; indices are flat words."""

    differing: int = 0
    over: int = 0
    first: int | None = None
    ulp_max: int = 0
    max_abs: float = -1.0
    max_at: int | None = None
    sum_abs: float = 0.0
    sum_signed: float = 0.0
    signed_zero: int = 0
    nonfinite: tuple[int, int] = (0, 0)
    nan: tuple[int, int] = (0, 0)
    first_nonfinite: int | None = None

    def add(self, other: _Part) -> None:
        """Take in another part; which is first is told by its index."""
        for field in ("differing", "over", "sum_abs", "sum_signed", "signed_zero"):
            setattr(self, field, getattr(self, field) + getattr(other, field))
        self.nonfinite = (self.nonfinite[0] + other.nonfinite[0], self.nonfinite[1] + other.nonfinite[1])
        self.nan = (self.nan[0] + other.nan[0], self.nan[1] + other.nan[1])
        self.ulp_max = max(self.ulp_max, other.ulp_max)
        if other.max_at is not None and (other.max_abs, -other.max_at) > (self.max_abs, -(self.max_at or 0)):
            self.max_abs, self.max_at = other.max_abs, other.max_at
        self.first = _least(self.first, other.first)
        self.first_nonfinite = _least(self.first_nonfinite, other.first_nonfinite)


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


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
    step = CHUNK_BYTES // max(sa.format.itemsize, sb.format.itemsize) * sa.format.words
    workers = _THREADS if sa.words >= 16 * step else 1

    def work(worker: int) -> _Part:
        kernel, part = _Kernel(sa.format, sb.format, min(step, sa.words), bound), _Part()
        for start in range(worker * step, sa.words, workers * step):
            kernel(sa, sb, start, min(start + step, sa.words), part)
        return part

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # its own threads, started for every chunk anew, wait for each other on a busy machine
    try:
        if workers == 1:
            total = work(0)
        else:
            with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                total = _Part()
                for part in pool.map(work, range(workers)):  # reading and numpy release the interpreter lock
                    total.add(part)
    finally:
        torch.set_num_threads(threads)
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
            "ulp_first": _ulp(sa.format, pa, pb)[0] if comparable else None,
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


def _wide(p: np.ndarray) -> np.ndarray:
    """The same bytes in 64-bit words where they fill them: fewer booleans to write."""
    aligned = p.nbytes % 8 == 0 and p.__array_interface__["data"][0] % 8 == 0
    return p.view(np.uint64) if aligned and p.flags.c_contiguous else p


def _ulp(format: Format, pa: np.ndarray, pb: np.ndarray) -> tuple[int, int]:
    """(largest distance, words that differ only in the sign of a zero); finite numbers of one format."""
    out, scratch = np.empty_like(pa), np.empty_like(pa)
    zeros = format.ulp(pa, pb, out, scratch)
    return int(out.max(initial=0)), zeros


class _Kernel:
    """Compares one chunk after another in buffers of its own: fresh ones would cost more than the comparison."""

    def __init__(self, fa: Format, fb: Format, words: int, bound: float | None) -> None:
        self.fa, self.fb, self.bound, self.same = fa, fb, bound, fa is fb
        self.buffers = [np.empty(words, t) for t in (fa.word, fb.word, fa.word, fa.word, bool)]
        self.reals = [np.empty(words, np.float64 if fa.word_bits == 64 else np.float32) for _ in range(2)]
        self.top, self.seen = 0.0, False

    def __call__(self, sa: Source, sb: Source, start: int, stop: int, total: _Part) -> None:
        ra, rb, wa, wb, flags = (x[: stop - start] for x in self.buffers)
        pa, pb = sa.read(start, stop, ra), sb.read(start, stop, rb)
        if self.same:
            qa, qb = _wide(pa), _wide(pb)
            if qa.size == qb.size and np.equal(qa, qb, out=flags[: qa.size]).all() and self.fa.all_finite(pa, wa):
                return
        with np.errstate(over="ignore", invalid="ignore"):
            part = self._quick(pa, pb, start, wa, wb) if self.same and self.fa.is_float and self.bound is None else None
            total.add(self._general(pa, pb, start) if part is None else part)

    def _quick(self, pa: np.ndarray, pb: np.ndarray, start: int, wa: np.ndarray, wb: np.ndarray) -> _Part | None:
        """Finite numbers of one format, exactly: the common case, in few passes, each a tenth of the cost of reading.
        None where something is not finite or overflows."""
        va, delta = (x[: pa.size] for x in self.reals)
        vb, va = self.fb.values(pb, delta), self.fa.values(pa, va)
        np.subtract(vb, va, out=delta)
        d = torch.from_numpy(delta)  # torch adds in several partial sums: quicker than numpy
        signed = float(d.sum())
        np.abs(delta, out=delta)
        size, top = float(d.sum()), float(delta.max())
        if not np.isfinite(signed + size):
            return None
        zeros = self.fa.ulp(pa, pb, wa, wb)
        differing = int(np.count_nonzero(wb))
        part = _Part(differing, differing, ulp_max=int(wa.max()), sum_abs=size, sum_signed=signed, signed_zero=zeros)
        if top > self.top:  # where it is matters only for a new maximum
            self.top = top
            part.max_abs, part.max_at = top, start + int(np.argmax(delta))
        if differing and not self.seen:
            self.seen, part.first = True, start + int(np.argmax(wb != 0))
        return part

    def _general(self, pa: np.ndarray, pb: np.ndarray, start: int) -> _Part:
        """Any two formats, any bound, any number: in float64."""
        fa, fb = self.fa, self.fb
        bad_a, bad_b = fa.nonfinite(pa), fb.nonfinite(pb)
        va, vb = fa.values(pa), fb.values(pb)
        both, one_sided = ~(bad_a | bad_b), bad_a ^ bad_b
        part = _Part(nonfinite=(int(bad_a.sum()), int(bad_b.sum())),
                     nan=(int((np.isnan(va) & bad_a).sum()), int((np.isnan(vb) & bad_b).sum())))  # fmt: skip
        if not both.all():
            part.first_nonfinite = start + int(np.argmin(both))
        differ = (pa != pb if self.same else va != vb) & ~(bad_a & bad_b)
        part.differing = int(np.count_nonzero(differ))
        if not part.differing:
            return part
        delta = np.where(both, vb - va, 0.0)
        size = np.abs(delta)
        part.sum_signed, part.sum_abs = float(delta.sum()), float(size.sum())
        at = int(np.argmax(size))
        if size[at] > 0:
            part.max_at, part.max_abs = start + at, float(size[at])
        if self.same and fa.is_float and both.any():
            part.ulp_max, part.signed_zero = _ulp(fa, pa[both], pb[both])
        if self.bound is not None and fa.is_float:
            differ = (size >= self.bound) | one_sided
        part.over = int(np.count_nonzero(differ))
        if part.over:
            part.first = start + int(np.argmax(differ))
        return part


def is_equal(a: Source | Any, b: Source | Any) -> bool:
    """True only for :attr:`Result.equal`: one question for code that needs no report."""
    return compare(a, b).equal
