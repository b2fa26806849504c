"""Causes at the ends of a format, and sums: clamped, overflowed, flushed to zero, running totals, sigmoid for softmax."""
from __future__ import annotations

import torch

from alignment.diagnose.numbers import eps, varied
from alignment.verdict import Cause


def overflowed(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    """Infinities (or NaN, as E4M3 has no infinity) of one side are what a narrower format makes of the other side's numbers."""
    if a.shape != b.shape or not a.is_floating_point() or not b.is_floating_point():
        return None
    for x, y, side in ((a, b, "b"), (b, a, "a")):
        bad = ~y.isfinite()
        if not bool(x.isfinite().all()) or not bool(bad.any()) or bool(y.isnan().any()):
            continue
        for name, top in (("float16", 65504.0), ("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)):
            over = x.double().abs() > top
            if bool((over == bad).all()) and bool((torch.sign(x[bad].double()) == torch.sign(y[bad].double())).all()):
                text = f"overflow: side {side} is infinite exactly where the other side is beyond the largest {name} ({top:g})"
                return Cause("overflow", text, 0.0, {"format": name, "side": side, "count": int(bad.sum())})
    return None


def limited(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    """Clamped at both ends or one, or subnormal numbers flushed to zero: exactly, all other elements equal."""
    if a.shape != b.shape or a.dtype != b.dtype or not a.is_floating_point():
        return None
    differ = a != b
    for x, y, side in ((a, b, "b"), (b, a, "a")):
        u, v = x[differ].double(), y[differ].double()
        tiny = torch.finfo(a.dtype).tiny
        if u.numel() and bool((v == 0).all()) and bool((u.abs() < tiny).all()):
            return Cause("flushed", f"side {side} has zero for the {u.numel()} subnormal number(s) of the other side: flushed to zero", 0.0,
                         {"side": side, "count": u.numel()})  # fmt: skip
        if u.numel() < 3 or int(v[:1024].unique().numel()) > 2 or not varied(y):  # at most two ends
            continue
        low, high = float(y.double().min()), float(y.double().max())
        cut = (u > high) & (v == high) | (u < low) & (v == low)
        if bool(cut.all()) and int(u.unique().numel()) > 1:
            ends = [f"{e:.6g}" for e, w in ((low, u < low), (high, u > high)) if bool(w.any())]
            return Cause("clamped", f"side {side} is the other side, clamped at {' and '.join(ends)} ({u.numel()} elements)", 0.0,
                         {"side": side, "at": [float(e) for e in ends], "count": u.numel()})  # fmt: skip
    return None


def summed(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    """One side is the running total of the other along its last axis."""
    if a.shape != b.shape or not a.ndim or a.shape[-1] < 4 or not a.is_floating_point() or not b.is_floating_point():
        return None
    for x, y, side in ((a, b, "b"), (b, a, "a")):
        total = x.double().cumsum(-1)
        size = float(x.double().abs().sum(-1).max())
        rest = float((total - y.double()).abs().max())
        if rest <= 4 * eps(a, b) * size * x.shape[-1] ** 0.5 and float((x.double() - y.double()).abs().max()) > 0.05 * size:
            return Cause("cumulative", f"side {side} is the running total of the other side: cumulative, not one value a token", rest, {"side": side})
    return None


def gates(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    """Router scores: softmax on one side and sigmoid on the other, or normalised over the chosen experts on one side only."""
    if a.shape != b.shape or a.ndim < 2 or a.shape[-1] < 2 or not a.is_floating_point() or not b.is_floating_point():
        return None
    tol = 16 * eps(a, b)
    for x, y, side in ((a.double(), b.double(), "b"), (b.double(), a.double(), "a")):
        if float((x.sum(-1) - 1).abs().max()) > tol or not bool(((x > 0) & (y > 0) & (y < 1)).all()):
            continue
        if float((y.sum(-1) - 1).abs().max()) <= tol or x.shape[-1] < 3:
            continue
        d = torch.logit(y) - x.log()
        # an error of one rounding of y is that divided by (1 - y) in the logit
        if float(((d - d.mean(-1, keepdim=True)) * (1 - y)).abs().max()) <= tol:
            return Cause("scoring", f"side {side} has sigmoid scores, the other side the softmax of the same logits", None, {"side": side})
    return None
