"""The first explanation that fits two tensors of one meaning, of which nothing else is known."""
from __future__ import annotations

from typing import Any

import numpy as np
import torch

from alignment import bits
from alignment.diagnose import patterns, ranges, scales, vectors
from alignment.diagnose.blocks import columns, moved_blocks, reordered, unpacked
from alignment.diagnose.cuts import sliced
from alignment.diagnose.distributions import distribution
from alignment.diagnose.modules import nonfinite
from alignment.diagnose.numbers import (
    elementwise,
    eps,
    integer_cast,
    narrowed,
    rounded_through,
    rounding,
    rows_scaled,
    softcap,
)
from alignment.diagnose.rotary import frequencies, inv_freq, rerotated, tables
from alignment.diagnose.structure import experts, lag, moved, padded
from alignment.diagnose.versions import stale
from alignment.diagnose.waves import cache, is_cache, turned, wave_of
from alignment.places import stacked_experts
from alignment.sources import as_source
from alignment.verdict import Cause

#: Elements. Larger tensors are judged in full; of the explanations only those that read a piece at a time are tried.
LARGEST = 1 << 22
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def tensor(
    a: Any, b: Any, name: str = "tensor", *, previous: Any = None, tp: int | None = None, weights: bool = False,
    scale: Any = None,
) -> list[Cause]:
    """Likely causes of the difference between ``a`` (expected) and ``b``; empty where none is certain.

    ``previous`` is what ``a`` was one step before, or a list of earlier versions, the newest first (for weights that
    are stale by one update or by several, or updated in part), ``tp`` the tensor-parallel size (to name the rank that
    holds padding), ``weights`` says that the tensors are stored, not computed, so that no order of additions explains
    them. ``scale`` is the scale of ``a`` where it was dequantised: of the tensor, its rows or its blocks.
    """
    sa, sb = as_source(a, name), as_source(b, name)
    if not sa.size or not sb.size or bits.is_equal(sa, sb):
        return []
    old = stale(sa, sb, previous, name) if previous is not None else None
    if old is not None:
        return [old]
    raw = patterns.words(sa, sb) or patterns.integers(sa, sb) or patterns.renumbered(sa, sb, name)
    if raw is not None:
        return [raw]
    if "inv_freq" in name and len(sa.shape) == len(sb.shape) == 1 and sa.shape != sb.shape and (lanes := frequencies(sa, sb)) is not None:
        return [lanes]
    cut = padded(sa, sb, tp)
    if cut is not None or max(sa.size, sb.size) > LARGEST:
        return [cut] if cut is not None else []
    if sa.shape != sb.shape and (part := sliced(sa, sb, name)) is not None:
        return [part]
    ta, tb = sa.tensor(), sb.tensor()
    if ta.is_complex() or tb.is_complex():
        cis = turned(ta, tb)
        return [] if cis is None else [cis]
    if sa.format.kind == "packed" or sb.format.kind == "packed":
        return []
    wide = [t.float() if t.is_floating_point() and t.dtype.itemsize == 1 else t for t in (ta, tb)]
    if not all(bool(t.isfinite().all()) for t in wide):
        over = ranges.overflowed(*wide)
        if over is not None:
            return [over]
        bad = nonfinite([(f"side a of {name}", wide[0])]) or nonfinite([(f"side b of {name}", wide[1])])
        return [bad] if bad else []
    if ta.dtype != tb.dtype:
        cause = rounded_through(ta, tb) or integer_cast(ta, tb)
        alike = sa.shape == sb.shape and sa.format.itemsize == sb.format.itemsize and sa.words == sb.words
        if cause is None and alike and sa.read(0, sa.words).tobytes() == sb.read(0, sb.words).tobytes():
            cause = Cause("reinterpreted", f"the bytes are equal: the same bits, read as {sa.dtype} and as {sb.dtype}", 0.0)
        return [cause] if cause else []
    if ta.dtype is torch.bool:
        inverse = ta.shape == tb.shape and torch.equal(ta, ~tb)
        return [Cause("negated", "side b is true exactly where side a is false: a mask of the other meaning", 0.0)] if inverse else []
    ta, tb = (t.float() if t.dtype.is_floating_point and t.dtype.itemsize == 1 else t for t in (ta, tb))
    ta, tb = narrowed(ta, tb)
    if ta.dtype in _SIGNED:  # torch hardly knows these: what follows compares and moves, and computes nothing with integers
        ta, tb = ta.view(_SIGNED[ta.dtype]), tb.view(_SIGNED[ta.dtype])
    leaf, wave = name.rpartition(".")[2], wave_of(name)
    turning = not weights and any(w in name.lower() for w in ("rope", "rotary", "rotated"))
    for find in (
        lambda: scales.scale(ta, tb) if scales.named(name) else None,
        lambda: scales.applied(ta, tb, scale) if scale is not None else None,
        lambda: tables(ta, tb, what=wave) if wave else None,
        lambda: cache(ta, tb) if is_cache(name) else None,
        lambda: experts(dict(enumerate(ta)), dict(enumerate(tb))) if ta.shape == tb.shape and stacked_experts(name, ta.shape) else None,
        lambda: unpacked(ta, tb, weights),
        lambda: moved(ta, tb),
        lambda: moved_blocks(ta, tb) if ta.shape != tb.shape else None,
        lambda: columns(ta, tb) or reordered(ta, tb),
        lambda: lag(ta, tb),
        lambda: rounded_through(ta, tb),
        lambda: vectors.decimals(ta, tb),
        lambda: ranges.limited(ta, tb),
        lambda: ranges.summed(ta, tb) if not weights else None,
        lambda: ranges.gates(ta, tb) if not weights else None,
        lambda: elementwise(ta, tb),
        lambda: rerotated(ta, tb) if turning else None,
        lambda: softcap(ta, tb) if not weights else None,
        lambda: inv_freq(ta, tb) if "inv_freq" in leaf else None,
        lambda: distribution(ta, tb) if not weights else None,
        lambda: _per_row(ta, tb, name, weights),
        lambda: vectors.along_columns(ta, tb) or vectors.affine(ta, tb),
        lambda: vectors.low_rank(ta, tb) if weights else None,
        lambda: None if weights else rounding(ta, tb),
    ):
        cause = find()
        if cause is not None:
            return [cause]
    return []


def _row(a: torch.Tensor, flat: int) -> str:
    """The place of a row [..., K] by its number among all rows."""
    index = [int(i) for i in np.unravel_index(flat, tuple(a.shape[:-1]))]
    return str(index[0]) if len(index) == 1 else str(index)


def _per_row(a: torch.Tensor, b: torch.Tensor, name: str, weights: bool) -> Cause | None:
    factor = rows_scaled(a, b)
    if factor is None or float((factor - 1).abs().max()) < 16 * eps(a, b):
        return None
    low, high = float(factor.min()), float(factor.max())
    if low <= 0 < high:
        empty = (factor.flatten() == 0).nonzero().flatten().tolist()
        text = f"{len(empty)} row(s) of side b are zero, the first is row {_row(a, empty[0])}: never written" if empty else ""
        return Cause("zero_rows", text, 0.0, {"rows": empty[:64]}) if empty and high == 1 else None
    why = ("a scale of each row is applied on one side only" if weights else "the statistic of a norm differs" if "norm" in name or "ln_" in name
           else "what each row is divided by differs")  # fmt: skip
    text = f"every row is the other side's times a factor of its own ({low:.6g} to {high:.6g}): {why}"
    return Cause("row_scale", text, None, {"factor": [low, high]})
