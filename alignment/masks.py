"""Which places count: masks of two sides, and how many places one leaves out. What is left out is told, never silent."""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from alignment.verdict import Coverage, Place, Status, Verdict

if TYPE_CHECKING:
    from alignment.match import Pair


def masked_out(count: int, total: int) -> str:
    """How many places a mask left out, or ""."""
    return f"{count} of {total} places are masked" if count else ""


def left_out(a: str, b: str) -> dict[str, Any]:
    """For ``Verdict.info``: what was left out on each side; {} where nothing was."""
    return {"left_out": {side: text for side, text in (("a", a), ("b", b)) if text}} if a or b else {}


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
