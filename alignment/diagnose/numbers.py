"""Causes that act on each number alone: a rounding, a factor, a sign, a constant."""
from __future__ import annotations

import math

import torch

from alignment.verdict import Cause

_EPS = {torch.float64: 2.3e-16, torch.float32: 6e-8, torch.float16: 4.9e-4, torch.bfloat16: 3.9e-3}


def eps(*tensors: torch.Tensor) -> float:
    """Half a unit in the last place, relative, of the coarsest format involved."""
    return max(_EPS.get(t.dtype, 0.0 if not t.is_floating_point() else 0.07) for t in tensors)


def narrowed(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Doubles that are all numbers of fp32, on both sides, as fp32: they went through text, and carry the rounding of fp32."""
    if a.dtype is not torch.float64 or b.dtype is not torch.float64 or not a.numel():
        return a, b
    if all(torch.equal(t.float().double(), t) for t in (a, b)):
        return a.float(), b.float()
    return a, b


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape and dtype, equal values, signed zeros told apart. Finite tensors only."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.equal(a, b) and bool((torch.signbit(a) == torch.signbit(b)).all())


def varied(t: torch.Tensor, least: int = 4) -> bool:
    """Enough different values that a coincidence is unlikely."""
    return t.numel() >= least and int(t.flatten()[:4096].unique().numel()) >= min(least, 4)


def _mantissa(x: torch.Tensor, bits: int, mode: str) -> torch.Tensor:
    """fp32 with the mantissa cut to ``bits`` explicit bits; ``mode``: nearest-even, nearest-away or truncate."""
    drop = 23 - bits
    p = x.contiguous().view(torch.int32)
    if mode == "truncate":
        return (p & -(1 << drop)).view(torch.float32)
    half = 1 << (drop - 1)
    odd = (p >> drop) & 1
    add = half - 1 + odd if mode == "nearest-even" else half
    return ((p + add) & -(1 << drop)).view(torch.float32)


def rounding_modes(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """``x`` (fp32 or fp64) rounded through each narrower format and back, by name."""
    out: dict[str, torch.Tensor] = {}
    if x.dtype is torch.float64:
        out["float32"] = x.float().double()
    base = x.float()
    if x.dtype in (torch.float32, torch.float64):
        out["bfloat16"] = base.bfloat16().to(x.dtype)
        out["TF32"] = _mantissa(base, 10, "nearest-even").to(x.dtype)
        out["float16"] = base.half().to(x.dtype)
        out["TF32 (ties away from zero)"] = _mantissa(base, 10, "nearest-away").to(x.dtype)
        out["TF32 (truncated)"] = _mantissa(base, 10, "truncate").to(x.dtype)
        out["bfloat16 (truncated)"] = _mantissa(base, 7, "truncate").to(x.dtype)
    for f8 in (torch.float8_e4m3fn, torch.float8_e5m2):
        if x.is_floating_point() and x.dtype.itemsize > 1:
            out[str(f8).removeprefix("torch.")] = base.to(f8).to(x.dtype)
    return out


def rounded_through(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    """One side is the other, rounded through a narrower format: exactly, in every element."""
    if a.shape != b.shape or not a.is_floating_point() or not b.is_floating_point():
        return None
    if a.dtype != b.dtype:
        wide, narrow, side = (a, b, "b") if a.dtype.itemsize >= b.dtype.itemsize else (b, a, "a")
        if narrow.numel() and torch.equal(wide.to(narrow.dtype).double(), narrow.double()):
            name = str(narrow.dtype).removeprefix("torch.")
            exact = torch.equal(wide.double(), narrow.double())
            text = (f"side {side} holds the same values in {name}" if exact
                    else f"side {side} is the other side rounded to {name}, in every element")  # fmt: skip
            return Cause("dtype_cast", text, 0.0, {"format": name, "side": side, "values_equal": exact})
        return None
    for source, target, side in ((a, b, "b"), (b, a, "a")):
        # An element that the rounding keeps is no evidence: something must have been rounded.
        # So is what becomes zero or one value whatever it was: an untrained norm weight is no rounded one.
        changed = target[target != source]
        if not bool((changed != 0).any()) or (changed.numel() > 3 and bool((changed == changed[0]).all())):
            continue
        fits = [n for n, r in rounding_modes(source).items() if same_bits(r, target) and not same_bits(r, source)]
        if fits:
            also = f" (these numbers cannot tell it from {', '.join(fits[1:])})" if len(fits) > 1 else ""
            text = f"side {side} is the other side rounded through {fits[0]}{also}, in every element"
            return Cause("rounded", text, 0.0, {"format": fits[0], "formats": fits, "side": side, "changed": changed.numel()})
    return None


def integer_cast(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    """Two dtypes of which one is of integers, or of booleans: the same values, or those that fit into the narrower one."""
    if a.shape != b.shape or (a.is_floating_point() and b.is_floating_point()) or not a.numel():
        return None
    name = str(b.dtype).removeprefix("torch.")
    if torch.equal(a.double(), b.double()):
        return Cause("dtype_cast", f"side b holds the same values in {name}", 0.0, {"format": name, "side": "b", "values_equal": True})
    if b.dtype.itemsize < a.dtype.itemsize and not a.is_floating_point() and torch.equal(a.to(b.dtype), b):
        return Cause("dtype_cast", f"side b is side a cut to {name}: what does not fit was wrapped around", 0.0, {"format": name, "side": "b", "values_equal": False})
    return None


def elementwise(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    """A sign, an abs, a factor or a constant that explains every element."""
    if a.shape != b.shape or not varied(a) or not a.is_floating_point() or not b.is_floating_point():
        return None
    tol = 4 * eps(a, b)
    x, y = a.double().flatten(), b.double().flatten()
    if torch.equal(y, -x):
        return Cause("sign", "side b is side a with the sign flipped", 0.0)
    if not bool(x.any()) or not bool(y.any()):
        return Cause("zero", f"side {'b' if bool(x.any()) else 'a'} is zero throughout: allocated and never filled, or overwritten", 0.0)
    for u, v, side in ((x, y, "b"), (y, x, "a")):
        if torch.equal(v, u.abs()) and bool((u < 0).any()):
            return Cause("abs", f"side {side} is the absolute value of the other side", 0.0)
    scale = float((x * y).sum() / (x * x).sum())
    size = float(x.abs().max())
    used = x.abs() > 1e-3 * size
    if abs(scale) > 1e-12 and abs(scale - 1) > 16 * tol and int(used.sum()) >= 4:
        rest = float(((y - scale * x).abs() / (abs(scale) * x.abs() + tol * size)).max())
        if rest <= tol:
            logs = {math.log2(math.e): "2 on side b, e on side a", math.log10(math.e): "10 on side b, e on side a",
                    math.log(2): "e on side b, 2 on side a", math.log(10): "e on side b, 10 on side a"}  # fmt: skip
            base = next((f" (logarithm to base {t})" for f, t in logs.items() if abs(scale / f - 1) < 8 * tol), "")
            return Cause("scaled", f"side b is side a times {scale:.9g}{base}", rest, {"factor": scale})
    offset = float((y - x).median())
    top = max(size, float(y.abs().max()))
    rest = float((y - x - offset).abs().max())
    if abs(offset) > 16 * tol * top and rest <= 2 * tol * top:
        return Cause("constant_offset", f"side b is side a plus {offset:.9g} in every element", rest, {"offset": offset})
    if bool((x != 0).all() and (y != 0).all()) and float((x * y - 1).abs().max()) <= 2 * tol:
        return Cause("reciprocal", "side b is one over side a, in every element (a scale and its inverse)", float((x * y - 1).abs().max()))
    for u, v, side in ((x, y, "b"), (y, x, "a")):
        if bool((u <= 0).all() and (v >= 0).all()) and float((u.exp() - v).abs().max()) <= tol:
            return Cause("exponential", f"side {side} is the exponential of the other side: probabilities, not their logarithms", 0.0)
    return None


def softcap(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    """One side is ``c * tanh(x / c)`` of the other, as logits and attention scores are capped."""
    if a.shape != b.shape or not varied(a) or not a.is_floating_point() or not b.is_floating_point():
        return None
    for x, y, side in ((a.double().flatten(), b.double().flatten(), "b"), (b.double().flatten(), a.double().flatten(), "a")):
        at = int(x.abs().argmax())
        top, capped = float(x[at].abs()), float(y[at].abs())
        if capped >= top or capped <= 0 or bool((y.abs() > x.abs()).any()):
            continue
        low, high = capped, 1e6 * capped  # c tanh(x / c) grows with c
        for _ in range(100):
            mid = (low * high) ** 0.5
            low, high = (mid, high) if mid * math.tanh(top / mid) < capped else (low, mid)
        c = float(f"{high:.3g}") if abs(high / float(f"{high:.3g}") - 1) < 1e-3 else high
        tol = 8 * eps(a, b) * top
        rest = float((c * torch.tanh(x / c) - y).abs().max())
        if rest <= tol and float((x - y).abs().max()) > 8 * tol:
            return Cause("softcap", f"side {side} is capped: {c:.6g} * tanh(x / {c:.6g}) of the other side", rest, {"cap": c, "side": side})
    return None


def rows_scaled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    """The factor of each row [..., 1] if every row of b is a multiple of that row of a and the factors differ."""
    if a.shape != b.shape or a.ndim < 2 or a.shape[-1] < 4 or a.shape[:-1].numel() < 2 or not a.is_floating_point():
        return None
    x, y = a.double(), b.double()
    norm = (x * x).sum(-1, keepdim=True)
    if not bool((norm > 0).all()) or not bool((x.amax(-1) > x.amin(-1)).all()):  # constant rows are always multiples
        return None
    factor = (x * y).sum(-1, keepdim=True) / norm
    tol = 4 * eps(a, b)
    size = factor.abs().clamp_min(1e-300) * (x.abs() + tol * x.abs().amax(-1, keepdim=True))
    return factor if float(((y - factor * x).abs() / size).max()) <= tol else None


def rounding(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    """Differences no larger than a few roundings of the largest values involved, in more than one element."""
    if a.shape != b.shape or not a.is_floating_point() or int((a != b).sum()) < 2:
        return None
    d, size = (a.double() - b.double()).abs(), torch.maximum(a.double().abs(), b.double().abs())
    top = size.amax(-1, keepdim=True) if size.ndim else size
    worst = float((d / (2 * eps(a) * top).clamp_min(1e-300)).max())
    if worst > 8:
        return None
    text = (f"differences of the size of rounding (at most {worst:.2g} units in the last place of their row): "
            "the same sum in another order, or another kernel")  # fmt: skip
    return Cause("rounding", text, None, {"units": worst})
