"""Every element of two sources of one shape, piece by piece, in threads: what :func:`alignment.bits.compare` counts with.

Pieces that are equal and finite (a dump that agrees is nothing else) cost two reads, one ``memcmp`` and one pass for the
exponents; the statistics are only taken of pieces that differ. Everything works in buffers of the size of one core's cache.
"""
from __future__ import annotations

import ctypes
import dataclasses
import math
import os
import threading
from collections.abc import Callable

import numpy as np
import torch

from alignment.formats import Distances, Format
from alignment.sources import Source

#: Bytes of each side compared at a time: small enough that they and their temporaries stay in the cache of one core.
CHUNK_BYTES = 1 << 19
THREADS = min(4, os.cpu_count() or 1)


@dataclasses.dataclass
class Part:
    """What the pieces of one thread showed; indices are flat words."""

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

    def add(self, other: Part) -> None:
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


def scan(sa: Source, sb: Source, bound: float | None) -> Part:
    """Compare all words of two sources with as many words each. ``bound`` as of :func:`alignment.bits.bound_of`."""
    step = CHUNK_BYTES // max(sa.format.itemsize, sb.format.itemsize) * sa.format.words
    workers = max(1, THREADS if sa.words >= 16 * step else 1)
    found: list[Part | BaseException | None] = [None] * workers

    def work(worker: int) -> None:
        try:
            kernel = _Kernel(sa.format, sb.format, bound)
            torch.set_num_threads(1)  # its own threads, started for every piece anew, wait for each other on a busy machine
            with np.errstate(over="ignore", invalid="ignore"):
                for start in range(worker * step, sa.words, workers * step):
                    kernel(sa, sb, start, min(start + step, sa.words))
            found[worker] = kernel.total
        except BaseException as error:  # of a thread: raised where it was asked for
            found[worker] = error

    threads = torch.get_num_threads()
    others = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(1, workers)]
    try:
        for thread in others:
            thread.start()
        work(0)
        for thread in others:
            thread.join()
    finally:
        torch.set_num_threads(threads)
    total = Part()
    for part in found:
        if isinstance(part, BaseException):
            raise part
        assert part is not None
        total.add(part)
    return total


def distances(format: Format, pa: np.ndarray, pb: np.ndarray) -> Distances:
    """:meth:`alignment.formats.Format.distances` in buffers of its own; finite numbers of one format, one at least."""
    return format.distances(pa, pb, [np.empty_like(pa) for _ in range(3)])


def _memcmp() -> Callable[[np.ndarray, np.ndarray], bool] | None:
    """Are the bytes of two contiguous arrays equal: without writing anything, and without the interpreter lock."""
    try:
        call = ctypes.CDLL(None).memcmp
    except (OSError, AttributeError, TypeError):
        return None
    call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int
    return lambda a, b: call(a.ctypes.data, b.ctypes.data, a.nbytes) == 0


_same_bytes = _memcmp() or np.array_equal


class _Piece:
    """Buffers for pieces of ``n`` words of each side, and every view of them that a piece needs, made once. Both sides lie in one
    buffer, so that one pass makes numbers of both; what distances are counted in takes the place of the numbers, where it fits."""

    def __init__(self, fa: Format, fb: Format, n: int) -> None:
        self.n, self.both = n, np.empty(2 * n, fa.word)
        self.ra, self.rb = self.both[:n], self.both[n:] if fa.word is fb.word else np.empty(n, fb.word)
        self.numbers = np.empty(2 * n, np.float64 if fa.word_bits == 64 else np.float32)
        self.delta = self.numbers[n:]
        self.delta_t = torch.from_numpy(self.delta)
        words = self.numbers.view(fa.word) if 3 * n * fa.word().itemsize <= self.numbers.nbytes else np.empty(3 * n, fa.word)
        self.scratch = words[:n], words[n : 2 * n], words[2 * n : 3 * n]

    def values(self, format: Format, pa: np.ndarray, pb: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The numbers behind the patterns of both sides; their difference may be written into ``delta``."""
        if pa.base is self.both and pb.base is self.both:
            out = format.values(self.both, self.numbers)
            return out[: self.n], out[self.n :]
        return format.values(pa, self.numbers[: self.n]), format.values(pb, self.delta)


class _Kernel:
    """Compares one piece after another in buffers of its own: fresh ones would cost more than the comparison."""

    def __init__(self, fa: Format, fb: Format, bound: float | None) -> None:
        self.fa, self.fb, self.bound, self.same = fa, fb, bound, fa is fb
        self.quick = self.same and fa.is_float and bound is None
        self.pieces: dict[int, _Piece] = {}  # of two sizes: that of all, and that of the last
        self.total = Part()

    def __call__(self, sa: Source, sb: Source, start: int, stop: int) -> None:
        n = stop - start
        if (piece := self.pieces.get(n)) is None:
            piece = self.pieces[n] = _Piece(self.fa, self.fb, n)
        pa, pb = sa.read(start, stop, piece.ra), sb.read(start, stop, piece.rb)
        if self.same and pa.flags.c_contiguous and pb.flags.c_contiguous and _same_bytes(pa, pb) and self.fa.all_finite(pa):
            return
        if not self.quick or not self._quick(pa, pb, start, piece):
            self.total.add(self._general(pa, pb, start))

    def _quick(self, pa: np.ndarray, pb: np.ndarray, start: int, piece: _Piece) -> bool:
        """Finite numbers of one format, exactly: the common case, in few passes, each a tenth of the cost of reading.
        False, and nothing counted, where something is not finite or overflows."""
        delta, total = piece.delta, self.total
        va, vb = piece.values(self.fa, pa, pb)
        np.subtract(vb, va, out=delta)
        signed = float(piece.delta_t.sum())  # torch adds in several partial sums: quicker than numpy
        np.abs(delta, out=delta)
        size = float(piece.delta_t.sum())
        if not math.isfinite(signed + size):
            return False
        top = float(delta.max())
        if top > max(total.max_abs, 0.0):  # where it is matters only for a new maximum
            total.max_abs, total.max_at = top, start + int(np.argmax(delta))
        apart = self.fa.distances(pa, pb, piece.scratch)  # in the place of the numbers: last
        total.signed_zero += apart.signed_zero
        total.differing += apart.differing
        total.over += apart.differing
        total.ulp_max = max(total.ulp_max, apart.largest)
        total.sum_abs += size
        total.sum_signed += signed
        if apart.differing and (total.first is None or start < total.first):
            total.first = start + int(np.argmax(piece.scratch[0] != 0))
        return True

    def _general(self, pa: np.ndarray, pb: np.ndarray, start: int) -> Part:
        """Any two formats, any bound, any number: in float64."""
        fa, fb = self.fa, self.fb
        bad_a, bad_b = fa.nonfinite(pa), fb.nonfinite(pb)
        va, vb = fa.values(pa), fb.values(pb)
        both, one_sided = ~(bad_a | bad_b), bad_a ^ bad_b
        part = Part(nonfinite=(int(bad_a.sum()), int(bad_b.sum())),
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
            apart = distances(fa, pa[both], pb[both])
            part.ulp_max, part.signed_zero = apart.largest, apart.signed_zero
        if self.bound is not None and fa.is_float:
            differ = (size >= self.bound) | one_sided
        part.over = int(np.count_nonzero(differ))
        if part.over:
            part.first = start + int(np.argmax(differ))
        return part
