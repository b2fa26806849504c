"""Several sequences in one microbatch, up to a token budget, and which rank gets which.

The plan depends on the lengths alone, in their given order, so that a rerun packs the same; equal lengths are told
apart by their place, never by a sort that may swap them. A row of every aligned operation depends on itself only, so the
plan changes the speed, not the log-probabilities; gradients are added in microbatch order.
"""
from __future__ import annotations

from collections.abc import Sequence

from vime.errors import BadInput


class SequenceTooLong(BadInput):
    """One sequence alone exceeds the token budget of a microbatch."""


def plan_microbatches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of sequences per microbatch, in order: the next one begins where a sequence would exceed ``max_tokens`` tokens.

    Raises:
        SequenceTooLong: one alone exceeds them.
    """
    batches: list[list[int]] = []
    used = 0
    for i, length in enumerate(lengths):
        if length > max_tokens:
            raise SequenceTooLong(
                f"sequence {i} has {length} tokens, more than the {max_tokens} of a microbatch; "
                "raise --max-tokens-per-gpu or lower --rollout-max-response-len"
            )
        if not batches or used + length > max_tokens:
            batches.append([])
            used = 0
        batches[-1].append(i)
        used += length
    return batches


def split_among(count: int, parts: int) -> list[list[int]]:
    """``range(count)`` dealt to ``parts`` data-parallel ranks in runs that differ by at most one."""
    base, extra = divmod(count, parts)
    out, start = [], 0
    for part in range(parts):
        size = base + (part < extra)
        out.append(list(range(start, start + size)))
        start += size
    return out


def balance(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Indices dealt to ``parts`` ranks so that their tokens are near each other.

    Longest first, each to the rank with the fewest tokens so far; equal lengths go by place, equal loads to the lower
    rank, so the result is a function of ``lengths``. Every rank gets its indices in ascending order, and none is left
    without where there are enough.
    """
    out: list[list[int]] = [[] for _ in range(parts)]
    load = [0] * parts
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(parts), key=lambda r: (bool(out[r]) and len(lengths) >= parts and not all(out), load[r], r))
        out[rank].append(i)
        load[rank] += lengths[i]
    return [sorted(part) for part in out]
