"""Which entries of the vocabulary one side normalises over, read off the log-probs of single tokens and the logits."""
from __future__ import annotations

import torch

from alignment.verdict import Cause

#: Entries that are sorted.
_LARGEST = 1 << 24


def kept_set(z: torch.Tensor, full: torch.Tensor, other: torch.Tensor, ids: torch.Tensor, side: str, tol: float) -> Cause | None:
    """``full`` [...] are the log-probs of ``ids`` under all of ``z`` [..., V], ``other`` those of ``side``: over the first entries of the
    vocabulary (truncated), over the same number of the largest (top-k), or over the largest up to one same mass (top-p)."""
    rows, tokens = z.reshape(-1, z.shape[-1]).double(), ids.reshape(-1)
    mass = (full.double() - other).exp().reshape(-1)
    if rows.shape[0] < 2 or rows.numel() > _LARGEST or not bool((mass > 0).all()) or not bool((mass <= 1 + tol).all()):
        return None
    p = rows.softmax(-1)
    head = p.cumsum(-1)
    order = p.sort(dim=-1, descending=True, stable=True)
    top = order.values.cumsum(-1)
    rank = (order.indices == tokens[:, None]).int().argmax(-1)
    slack = 2 * tol * mass
    for total, least, kind in ((top, rank, "k"), (head, tokens, "vocabulary")):
        low, high = _counts(total, mass, slack)
        low = torch.maximum(low, least + 1)
        n = int(low.max())
        if n > int(high.min()) or n >= rows.shape[-1] or _sharp(total, low, slack) < 2:
            continue
        if kind == "k":
            text = f"constant offset per position = log of kept mass: side {side} is renormalised over the {n} largest logits (top-k {n})"
            return Cause("truncated_softmax", text, 0.0, {"top_k": n, "side": side, "log_kept_mass": mass.log()[:64].tolist()})
        text = f"truncated vocabulary: side {side} is the softmax over the first {n} of {rows.shape[-1]} entries"
        return Cause("truncated_vocabulary", text, 0.0, {"kept": n, "of": rows.shape[-1], "side": side})
    low, high = _counts(top, mass, slack)
    if bool((torch.maximum(low, rank + 1) > high).any()) or _sharp(top, low, slack) < 2:
        return None
    below = torch.where(low > 1, top.gather(-1, (low - 2).clamp_min(0)[:, None])[:, 0], torch.zeros_like(mass))
    first, last = float(below.max()), float(top.gather(-1, (high - 1)[:, None])[:, 0].min())
    if first > last:
        return None
    text = (f"constant offset per position = log of kept mass: side {side} is renormalised over the largest logits up to a mass of "
            f"{first:.4g} to {last:.4g} (top-p)")  # fmt: skip
    return Cause("truncated_softmax", text, 0.0, {"top_p": [first, last], "side": side, "log_kept_mass": mass.log()[:64].tolist()})


def _counts(total: torch.Tensor, mass: torch.Tensor, slack: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row the least and the largest number of entries whose sum is the mass; the least is above the largest where none is."""
    low = torch.searchsorted(total.contiguous(), (mass - slack)[:, None])[:, 0] + 1
    high = torch.searchsorted(total.contiguous(), (mass + slack)[:, None], right=True)[:, 0]
    return low, high


def _sharp(total: torch.Tensor, count: torch.Tensor, slack: torch.Tensor) -> int:
    """Rows in which one entry more would show: in the tail of a large vocabulary any mass fits."""
    last = (count - 1).clamp(0, total.shape[-1] - 1)
    step = total.gather(-1, last[:, None])[:, 0] - torch.where(last > 0, total.gather(-1, (last - 1).clamp_min(0)[:, None])[:, 0], torch.zeros_like(slack))
    return int(((step > 8 * slack) & (count < total.shape[-1])).sum())
