"""What something costs beside something else, from times of alternating pairs: a ratio, and whether it is within a budget."""
from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from alignment.verdict import Coverage, Status, Verdict


def median_ratio(ours_s: Sequence[float], others_s: Sequence[float]) -> float:
    """The median of the ratios of pairs. The ratio of a pair cancels what the machine did meanwhile; that of two medians does not.

    Args:
        ours_s, others_s: seconds, above 0, of the two sides of each pair; at least one pair.
    """
    return statistics.median(a / b for a, b in zip(ours_s, others_s, strict=True))


def ratio_of(ours_s: Sequence[float], others_s: Sequence[float]) -> dict[str, Any]:
    """:func:`median_ratio` as ``ratio``, with the smallest and the largest of the pairs (``min``, ``max``; each rounded to 3
    places), and how many ``pairs`` there were."""
    ratios = [a / b for a, b in zip(ours_s, others_s, strict=True)]
    return {"ratio": round(median_ratio(ours_s, others_s), 3), "min": round(min(ratios), 3), "max": round(max(ratios), 3), "pairs": len(ratios)}


def within(name: str, cost: dict[str, Any], budget: float, against: str = "") -> Verdict:
    """PASS where the ``ratio`` of ``cost`` is at most ``budget``, else FAIL; ``cost`` is kept as ``info["cost"]``.

    Args:
        cost: of :func:`ratio_of`, and whatever else is to be kept with it.
        against: what the ratio is of, for the reason: ``"the ordinary stack"``.
    """
    over = cost["ratio"] > budget
    return Verdict(name, Status.FAIL if over else Status.PASS,
                   f"{cost['ratio']:.2f}x{f' {against}' if against else ''}, {budget:g}x asked" if over else "",
                   coverage={"pairs": Coverage(cost["pairs"], cost["pairs"])}, info={"cost": cost})
