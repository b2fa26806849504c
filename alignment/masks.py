"""Which places count: masks of two sides, and how many places one leaves out. What is left out is told, never silent."""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from alignment.sources import as_tensor
from alignment.verdict import Coverage, Place, Status, Verdict

if TYPE_CHECKING:
    from alignment.match import Pair


def masked_out(count: int, total: int) -> str:
    """How many places a mask left out, or ""."""
    return f"{count} of {total} places are masked" if count else ""


def left_out(a: str, b: str) -> dict[str, Any]:
    """For ``Verdict.info``: what was left out on each side; {} where nothing was."""
    return {"left_out": {side: text for side, text in (("a", a), ("b", b)) if text}} if a or b else {}


def count(mask: Any) -> str:
    """How many places this mask leaves out, or ""."""
    if mask is None:
        return ""
    keep = as_tensor(mask, "mask").bool()
    return masked_out(keep.numel() - int(keep.sum()), keep.numel())


def tell(verdict: Verdict, out: dict[str, Any]) -> None:
    """What was left out (:func:`left_out`), in the info of a verdict, and in its reason where it is green."""
    told = out.get("left_out", {})
    if told:
        verdict.info["left_out"] = told
        if verdict.green:
            verdict.reason = "left out: " + (next(iter(told.values())) if len(set(told.values())) == 1 and len(told) == 2
                                             else ", ".join(f"{text} (side {side})" for side, text in told.items()))


def of_one_array(tokens_a: Any, tokens_b: Any, mask_a: Any, mask_b: Any, name: str) -> Verdict | None:
    """The verdict on two masks of one and the same array of tokens, [T] or [B, T], which is not padded in two ways: its masks have to be
    equal place by place (kept tokens that repeat would meet those of other places). None where they are, or the arrays are not one."""
    held = (torch.Tensor, list, tuple, np.ndarray)
    if mask_a is None or mask_b is None or not isinstance(tokens_a, held) or not isinstance(tokens_b, held):
        return None
    x, y, p, q = (as_tensor(v, "tokens").cpu() for v in (tokens_a, tokens_b, mask_a, mask_b))
    if x.shape != y.shape or p.shape != x.shape or q.shape != y.shape or not torch.equal(x, y) or torch.equal(p.bool(), q.bool()):
        return None
    at = tuple((p.bool() != q.bool()).nonzero()[0].tolist())
    place = Place(tensor="mask", row=at[0] if len(at) > 1 else None, position=at[-1], token=int(x[at]), index=at)
    return Verdict(f"{name}.mask", Status.FAIL, f"the masks of one array of tokens differ at {list(at)}: the token counts on side {'a' if p.bool()[at] else 'b'} only",
                   coverage={"masks": Coverage(1, 1)}, first_bad=place)  # fmt: skip


def differ(pairs: Iterable[Pair], name: str) -> Verdict | None:
    """The verdict on two masks that do not say the same; None where they do, or there are none."""
    for pair in pairs:
        masks = [row.mask for row in (pair.a, pair.b)]
        for mask, row, side in zip(masks, (pair.a, pair.b), "ab", strict=True):
            if mask is not None and len(mask) != len(row.tokens):
                return Verdict(f"{name}.mask", Status.INVALID, f"request {row.request} on side {side}: a mask of {len(mask)} for {len(row.tokens)} tokens",
                               coverage={"masks": Coverage(0, 1)}, first_bad=Place(request=row.request, tensor="mask"))  # fmt: skip
        if masks[0] is None and masks[1] is None:
            continue
        if masks[0] is None or masks[1] is None:
            return Verdict(f"{name}.mask", Status.INVALID, f"request {pair.a.request} has a mask on side {'b' if masks[0] is None else 'a'} only",
                           coverage={"masks": Coverage(0, 1)}, first_bad=Place(request=pair.a.request, tensor="mask"))  # fmt: skip
        theirs = masks[1] if pair.order_b is None else tuple(masks[1][i] for i in pair.order_b)
        i = next((i for i, (x, y) in enumerate(zip(masks[0], theirs, strict=True)) if x != y), None)
        if i is not None:
            place = Place(request=pair.a.request, tensor="mask", position=pair.a.position(i), token=pair.a.tokens[i], index=(i,))
            return Verdict(f"{name}.mask", Status.FAIL, f"the masks of request {pair.a.request} differ at index {i}: the token counts on side "
                           f"{'a' if masks[0][i] else 'b'} only", coverage={"masks": Coverage(1, 1)}, first_bad=place)  # fmt: skip
    return None
