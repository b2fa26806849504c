"""Causes in a rotary embedding (Su et al. 2021): which lanes are paired, at which frequencies, how they were rounded.

Reference values are computed in float64 here; nothing of either side is trusted.
"""
from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from alignment.diagnose.numbers import eps
from alignment.sources import as_tensor
from alignment.verdict import Cause

BASES = (10000.0, 500000.0, 1000000.0, 8000000.0, 5000000.0, 100000.0, 10000000.0, 150000.0, 160000.0, 50000.0)


def _inv_freq(base: float, lanes: int) -> torch.Tensor:
    return base ** (-torch.arange(lanes, dtype=torch.float64) / lanes)


def _launder(f: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"": f, "bfloat16": f.bfloat16().double(), "float16": f.half().double(), "float32": f.float().double()}


def inv_freq(a: Any, b: Any) -> Cause | None:
    """Two frequency lists [R] of one length: which base each was made from."""
    bases = []
    for side in (a, b):
        f = as_tensor(side, "inv_freq").double().flatten()
        if f.numel() < 2 or not bool((f > 0).all()) or float(f[0]) != 1.0:
            return None
        base = float(f[1]) ** -f.numel()
        base = float(f"{base:.4g}") if abs(base / float(f"{base:.4g}") - 1) < 1e-3 else base
        if float((_inv_freq(base, f.numel()) / f - 1).abs().max()) > 64 * max(eps(as_tensor(side)), 6e-8):
            return None
        bases.append(base)
    if abs(bases[0] / bases[1] - 1) < 1e-3:
        return None
    return Cause("rotary_base", f"rotary base {bases[0]:g} on side a, {bases[1]:g} on side b", 0.0, {"a": bases[0], "b": bases[1]})


def frequencies(a: Any, b: Any) -> Cause | None:
    """Two frequency lists of different lengths, equal where neither has a zero: padding that decides which lanes pair."""
    ta, tb = as_tensor(a, "inv_freq").double(), as_tensor(b, "inv_freq").double()
    (short, long), side = ((ta, tb), "b") if ta.numel() < tb.numel() else ((tb, ta), "a")
    n = short.numel()
    if not n or not torch.equal(short, long[:n]) or bool(long[n:].any()):
        return None
    text = (f"side {side} has {long.numel()} frequencies, {long.numel() - n} of them zero, the other side the {n} others: lane i pairs with "
            f"lane i + {long.numel()} there and i + {n} here, at equal frequencies")  # fmt: skip
    return Cause("rotary_lanes", text, 0.0, {"side": side, "lanes": [ta.numel(), tb.numel()]})


def tables(a: Any, b: Any, *, base: float | None = None, positions: Any = None, what: str = "cos") -> Cause | None:
    """Two cos (or sin) tables [P, R]: which base, and whether the frequencies went through a narrower format.

    R lanes are the first R/1 frequencies, or both halves with R/2 each (as Hugging Face stores them).
    """
    if as_tensor(a, "a").is_complex() or as_tensor(b, "b").is_complex():
        return None
    ta, tb = as_tensor(a, "a").double(), as_tensor(b, "b").double()
    if ta.ndim > 2 and ta.shape == tb.shape and ta.shape[:-2].numel() == 1:
        ta, tb = ta.reshape(ta.shape[-2:]), tb.reshape(tb.shape[-2:])
    if ta.shape != tb.shape or ta.ndim != 2 or ta.shape[0] < 3 or ta.shape[1] < 2 or what not in ("cos", "sin"):
        return None
    p = torch.arange(ta.shape[0], dtype=torch.float64) if positions is None else as_tensor(positions, "positions").double()
    wave = torch.cos if what == "cos" else torch.sin
    fits: list[tuple[float, str] | None] = []
    for t, original in ((ta, a), (tb, b)):
        tol = 4 * max(eps(as_tensor(original)), 6e-8) * (1 + float(p.max()))
        best = None
        for lanes, f0 in itertools.product({ta.shape[1], ta.shape[1] // 2}, (base,) if base else BASES):
            for name, f in _launder(_inv_freq(f0, lanes)).items():
                table = wave(p[:, None] * f)
                table = table if lanes == ta.shape[1] else torch.cat([table, table], -1)
                if table.shape != t.shape:
                    continue
                rest = float((table - t).abs().max())
                # "" and float32 are the same to a table in fp32; the plainest name that fits best wins.
                if rest <= tol and (best is None or rest < 0.5 * best[0]):
                    best = (rest, name if name != "float32" else "", f0)
        fits.append(best)
    for i, side in enumerate("ba"):
        known, other = fits[i], (tb, ta)[i]
        if known is not None and fits[1 - i] is None:
            return _other_wave(known, other, side, what, p, 4 * max(eps(as_tensor((b, a)[i])), 6e-8) * (1 + float(p.max())))
    if fits[0] is None or fits[1] is None or fits[0][1:] == fits[1][1:]:
        return None
    rest = max(fits[0][0], fits[1][0])
    if fits[0][2] != fits[1][2]:
        text = f"rotary base {fits[0][2]:g} on side a, {fits[1][2]:g} on side b"
        return Cause("rotary_base", text, rest, {"a": fits[0][2], "b": fits[1][2]})
    side, name = ("b", fits[1][1]) if fits[1][1] else ("a", fits[0][1])
    text = f"inv_freq of side {side} was rounded to {name} (a whole-model cast takes the buffer along); the error grows with the position"
    return Cause("rotary_frequency", text, rest, {"side": side, "format": name, "base": fits[0][2]})


def _other_wave(known: tuple[float, str, float], other: torch.Tensor, side: str, what: str, p: torch.Tensor, tol: float) -> Cause | None:
    """One table is what it is called; the other is another function of the same angles."""
    width = other.shape[1]
    for lanes in (width, width // 2):
        angle = p[:, None] * _launder(_inv_freq(known[2], lanes))[known[1]]
        swapped, turned = (angle.sin(), -angle.cos()) if what == "cos" else (angle.cos(), -angle.sin())
        for kind, text, table in (
            ("cos_sin_swapped", f"holds the {'sine' if what == 'cos' else 'cosine'}: cos and sin are swapped", swapped),
            ("rotary_direction", f"holds minus the {'cosine' if what == 'cos' else 'sine'}: it rotates in the other direction", turned),
            *(("rotary_scaling", f"divides positions (or frequencies) by {k:g}", (torch.cos if what == "cos" else torch.sin)(angle / k))
              for k in (2, 4, 8, 16, 32, 0.5)),
        ):  # fmt: skip
            table = table if lanes == width else torch.cat([table, table], -1)
            if table.shape == other.shape and float((table - other).abs().max()) <= tol:
                return Cause(kind, f"rotary: {what} of side {side} {text}", 0.0, {"side": side, "base": known[2]})
    return None


def rotate(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, layout: str, offset: int,
           swapped: bool = False, phase: float = 0.0) -> torch.Tensor:
    """``x`` [T, ..., D] rotated in float64. ``layout`` "half" pairs lanes (i, i + offset), "interleaved" (2i, 2i + 1).
    ``swapped`` takes the sine for the cosine and the other way round; ``phase`` is added to every angle."""
    angle = positions.double()[:, None] * inv_freq.double() + phase
    angle = angle.reshape(angle.shape[0], *([1] * (x.ndim - 2)), -1)
    cos, sin, n = angle.cos(), angle.sin(), inv_freq.numel()
    if swapped:
        cos, sin = sin, cos
    out = x.double().clone()
    if layout == "half":
        first, second = slice(0, n), slice(offset, offset + n)
    else:
        first, second = slice(0, 2 * n, 2), slice(1, 2 * n, 2)
    u, v = x[..., first].double(), x[..., second].double()
    out[..., first], out[..., second] = u * cos - v * sin, v * cos + u * sin
    return out


def _variant(x: torch.Tensor, p: torch.Tensor, known: tuple[torch.Tensor, str, int], other: torch.Tensor, side: str, said: str,
             tol: float) -> Cause | None:  # fmt: skip
    """What ``side`` did where the other side rotated as ``known``: only what explains every element."""
    f, layout, offset = known
    n = f.numel()
    tries: list[tuple[str, str, torch.Tensor]] = [
        ("rotary_direction", "rotates in the other direction (the sign of the sine, or of rotate_half)", rotate(x, -p, f, layout, offset)),
        ("cos_sin_swapped", "has cosine and sine swapped", rotate(x, p, f, layout, offset, swapped=True)),
        ("rotary_missing", "is not rotated", x.double()),
        ("rotary_twice", "is rotated twice, or by twice the positions", rotate(x, 2 * p, f, layout, offset)),
    ]
    tries += [("rotary_position", f"is rotated by positions that are {abs(k)} {'higher' if k > 0 else 'lower'}", rotate(x, p + k, f, layout, offset))
              for k in (1, -1, 2, -2)]  # fmt: skip
    tries += [("rotary_scaling", f"divides positions (or frequencies) by {k:g}", rotate(x, p / k, f, layout, offset)) for k in (2, 4, 8, 16, 32, 0.25)]
    tries += [("rotary_lanes", f"rotates {2 * m} of {x.shape[-1]} lanes", _partial(x, p, f, layout, m)) for m in (n // 2, n // 4) if m]
    if layout == "half" and offset == n and 2 * n <= x.shape[-1]:
        turned = torch.cat([x[..., n : 2 * n], x[..., :n], x[..., 2 * n :]], -1)
        back = rotate(turned, p, f, layout, offset)
        tries.append(("rotary_layout", "has the halves of the rotated lanes exchanged", torch.cat([back[..., n : 2 * n], back[..., :n], back[..., 2 * n :]], -1)))
    fits = [(float((out - other.double()).abs().max()), kind, text) for kind, text, out in tries]
    rest, kind, text = min(fits)
    if rest > tol:
        return None
    return Cause(kind, f"rotary: side {side} {text}; the other side has {said}", rest, {"side": side})


def _partial(x: torch.Tensor, p: torch.Tensor, f: torch.Tensor, layout: str, lanes: int) -> torch.Tensor:
    """The first ``2 * lanes`` lanes rotated, at frequencies of the same base."""
    base = float(f[1]) ** -f.numel() if f.numel() > 1 else 1.0
    return rotate(x, p, _inv_freq(base, lanes), layout, lanes)


def rerotated(a: Any, b: Any, positions: Any = None) -> Cause | None:
    """Outputs ``a`` and ``b`` [T, ..., D] of a rotary embedding whose input is not known: is one a further rotation of
    the other, as it is where one side turns the other way, does not turn, or counts positions from another place."""
    ta, tb = as_tensor(a, "a").cpu(), as_tensor(b, "b").cpu()
    if ta.dtype.itemsize == 1 or ta.dtype != tb.dtype:
        return None
    if ta.shape != tb.shape or ta.ndim < 2 or ta.shape[-1] % 2 or ta.shape[0] < 4 or not ta.is_floating_point() or not tb.is_floating_point():
        return None
    p = (torch.arange(ta.shape[0]) if positions is None else as_tensor(positions, "positions").cpu()).double()
    if p.shape != ta.shape[:1] or not bool((p != 0).any()):
        return None
    d, one = ta.shape[-1], torch.ones_like(p)
    tol = 8 * max(eps(ta, tb), 6e-8) * (1 + float(p.abs().max())) * max(float(ta.abs().max()), 1e-30)
    if float((ta.double() - tb.double()).abs().max()) <= 16 * tol:
        return None
    ways = (
        ("rotary_direction", "side b rotates in the other direction (the sign of the sine, or of rotate_half)", -2 * p, 0.0),
        ("rotary_direction", "side a rotates in the other direction (the sign of the sine, or of rotate_half)", 2 * p, 0.0),
        # exchanged, cos and sin rotate by the complement of each angle
        ("cos_sin_swapped", "one side has cosine and sine swapped (it is side b, if side a is right)", -2 * p, math.pi / 2),
        ("rotary_missing", "side b is not rotated, side a is (or side a is rotated once more)", -p, 0.0),
        ("rotary_missing", "side a is not rotated, side b is (or side b is rotated once more)", p, 0.0),
        *(("rotary_position", f"side b is rotated by positions that are {abs(k)} {'higher' if k > 0 else 'lower'}", k * one, 0.0)
          for k in (1, -1, 2, -2)),
    )  # fmt: skip
    for base, (kind, text, turn, phase) in itertools.product(BASES, ways):
        f = _inv_freq(base, d // 2)
        for layout, offset in (("half", d // 2), ("interleaved", 0)):
            if float((rotate(ta[:4], turn[:4], f, layout, offset, phase=phase) - tb[:4].double()).abs().max()) > tol:
                continue
            rest = float((rotate(ta, turn, f, layout, offset, phase=phase) - tb.double()).abs().max())
            if rest <= tol:
                return Cause(kind, f"rotary: {text} (base {base:g}, {layout})", rest, {"base": base, "layout": layout})
    return None


def rotary(
    x: Any, a: Any, b: Any, positions: Any = None, *, inv_freq: Any = None, base: float | None = None
) -> Cause | None:
    """Outputs ``a`` and ``b`` [T, ..., D] of a rotary embedding of the same ``x``: which layout and which frequencies
    each side used. ``inv_freq`` (without padding zeros) or ``base`` fix the frequencies; otherwise common bases are
    tried."""
    tx, ta, tb = (as_tensor(v, "x").cpu() for v in (x, a, b))
    if not (tx.shape == ta.shape == tb.shape) or tx.ndim < 2 or tx.shape[-1] % 2:
        return None
    d = tx.shape[-1]
    p = torch.arange(tx.shape[0]) if positions is None else as_tensor(positions, "positions").cpu()
    if not bool((p != 0).any()):
        return None
    choices: dict[str, torch.Tensor] = {}
    if inv_freq is not None:
        f = as_tensor(inv_freq, "inv_freq").double()
        choices["given frequencies"] = f[f != 0] if bool((f != 0).any()) else f
    else:
        for f0 in (base,) if base else BASES:
            choices[f"base {f0:g}"] = _inv_freq(f0, d // 2)
    tol = 8 * max(eps(ta, tb), 6e-8) * (1 + float(p.abs().max())) * max(float(tx.abs().max()), 1.0)
    fits: list[tuple[float, str] | None] = [None, None]
    how: list[tuple[torch.Tensor, str, int] | None] = [None, None]
    for name, freq in choices.items():
        for rounding, f in _launder(freq).items():
            n = f.numel()
            layouts = {("half", d // 2): f"pairs (i, i+{d // 2})", ("half", n): f"pairs (i, i+{n})",
                       ("interleaved", 0): "pairs (2i, 2i+1)"}  # fmt: skip
            for (layout, offset), text in layouts.items():
                if 2 * n > d or (layout == "half" and offset + n > d):
                    continue
                out = rotate(tx, p, f, layout, offset)
                said = f"{name}{' rounded to ' + rounding if rounding and rounding != 'float32' else ''}, {text}"
                for i, t in enumerate((ta, tb)):
                    rest = float((out - t.double()).abs().max())
                    old = fits[i]
                    if rest <= tol and (old is None or rest < 0.5 * old[0]):
                        fits[i], how[i] = (rest, said), (f, layout, offset)
    for i, side in enumerate("ab"):  # one side is understood: what did the other do otherwise
        known, other = how[i], (tb, ta)[i]
        if known is not None and fits[1 - i] is None:
            return _variant(tx, p, known, other, "ba"[i], fits[i][1] if fits[i] else side, tol)
    if fits[0] is None or fits[1] is None or fits[0][1] == fits[1][1]:
        return None
    text = f"rotary: side a has {fits[0][1]}; side b has {fits[1][1]}"
    kind = "rotary_layout" if fits[0][1].rpartition(", ")[2] != fits[1][1].rpartition(", ")[2] else "rotary_frequency"
    return Cause(kind, text, max(fits[0][0], fits[1][0]), {"a": fits[0][1], "b": fits[1][1]})
