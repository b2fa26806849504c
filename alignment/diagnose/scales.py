"""Causes in the scales of quantised tensors: left at one, inverted, rounded to powers of two, or not (twice) applied."""
from __future__ import annotations

from typing import Any

import torch

from alignment.diagnose.numbers import eps
from alignment.sources import as_tensor
from alignment.verdict import Cause


def named(name: str) -> bool:
    """Is a tensor of this name a scale."""
    return "scale" in name.rpartition(".")[2].lower()


def _numbers(t: torch.Tensor) -> torch.Tensor:
    """Scales as doubles; bytes are exponents, as MX formats keep them (127 is 1)."""
    return torch.exp2(t.double() - 127) if t.dtype is torch.uint8 else t.double()


def scale(a: Any, b: Any) -> Cause | None:
    """Two sets of scales, of one value or many."""
    ta, tb = (_numbers(as_tensor(x, "scale")).flatten() for x in (a, b))
    if ta.shape != tb.shape or not ta.numel() or not bool(ta.isfinite().all() and tb.isfinite().all()):
        return None
    for x, y, side in ((ta, tb, "b"), (tb, ta, "a")):
        if bool((y == 1).all()) and not bool((x == 1).all()):
            return Cause("scale_default", f"every scale of side {side} is 1: left at its default, never received or computed", 0.0, {"side": side})
        differ = x != y
        if bool((y[differ] == 1).all()) and int(differ.sum()):
            text = f"{int(differ.sum())} of {y.numel()} scales of side {side} are 1, the others are right: left at their default, never received or computed"
            return Cause("scale_default", text, 0.0, {"side": side, "count": int(differ.sum())})
    tol = 4 * eps(as_tensor(a), as_tensor(b))
    if float((ta * tb - 1).abs().max()) <= tol and float((ta / tb - 1).abs().max()) > 64 * tol:
        return Cause("reciprocal", "every scale of side b is one over that of side a: inverted, the inverse was stored or read", 0.0)
    for x, y, side in ((ta, tb, "b"), (tb, ta, "a")):
        if not bool((x > 0).all() and (y > 0).all()):
            continue
        for how, power in (("up", x.log2().ceil()), ("down", x.log2().floor()), ("to the nearest", x.log2().round())):
            if torch.equal(y, power.exp2()) and not torch.equal(x, y):
                return Cause("scale_power", f"the scales of side {side} are those of the other side rounded {how} to a power of two (E8M0)", 0.0,
                             {"side": side, "how": how})  # fmt: skip
    if ta.numel() > 1 and bool((tb == tb[0]).all()) and not bool((ta == ta[0]).all()) and float(tb[0]) in (float(ta.max()), float(ta.min())):
        which = "largest" if float(tb[0]) == float(ta.max()) else "smallest"
        return Cause("scale_merged", f"side b has one scale throughout, the {which} of side a: one of a tensor for those of its parts", 0.0)
    return None


def applied(a: Any, b: Any, scales: Any) -> Cause | None:
    """``a`` and ``b`` (numbers, not patterns) against the scales of ``a``, of the tensor, of its rows or of its blocks:
    were they left out, applied twice, or applied the wrong way round on one side."""
    ta, tb, s = (as_tensor(v, "tensor").double() for v in (a, b, scales))
    full = _expanded(s, ta.shape)
    if ta.shape != tb.shape or full is None or not bool((full > 0).all()) or not bool(ta.any()):
        return None
    tol = 8 * eps(as_tensor(a), as_tensor(b))
    size = ta.abs() + tol * ta.abs().max()
    for text, kind, factor in (
        ("the scale was left at 1 on side b", "scale_default", 1 / full), ("the scale was left at 1 on side a", "scale_default", full),
        ("the scale is inverted on side b", "scale_inverted", 1 / full**2), ("the scale is inverted on side a", "scale_inverted", full**2),
    ):  # fmt: skip
        if float((factor - 1).abs().max()) > 16 * tol and float(((tb - ta * factor).abs() / (factor * size)).max()) <= tol:
            shape = "tensor" if s.numel() == 1 else f"each of {s.numel()} parts"
            return Cause(kind, f"{text}: side b is side a times {float(factor.flatten()[0]):.6g} (in the first element), by the scale of the {shape}",
                         0.0, {"factor": float(factor.flatten()[0]), "scales": s.numel()})  # fmt: skip
    return None


def _expanded(s: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
    """One scale for each element: of the tensor, of each row, or of each block (the last may be cut)."""
    if s.numel() == 1:
        return s.reshape(()).expand(shape)
    if s.ndim == 1 and len(shape) == 2:
        s = s[:, None] if s.numel() == shape[0] else s[None]
    if s.ndim != len(shape):
        return None
    for axis, n in enumerate(shape):
        if not s.shape[axis] or s.shape[axis] > n:
            return None
        block = -(-n // s.shape[axis])
        block = next((p for p in (128, 64, 32, 16) if -(-n // p) == s.shape[axis]), block)
        s = s.repeat_interleave(block, axis).narrow(axis, 0, n) if block * s.shape[axis] >= n else s
        if s.shape[axis] != n:
            return None
    return s
