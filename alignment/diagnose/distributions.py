"""Causes of differing log-probabilities: the temperature, the kept set, the normaliser, a lag."""
from __future__ import annotations

import math
from typing import Any

import torch

from alignment.diagnose.blocks import moved_blocks
from alignment.diagnose.kept import kept_set
from alignment.diagnose.modules import nonfinite
from alignment.diagnose.numbers import elementwise, eps, narrowed, rounded_through, rounding
from alignment.diagnose.ranges import limited, summed
from alignment.diagnose.structure import lag
from alignment.diagnose.vectors import decimals, zero_part
from alignment.sources import as_tensor
from alignment.verdict import Cause


def logprobs(
    a: Any, b: Any, *, logits: Any = None, tokens: Any = None, temperature: float | None = None,
    top_p: float | None = None, top_k: int | None = None,
) -> list[Cause]:
    """Likely causes of two differing arrays of log-probs.

    ``a`` and ``b`` [..., V] are whole distributions, or [T] (or [B, T]) the values of ``tokens`` drawn from
    ``logits`` [..., V]. Without logits a temperature can only be fitted to whole distributions. ``temperature``,
    ``top_p`` and ``top_k`` are the sampling parameters in effect, to tell a truncated softmax at one token a position.
    """
    ta, tb = narrowed(as_tensor(a, "a").cpu(), as_tensor(b, "b").cpu())
    if ta.shape != tb.shape or ta.numel() == 0 or not ta.is_floating_point() or not tb.is_floating_point():
        return []
    tol = 40 * eps(ta, tb) * (1 + float(_finite(ta).abs().max()) if _finite(ta).numel() else 1)
    found: list[Cause | None] = []
    finite = bool(ta.isfinite().all() and tb.isfinite().all())
    if finite:  # exact, so before everything that fits
        found += [rounded_through(ta, tb), decimals(ta, tb)]
    if ta.dtype != tb.dtype:
        return [c for c in found if c is not None]
    if logits is not None:
        z = as_tensor(logits, "logits").cpu()
        found.append(_from_logits(ta, tb, z, tokens, tol))
        if (tokens is not None and (top_p or 1) < 1) or (top_k or 0) > 0:
            found.append(_cut_logits(ta, tb, z.double() / (temperature or 1), tokens, top_p or 1, top_k or 0, tol))
    found += [_temperature(ta, tb, tol), _kept_mass(ta, tb, tol)]
    if finite:
        turned = moved_blocks(ta, tb)
        found += [lag(ta, tb), turned if turned is not None and turned.kind == "reversed" else None, limited(ta, tb), summed(ta, tb),
                  elementwise(ta, tb), zero_part(ta, tb), rounding(ta, tb)]
    elif bool(ta.isnan().any() or tb.isnan().any()):
        found.append(nonfinite([("side a", ta), ("side b", tb)]))
    first = next((c for c in found if c is not None), None)
    return [] if first is None else [first]


def distribution(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    """Two tensors of any name whose rows are whole distributions, as log-probabilities or probabilities: another temperature,
    or another set under the softmax."""
    if a.shape != b.shape or not a.ndim or a.shape[-1] < 3 or not a.is_floating_point() or not b.is_floating_point():
        return None
    tol = 40 * eps(a, b) * (1 + float(_finite(a).abs().max())) if _finite(a).numel() else 1.0
    for x, y in ((a, b), (a.double().log(), b.double().log()) if bool((a > 0).all() and (b > 0).all()) else (a, b)):
        if _normalised(_rows(x), tol) and _normalised(_rows(y), tol):
            return _temperature(x, y, tol) or _kept_mass(x, y, tol)
    return None


def _finite(t: torch.Tensor) -> torch.Tensor:
    return t[t.isfinite()]


def _rows(t: torch.Tensor) -> torch.Tensor:
    return t.double().reshape(-1, t.shape[-1]) if t.ndim else t.double().reshape(1, 1)


def _normalised(rows: torch.Tensor, tol: float) -> bool:
    """Each row sums to one. Values of single tokens nearly do so by accident in a narrow format: never more than 2 %."""
    return bool((rows.logsumexp(-1).abs() <= min(max(tol, 1e-9), 0.02)).all())


def _temperature(a: torch.Tensor, b: torch.Tensor, tol: float) -> Cause | None:
    """Both sides whole distributions over one vocabulary: log b is proportional to log a."""
    x, y = _rows(a), _rows(b)
    if x.shape[-1] < 3 or not bool(x.isfinite().all() and y.isfinite().all()):
        return None
    if not (_normalised(x, tol) and _normalised(y, tol)):
        return None
    xc, yc = x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True)
    slope = float((xc * yc).sum() / (xc * xc).sum()) if float((xc * xc).sum()) > 0 else 0.0
    if slope <= 0 or abs(slope - 1) < 1e-4:
        return None
    rest = float((torch.log_softmax(slope * x, -1) - y).abs().max())
    if 4 * rest > float((x - y).abs().max()):  # it must explain the difference, not only be near
        return None
    return _fit(1 / slope, rest, "side a", tol)


def _fit(temperature: float, rest: float, against: str, tol: float) -> Cause | None:
    if rest > tol:
        return None
    text = (f"logprob mode: best-fit T {temperature:.6g}, residual {rest:.1g}: side b is {against} at temperature "
            f"{temperature:.6g}; one side is raw, the other scaled")  # fmt: skip
    return Cause("temperature", text, rest, {"temperature": temperature})


def _from_logits(a: torch.Tensor, b: torch.Tensor, logits: torch.Tensor, tokens: Any, tol: float) -> Cause | None:
    """Fit a temperature to each side from the logits the tokens were drawn from."""
    z = logits.double()
    if tokens is not None:
        ids = as_tensor(tokens, "tokens").cpu().long()
        if z.ndim == 1:
            z = z.expand(*ids.shape, -1)
        if z.shape[:-1] != ids.shape or ids.shape != a.shape or not ids.numel() or int(ids.min()) < 0 or int(ids.max()) >= z.shape[-1]:
            return None
    elif z.shape != a.shape:
        return None

    def at(t: float) -> torch.Tensor:
        lp = torch.log_softmax(z / t, -1)
        return lp if tokens is None else lp.gather(-1, ids[..., None])[..., 0]

    fits = [_search(at, side.double()) for side in (a, b)]
    for one, other, side in ((0, b, "b"), (1, a, "a")):  # one side is understood: is the other capped, or padded
        if fits[one][1] <= tol < fits[1 - one][1]:
            known = (a, b)[one].double()
            scaled = z / fits[one][0]
            return _capped(scaled, other.double(), ids if tokens is not None else None, side, tol) or (
                _misread(scaled, other.double(), ids, side, tol) or _pad_rows(scaled, known, other.double(), ids, side, tol) or kept_set(scaled, known, other.double(), ids, side, tol)
                if tokens is not None else None)
    if any(rest > tol for _, rest in fits) or abs(math.log(fits[0][0] / fits[1][0])) < 1e-4:
        return None
    (t_a, rest_a), (t_b, rest_b) = fits
    rest = max(rest_a, rest_b)
    scaled = t_b if abs(math.log(t_b)) >= abs(math.log(t_a)) else t_a
    text = (f"logprob mode: best-fit T {scaled:.6g}, residual {rest:.1g}: side a is at temperature {t_a:.6g}, "
            f"side b at {t_b:.6g}")  # fmt: skip
    return Cause("temperature", text, rest, {"temperature": scaled, "a": t_a, "b": t_b})


def _capped(z: torch.Tensor, other: torch.Tensor, ids: torch.Tensor | None, side: str, tol: float) -> Cause | None:
    for cap in (30.0, 50.0, 20.0, 15.0, 10.0, 25.0, 100.0):
        lp = torch.log_softmax(cap * torch.tanh(z / cap), -1)
        rest = float(((lp if ids is None else lp.gather(-1, ids[..., None])[..., 0]) - other).abs().max())
        if rest <= tol:
            text = f"softcap: side {side} is the softmax of {cap:g} * tanh(logits / {cap:g}), the other of the logits"
            return Cause("softcap", text, rest, {"cap": cap, "side": side})
    return None


def _misread(z: torch.Tensor, other: torch.Tensor, ids: torch.Tensor, side: str, tol: float) -> Cause | None:
    """Another number read off the right logits: not normalised, of another token or row, or summed over one rank's part of the vocabulary."""
    lp = torch.log_softmax(z, -1)

    def of(t: torch.Tensor) -> torch.Tensor:
        return t.gather(-1, ids[..., None])[..., 0]

    read: list[tuple[str, str, torch.Tensor]] = [
        ("unnormalised", "holds the logits of the tokens, not their log-probabilities", of(z)),
        ("greedy", "holds the log-probabilities of the likeliest tokens, not of those that were drawn", lp.amax(-1)),
        ("entropy", "holds the entropy of each position, not the log-probability of its token", -(lp.exp() * lp).sum(-1)),
    ]
    for ranks in (r for r in (2, 4, 8, 16) if z.shape[-1] % r == 0 and z.shape[-1] > r):
        parts = z.reshape(*z.shape[:-1], ranks, -1).logsumexp(-1)
        own = parts.gather(-1, (ids // (z.shape[-1] // ranks))[..., None])[..., 0]
        read.append(("vocabulary_shard", f"is normalised over one of {ranks} parts of the vocabulary, the one that holds the token: "
                     "not summed over the tensor-parallel ranks", of(z) - own))  # fmt: skip
    for kind, text, values in read:
        rest = float((values - other).abs().max())
        if rest <= tol:
            return Cause(kind, f"side {side} {text}", rest, {"side": side})
    if ids.ndim == 1 and len(ids) > 3:  # the outermost has no neighbour
        for by in (1, -1):
            rest = float((of(lp.roll(-by, 0)) - other)[slice(None, -1) if by == 1 else slice(1, None)].abs().max())
            if rest <= tol:
                text = f"side {side} reads each token off the logits of the {'next' if by == 1 else 'previous'} position: off by 1 position(s)"
                return Cause("shift", text, rest, {"shift": by, "side": side})
    return None


def _pad_rows(z: torch.Tensor, known: torch.Tensor, other: torch.Tensor, ids: torch.Tensor, side: str, tol: float) -> Cause | None:
    """The normaliser of one side has the same number of further rows with logit 0 at every position."""
    total = z.logsumexp(-1).exp()
    extra = (z.gather(-1, ids[..., None])[..., 0] - other).exp() - total
    count = round(float((extra / total).sum() / (1 / total).sum())) if extra.numel() > 2 else 0
    if count < 1:
        return None
    rest = float((known - ((total + count) / total).log() - other).abs().max())
    if rest > 4 * tol:
        return None
    text = f"padded vocabulary: {count} row(s) with logit 0 more in the normaliser of side {side}"
    return Cause("padded_vocabulary", text, rest, {"padding": count, "side": side})


def _cut_logits(
    a: torch.Tensor, b: torch.Tensor, z: torch.Tensor, tokens: Any, top_p: float, top_k: int, tol: float
) -> Cause | None:
    """One side is the softmax over the whole vocabulary, the other over what top-k and then top-p keep."""
    ids = as_tensor(tokens, "tokens").cpu().long()
    if z.shape[:-1] != ids.shape or ids.shape != a.shape:
        return None
    order = z.sort(dim=-1, descending=True, stable=True)
    if 0 < top_k < z.shape[-1]:
        order.values[..., top_k:] = -math.inf
    p = order.values.softmax(-1)
    order.values[(p.cumsum(-1) - p) >= top_p] = -math.inf
    cut = torch.empty_like(z).scatter(-1, order.indices, order.values)
    full, kept = (torch.log_softmax(x, -1).gather(-1, ids[..., None])[..., 0] for x in (z, cut))
    if float((full - kept).abs().max()) <= 4 * tol:
        return None
    for whole, part, side in ((a, b, "b"), (b, a, "a")):
        rest = max(float((full - whole.double()).abs().max()), float((kept - part.double()).abs().max()))
        if rest <= tol:
            mass = (full - kept).flatten()
            text = (f"constant offset per position = log of kept mass ({float(mass[0]):.6g} in the first): side {side} is "
                    f"renormalised over what top-k {top_k or 'off'} and top-p {top_p:g} keep, the other is not")  # fmt: skip
            return Cause("truncated_softmax", text, rest, {"log_kept_mass": mass[:64].tolist(), "side": side})
    return None


def _search(at: Any, target: torch.Tensor) -> tuple[float, float]:
    """(T, residual) minimising the squared error: a grid, then golden sections around its best point."""
    def cost(u: float) -> float:
        return float(((at(math.exp(u)) - target) ** 2).sum())

    grid = [math.log(0.05) + i * math.log(400) / 80 for i in range(81)]
    best = min(range(81), key=lambda i: cost(grid[i]))
    lo, hi = grid[max(best - 1, 0)], grid[min(best + 1, 80)]
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(80):
        m1, m2 = hi - ratio * (hi - lo), lo + ratio * (hi - lo)
        lo, hi = (lo, m2) if cost(m1) < cost(m2) else (m1, hi)
    t = math.exp((lo + hi) / 2)
    t = round(t, 6) if abs(t - round(t, 6)) < 1e-6 else t
    return t, float((at(t) - target).abs().max())


def _kept_mass(a: torch.Tensor, b: torch.Tensor, tol: float) -> Cause | None:
    """Each row differs by one constant over its kept tokens: another set under the softmax."""
    x, y = _rows(a), _rows(b)
    if x.shape[-1] < 2:
        return None
    offsets, masses, rest = [], [], 0.0
    for u, v in zip(x, y, strict=True):
        kept = u.isfinite() & v.isfinite()
        if int(kept.sum()) < 2:
            return None
        d = (v - u)[kept]
        offset = float(d.mean())
        rest = max(rest, float((d - offset).abs().max()))
        mass = [float(u[kept].logsumexp(-1)), float(v[kept].logsumexp(-1))]
        offsets.append(offset)
        masses.append(mass)
    largest = max(offsets, key=abs)
    if rest > tol or abs(largest) <= 4 * tol:
        return None
    # The truncated side sums to one over the kept tokens; the other side's mass there is the constant.
    for full, cut, side in ((0, 1, "b"), (1, 0, "a")):
        if all(abs(m[cut]) <= tol and m[full] < -tol for m in masses):
            text = (f"constant offset per position = log of kept mass ({masses[0][full]:.6g} in the first): side {side} "
                    "is renormalised over a truncated set (top-p/top-k), the other over the whole vocabulary")  # fmt: skip
            return Cause("truncated_softmax", text, rest, {"log_kept_mass": [m[full] for m in masses], "side": side})
    if x.shape[0] == 1 and x.shape[-1] < 3:
        return None
    text = (f"constant offset per position ({offsets[0]:.6g} in the first): the softmax of the two sides runs over "
            "different sets (truncated on one side, or padded vocabulary rows in the normaliser)")  # fmt: skip
    return Cause("constant_offset", text, rest, {"offset": offsets[0], "positions": len(offsets)})
