"""Causes with a known input: another activation, gate and up exchanged, a residual that was left out or added twice."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from alignment.diagnose.numbers import eps
from alignment.sources import as_tensor
from alignment.verdict import Cause

_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SiLU": F.silu, "GELU (erf)": F.gelu, "GELU (tanh)": lambda x: F.gelu(x, approximate="tanh"), "ReLU": F.relu,
    "quick GELU": lambda x: x * torch.sigmoid(1.702 * x), "squared ReLU": lambda x: F.relu(x) ** 2, "sigmoid": torch.sigmoid,
    "tanh": torch.tanh, "identity": lambda x: x, "softplus": F.softplus,
}  # fmt: skip


def activation(x: Any, a: Any, b: Any) -> Cause | None:
    """Outputs ``a``, ``b`` of an activation with the same input ``x`` of their shape, or of twice their width (gate and up)."""
    tx, ta, tb = (as_tensor(v, "x").cpu() for v in (x, a, b))
    if ta.shape != tb.shape or not tx.ndim or not ta.ndim or not tx.is_floating_point():
        return None
    wide = tx.double()
    outs: dict[str, torch.Tensor] = {}
    if tx.shape == ta.shape:
        outs = {n: f(wide) for n, f in _PLAIN.items()}
    elif tx.shape[:-1] == ta.shape[:-1] and tx.shape[-1] == 2 * ta.shape[-1]:
        for layout, (gate, up) in (("halves", wide.chunk(2, -1)), ("interleaved", (wide[..., ::2], wide[..., 1::2]))):
            outs |= {f"{n}(first) * second, {layout}": f(gate) * up for n, f in _PLAIN.items() if n != "identity"}
            outs |= {f"first * {n}(second), {layout}": gate * f(up) for n, f in _PLAIN.items() if n != "identity"}
    fits: list[set[str]] = []
    for t in (ta, tb):
        tol = 16 * max(eps(t), 6e-8)
        fits.append({n for n, o in outs.items() if bool(((o - t.double()).abs() <= tol * (o.abs() + 0.1 * o.abs().max())).all())})
    if not fits[0] or not fits[1] or fits[0] & fits[1]:  # what fits both sides explains no difference
        return None
    one, other = (" or ".join(sorted(f)) for f in fits)
    return Cause("activation", f"activation: {one} on side a, {other} on side b, of the same input", 0.0, {"a": one, "b": other})


def residual(x: Any, a: Any, b: Any, name: str) -> Cause | None:
    """``b - a`` is ``x`` (equal on both sides), or minus ``x``, within the rounding of the sum."""
    tx, ta, tb = (as_tensor(v, "x").cpu() for v in (x, a, b))
    if not (tx.shape == ta.shape == tb.shape) or not tx.is_floating_point() or tx.numel() < 4 or not bool(tx.any()):
        return None
    d, wide = tb.double() - ta.double(), tx.double()
    tol = 4 * eps(ta, tb) * (ta.double().abs() + tb.double().abs() + wide.abs())
    for sign, text in ((1, "has {} added once more than side a"), (-1, "lacks {}, which side a adds")):
        if bool(((d - sign * wide).abs() <= tol).all()) and float(wide.abs().max()) > 64 * float(tol.max()):
            return Cause("residual", "side b " + text.format(name) + " (a residual or shared part left out, or added twice)", None,
                         {"tensor": name, "sign": sign})  # fmt: skip
    return None
