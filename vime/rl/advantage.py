"""GRPO advantages, in one order of additions.

Sums run in float64 over the samples of a group in sample order (``math.fsum``: correctly rounded, so that the order
could not matter anyway). Source: Shao et al., "DeepSeekMath", 2024, equation 4 and section 4.1.2.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

_EPS = 1e-6


def grpo_advantages(rewards_GS: Sequence[Sequence[float]]) -> list[list[float]]:
    """(r - mean) / (std + 1e-6) within each group; a group of equal rewards gets zeros, exactly."""
    advantages = []
    for group in rewards_GS:
        mean = math.fsum(group) / len(group)
        centred = [r - mean for r in group]
        if all(r == group[0] for r in group):
            advantages.append([0.0] * len(group))
            continue
        std = math.sqrt(math.fsum(c * c for c in centred) / len(group))
        advantages.append([c / (std + _EPS) for c in centred])
    return advantages


def varied_groups(rewards_GS: Sequence[Sequence[float]]) -> int:
    """How many groups have rewards that are not all equal, that is, teach something."""
    return sum(any(r != group[0] for r in group) for group in rewards_GS)
