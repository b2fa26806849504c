"""Causes that need to know what a module does: a norm, a projection, a selection; and where a NaN starts."""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from alignment.diagnose.numbers import eps, rounding_modes, rows_scaled
from alignment.sources import as_tensor
from alignment.verdict import Cause

EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-7, 1e-4, 1e-3, 0.0)


def norm(x: Any, a: Any, b: Any) -> Cause | None:
    """RMS (or layer) norm outputs ``a``, ``b`` [..., H] of the same input ``x``: another epsilon.

    The weight drops out: a row of b is a row of a times sqrt((v + eps_a) / (v + eps_b)), v the row's mean square
    (or variance).
    """
    tx, ta, tb = (as_tensor(v, "x").cpu() for v in (x, a, b))
    if not (tx.shape == ta.shape == tb.shape):
        return None
    factor = rows_scaled(ta, tb)
    if factor is None:
        return None
    rows = tx.double()
    if not bool((factor > 0).all() and rows.isfinite().all()):
        return None
    tol = 32 * eps(ta, tb)
    best: tuple[float, str, float, float] | None = None
    for kind, v in (("mean square", (rows * rows).mean(-1, keepdim=True)), ("variance", rows.var(-1, False, keepdim=True))):
        low, ratio = int(v.argmin()), (factor * factor).flatten()
        small = float(v.flatten()[low])
        # An epsilon nobody lists: the row with the least spread tells it from the other side's.
        free = [(ea, float(f"{(small + ea) / float(ratio[low]) - small:.3g}")) for ea in EPSILONS]
        free += [(float(f"{(small + eb) * float(ratio[low]) - small:.3g}"), eb) for eb in EPSILONS]
        pairs = [(ea, eb) for ea in EPSILONS for eb in EPSILONS]
        for odd in (pairs, [p for p in free if min(p) > 0 and v.numel() > 2]):
            if best is not None and best[0] <= tol:
                break
            for ea, eb in odd:
                if ea == eb or (min(ea, eb) == 0 and not bool((v > 0).all())):
                    continue
                rest = float((factor / ((v + ea) / (v + eb)).sqrt() - 1).abs().max())
                if best is None or rest < best[0]:
                    best = (rest, kind, ea, eb)
    spread = float((factor - 1).abs().max())
    if best is None or best[0] > tol or spread < 4 * best[0] or spread < 2 * tol:
        return None
    text = f"wrong epsilon: {best[2]:g} on side a, {best[3]:g} on side b (each row differs by its own factor)"
    return Cause("epsilon", text, best[0], {"a": best[2], "b": best[3], "over": best[1]})


def projection(x: Any, weight: Any, a: Any, b: Any) -> Cause | None:
    """Outputs ``a``, ``b`` of a linear layer with the same input ``x`` [T, K] and ``weight`` [N, K]: one side used
    the transposed weight, or one side was rounded to a narrower format after the product."""
    tx, w, ta, tb = (as_tensor(v, "x").cpu() for v in (x, weight, a, b))
    if ta.shape != tb.shape or tx.ndim != 2 or w.ndim != 2:
        return None
    outs = {}
    if tx.shape[1] == w.shape[1]:
        outs["x @ weight.T"] = tx.double() @ w.double().T
    if tx.shape[1] == w.shape[0]:
        outs["x @ weight"] = tx.double() @ w.double()
    outs |= _rounded_inputs(tx, w)
    bound = tx.double().abs().max() * w.double().abs().max() * tx.shape[1]
    fits = []
    for t in (ta, tb):
        tol = float(bound) * 6e-8 * 4 + eps(t) * float(t.double().abs().max()) * 2
        rests = {n: float((o - t.double()).abs().max()) for n, o in outs.items() if o.shape == t.shape}
        best = min(rests, key=rests.__getitem__, default=None)
        fits.append((best, rests[best]) if best is not None and rests[best] <= tol else None)
    if fits[0] is None or fits[1] is None or fits[0][0] == fits[1][0]:
        return None
    rounded = [f[0].partition("rounded to ")[2] for f in fits if f is not None]
    if any(rounded):
        side, how = ("b", rounded[1]) if rounded[1] else ("a", rounded[0])
        text = f"rounded inputs: side {side} multiplies its input and its weight rounded to {how}, the other side does not"
        return Cause("rounded_inputs", text, max(fits[0][1], fits[1][1]), {"side": side, "format": how})
    text = f"matches after transpose: side a is {fits[0][0]}, side b is {fits[1][0]}"
    return Cause("transposed", text, max(fits[0][1], fits[1][1]), {"a": fits[0][0], "b": fits[1][0]})


#: Elements of an operand that is rounded in every mode: a gigabyte for all of them.
_ROUNDED = 1 << 24


def _rounded_inputs(x: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The product of both operands rounded to what tensor cores read in the place of fp32."""
    if x.shape[1] != weight.shape[1] or x.dtype != torch.float32 or weight.dtype != torch.float32 or max(x.numel(), weight.numel()) > _ROUNDED:
        return {}
    modes = [rounding_modes(t) for t in (x, weight)]
    return {f"x @ weight.T rounded to {n}": modes[0][n].double() @ modes[1][n].double().T
            for n in ("TF32", "TF32 (ties away from zero)", "TF32 (truncated)", "bfloat16", "float16")}


def topk(ids_a: Any, ids_b: Any, scores: Any = None) -> Cause | None:
    """Selected ids [..., k] that differ: the order of the slots only, an exact tie, or a margin below what a narrower
    format can tell. ``scores`` [..., E] are what was selected from (of either side, in its full precision)."""
    ta, tb = as_tensor(ids_a, "ids_a").cpu(), as_tensor(ids_b, "ids_b").cpu()
    if ta.shape != tb.shape or ta.ndim == 0 or ta.is_floating_point() or tb.is_floating_point() or torch.equal(ta, tb):
        return None
    z = None if scores is None else as_tensor(scores, "scores").cpu()
    if z is not None and ta.ndim == z.ndim - 1 and ta.shape == z.shape[:-1]:
        ta, tb = ta[..., None], tb[..., None]
    ra, rb = ta.reshape(-1, ta.shape[-1]), tb.reshape(-1, tb.shape[-1])
    rows = (ra != rb).any(-1).nonzero().flatten().tolist()
    if all(torch.equal(ra[r].sort().values, rb[r].sort().values) for r in rows):
        text = f"the same set in another slot order ({len(rows)} of {len(ra)} rows): sort order or tie rule differs"
        return Cause("slot_order", text, 0.0, {"rows": len(rows)})
    r = next((i for i in rows if set(ra[i].tolist()) != set(rb[i].tolist())), None)
    if r is None:  # one set, but not each as often
        return None
    only_a, only_b = sorted(set(ra[r].tolist()) - set(rb[r].tolist())), sorted(set(rb[r].tolist()) - set(ra[r].tolist()))
    sets = f"{{{','.join(map(str, only_a))}}} vs {{{','.join(map(str, only_b))}}}"
    if z is None or not z.is_floating_point() or z.shape[:-1].numel() != len(ra):
        return None
    row = z.reshape(-1, z.shape[-1])[r].double()
    if not only_a or not only_b or max(only_a + only_b) >= row.numel() or min(only_a + only_b) < 0:
        return None
    margin = abs(float(row[only_a].min()) - float(row[only_b].max()))
    evidence = {"row": r, "a": only_a, "b": only_b, "margin": margin}
    if margin == 0:
        return Cause("tie", f"tie flip: {sets} have exactly equal scores at row {r}", 0.0, evidence)
    top = max(abs(float(row[i])) for i in only_a + only_b)
    winners = (only_a, only_b) if float(row[only_a].min()) < float(row[only_b].max()) else (only_b, only_a)
    for name, rounded in rounding_modes(z.reshape(-1, z.shape[-1])[r].float()).items():
        # Rounding explains the flip if it makes the wrong choice (the smaller score) at least as good as the right one.
        if "8" in name or float(rounded[winners[0]].min()) < float(rounded[winners[1]].max()):
            continue
        mantissa = 7 if "bfloat" in name else 10
        spacing = 2.0 ** (math.floor(math.log2(top)) - mantissa) if top > 0 else 0.0
        text = (f"selection {sets} at row {r}: margin {margin:.2g} < {name} spacing {spacing:.3g}; rounded to {name} the "
                "scores tie or change order: one side selects from rounded scores")  # fmt: skip
        return Cause("rounded_selection", text, 0.0, {**evidence, "format": name, "spacing": spacing})
    return None


def argmax(a: Any, b: Any) -> list[Cause]:
    """Logits [..., V] of two sides: rows whose greedy token flipped although the top-2 margin is exactly zero."""
    ta, tb = as_tensor(a, "a").cpu().double(), as_tensor(b, "b").cpu().double()
    if ta.shape != tb.shape or ta.ndim == 0 or ta.shape[-1] < 2:
        return []
    flipped = (ta.argmax(-1) != tb.argmax(-1)).reshape(-1).nonzero().flatten().tolist()
    for r in flipped:
        for side, t in (("a", ta), ("b", tb)):
            top = t.reshape(-1, t.shape[-1])[r].topk(2)
            if float(top.values[0] - top.values[1]) == 0:
                text = f"tie flip: the two largest logits of side {side} are exactly equal at row {r}"
                return [Cause("tie", text, 0.0, {"row": r, "side": side, "ids": top.indices.tolist()})]
    return []


def nonfinite(tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Cause | None:
    """Where a NaN or an infinity starts, in tensors given in the order in which they were computed."""
    items = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    finite: list[str] = []
    for name, value in items:
        t = as_tensor(value, name).cpu()
        if not t.is_floating_point() and not t.is_complex():
            continue
        bad = ~t.float().isfinite() if t.dtype.itemsize == 1 else ~t.isfinite()
        if not bool(bad.any()):
            finite.append(name)
            continue
        if t.ndim >= 2:
            rows = bad.reshape(bad.shape[0], -1).any(-1).nonzero().flatten().tolist()
            where = f"rows {_ranges(rows)} of {t.shape[0]}"
        else:
            rows = bad.reshape(-1).nonzero().flatten().tolist()
            where = f"elements {_ranges(rows)} of {t.numel()}"
        kind = "NaN" if bool(t.isnan().any()) else "infinity"
        before = f"; everything before it is finite (last: {finite[-1]})" if finite else ""
        text = f"{kind} starts at {name}, {where}{before}"
        return Cause("nan_origin", text, 0.0, {"tensor": name, "rows": rows[:64], "count": int(bad.sum())})
    return None


def _ranges(rows: list[int]) -> str:
    out: list[list[int]] = []
    for r in rows:
        if out and r == out[-1][1] + 1:
            out[-1][1] = r
        else:
            out.append([r, r])
    text = [str(x) if x == y else f"{x}-{y}" for x, y in out[:6]]
    return ",".join(text) + (",..." if len(out) > 6 else "")
