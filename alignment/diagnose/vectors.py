"""Causes that act on whole columns, or on all numbers alike: a bias or a norm's weight on one side, a merged adapter, a normalised
advantage, text with few decimals, values that were never computed."""
from __future__ import annotations

from collections.abc import Sequence

import torch

from alignment.diagnose.numbers import eps, same_bits, varied
from alignment.digest import digest
from alignment.verdict import Cause

#: The shorter side of a matrix whose difference is looked at for its rank: beyond it that takes seconds.
_RANKED = 1024


def _numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.is_floating_point() and a.dtype.itemsize > 1 and varied(a)


def along_columns(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    """Each column of ``b`` [..., N] is that of ``a`` plus, or times, a number of its own; three rows at least."""
    if not _numbers(a, b) or a.ndim < 2 or a.shape[-1] < 2 or a.numel() < 3 * a.shape[-1]:
        return None
    x, y = (t.double().reshape(-1, t.shape[-1]) for t in (a, b))
    top = torch.maximum(x.abs(), y.abs()).amax(0)
    tol = 8 * eps(a, b)
    added = (y - x).median(0).values
    if bool(((y - x - added).abs() <= tol * top).all()) and float((added.abs() / top.clamp_min(1e-300)).max()) > 16 * tol and not _one(added):
        used = int((added.abs() > 16 * tol * top).sum())
        text = f"in every row side b is side a plus the same vector ({used} of {added.numel()} columns): a bias is added on one side only, or is another one"
        return Cause("bias", text, float((y - x - added).abs().max()), {"columns": used})
    norm = (x * x).sum(0)
    if not bool((norm > 0).all()) or not bool((x.amax(0) > x.amin(0)).all()):
        return None
    factor = (x * y).sum(0) / norm
    rest = (y - factor * x).abs() / (factor.abs().clamp_min(1e-300) * (x.abs() + tol * x.abs().amax(0)))
    if float(rest.max()) > tol or float((factor - 1).abs().max()) <= 16 * tol or _one(factor):
        return None
    empty = (factor == 0).nonzero().flatten().tolist()
    if empty and bool(((factor == 0) | (factor == 1)).all()):
        text = f"{len(empty)} column(s) of side b are zero, the first is column {empty[0]}: never written"
        return Cause("zero_rows", text, 0.0, {"columns": empty[:64]})
    text = (f"in every row side b is side a times the same vector ({float(factor.min()):.6g} to {float(factor.max()):.6g}): a weight of a norm, or a scale "
            "of each column, is applied on one side only or is another one")  # fmt: skip
    return Cause("column_scale", text, float(rest.max()), {"factor": [float(factor.min()), float(factor.max())]})


def _one(values: torch.Tensor) -> bool:
    """Of one number: told better by a cause for all elements."""
    return bool((values - values[0]).abs().max() <= 1e-6 * values.abs().max())


def norm_weight(a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor) -> Cause | None:
    """Norm outputs [..., H] of one input: weighted by ``w`` [H] on one side and by ``1 + w`` on the other."""
    if not _numbers(a, b) or weight.shape != a.shape[-1:] or not weight.is_floating_point():
        return None
    w = weight.double()
    for x, y, side in ((a, b, "b"), (b, a, "a")):
        left, right = x.double() * w, y.double() * (1 + w)  # x has 1 + w, y has w
        size = torch.maximum(left.abs(), right.abs())
        if bool(((left - right).abs() <= 16 * eps(a, b) * size).all()) and bool(size.any()):
            text = f"the weight of the norm is w on side {side} and 1 + w on the other (as Gemma keeps it)"
            return Cause("norm_weight", text, None, {"side": side})
    return None


def low_rank(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    """The difference of two weights [N, K] has a small rank: that of an adapter which is merged on one side only, or twice."""
    if not _numbers(a, b) or a.ndim != 2 or not 16 <= min(a.shape) <= _RANKED:
        return None
    d = b.double() - a.double()
    values = torch.linalg.svdvals(d)
    noise = 4 * eps(a, b) * float(torch.maximum(a.double().abs(), b.double().abs()).max()) * max(a.shape) ** 0.5
    rank = int((values > noise).sum())
    if not 1 <= rank <= min(a.shape) // 4 or float(values[rank - 1]) < 4 * noise or int((d != 0).any(1).sum()) <= 2 * rank or int((d != 0).any(0).sum()) <= 2 * rank:
        return None
    text = f"the difference has rank {rank} of {min(a.shape)}: an adapter (LoRA) of that rank is merged on one side only, twice, or at another scale"
    return Cause("low_rank", text, float(values[rank]) if rank < len(values) else 0.0, {"rank": rank})


def affine(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    """``b`` is a factor times ``a`` plus a constant, such as advantages that were normalised on one side only."""
    if not _numbers(a, b) or a.numel() < 8:
        return None
    for x, y, side in ((a.double().flatten(), b.double().flatten(), "b"), (b.double().flatten(), a.double().flatten(), "a")):
        xc, yc = x - x.mean(), y - y.mean()
        if float((xc * xc).sum()) == 0 or float(yc.std()) == 0:
            return None
        slope = float((xc * yc).sum() / (xc * xc).sum())
        offset = float(y.mean() - slope * x.mean())
        top = float(torch.maximum((slope * x).abs(), y.abs()).max()) + abs(offset)
        rest = float((slope * x + offset - y).abs().max())
        if float((x - y).abs().max()) <= 64 * eps(a, b) * top:
            return None  # a rounding is one, not a factor
        if rest > 8 * eps(a, b) * top or abs(slope) < 1e-9:
            return None
        if side == "b" and abs(float(y.mean())) > 1e-4 * float(y.std()) and abs(float(x.mean())) <= 1e-4 * float(x.std()):
            continue  # side a is the normalised one
        spread = next((n for n, s in (("standard deviation", x.std()), ("standard deviation over all", x.std(correction=0))) if abs(slope * float(s) - 1) < 1e-4), None)
        centred = abs(float(y.mean())) <= 1e-4 * float(y.std())
        text = (f"side {side} is the other side normalised: less its mean, divided by its {spread}" if centred and spread else
                f"side {side} is {slope:.6g} times the other side plus {offset:.6g}, in every element")  # fmt: skip
        return Cause("affine", text, rest, {"factor": slope, "offset": offset, "side": side})
    return None


def decimals(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    """One side went through text with a few decimals."""
    if not _numbers(a, b) or a.dtype not in (torch.float32, torch.float64):
        return None
    for x, y, side in ((a, b, "b"), (b, a, "a")):
        for n in range(1, 8):
            steps = y.double() * 10**n
            told = (y.double() * 10 ** (n - 1)) % 1  # of the last decimal; and more must be gone than a rounding of the format takes
            lost, top = (x.double() - y.double()).abs(), float(x.abs().max())
            if top >= 1e6 or not bool((told > 1e-6).any()) or float(lost.max()) <= 16 * eps(a, b) * top:
                continue
            if torch.equal((steps.round() / 10**n).to(y.dtype), y) and float(lost.max()) <= 0.5 / 10**n + 4 * eps(a, b) * top:
                return Cause("rounded", f"side {side} is the other side rounded to {n} decimals: it went through text", 0.0, {"decimals": n, "side": side})
    return None


def zero_part(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    """One side is zero at some places and equal to the other at all others."""
    if not _numbers(a, b):
        return None
    for x, y, side in ((a, b, "b"), (b, a, "a")):
        wrong = x != y
        count = int(wrong.sum())
        if count and count < wrong.numel() and bool((y[wrong] == 0).all()) and bool((x[~wrong] != 0).any()):
            first = [int(i) for i in wrong.nonzero()[0]]
            text = f"side {side} is 0 at {count} of {wrong.numel()} places, the first at {first}, and equal everywhere else: masked or never computed there"
            return Cause("zero", text, 0.0, {"side": side, "count": count})
    return None


def exchanged_rows(rows: Sequence[tuple[torch.Tensor, torch.Tensor]], names: Sequence[str], what: str) -> list[Cause]:
    """Values of requests, each (a, b): every row that differs has, bit by bit, the values of another row of side a."""
    bad = [i for i, (x, y) in enumerate(rows) if not (x.shape == y.shape and same_bits(x, y))]
    if not bad or any(x.numel() < 2 or y.numel() < 2 for i in bad for x, y in (rows[i],)):
        return []
    at: dict[str, list[int]] = {}
    for i, (x, _) in enumerate(rows):
        at.setdefault(digest(x.contiguous()), []).append(i)
    found = {i: [j for j in at.get(digest(rows[i][1].contiguous()), []) if j != i] for i in bad}
    if any(len(j) != 1 for j in found.values()):
        return []
    shown = ", ".join(f"{names[i]}←{names[j[0]]}" for i, j in list(found.items())[:8])
    text = f"the values of a {what} are those of another one ({shown}{' ...' if len(found) > 8 else ''}): matched by order of arrival"
    return [Cause("request_swap", text, 0.0, {"source": {names[i]: names[j[0]] for i, j in list(found.items())[:64]}})]
