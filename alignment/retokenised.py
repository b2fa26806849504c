"""Why two token sequences of one request differ: shift, padding, insertion, another split of the same text.

Only explanations that account for every differing token are given. They explain a fault; they do not excuse it.
"""
from __future__ import annotations

import difflib
from collections.abc import Sequence

from alignment.verdict import Cause

_LONGEST = 4096  # of the differing middle: edits are searched in quadratic time


def explain(a: Sequence[int], b: Sequence[int]) -> list[Cause]:
    """Likely causes, the simplest first; empty if the sequences just contradict each other."""
    a, b = tuple(a), tuple(b)
    if a == b or not a or not b:
        return []
    for found in (_padding(a, b), _other_end(a, b), _shift(a, b)):
        if found is not None:
            return [found]
    edits = _edits(a, b)
    if not edits:
        return []
    changed = sum(max(len(x), len(y)) for _, x, y in edits)
    if 2 * changed > max(len(a), len(b)):  # two unrelated sequences also have an edit script
        return []
    if all(x == () for _, x, _ in edits) or all(y == () for _, _, y in edits):
        return [_inserted(a, b, edits)]
    if any(len(x) != len(y) for _, x, y in edits):
        i, x, y = edits[0]
        text = (f"retokenised: from index {i} {list(x)[:8]} became {list(y)[:8]}; the text was tokenised again "
                "instead of keeping the sampled ids")  # fmt: skip
        return [Cause("retokenised", text, 0.0, {"edits": len(edits), "index": i})]
    return []


def _padding(a: tuple[int, ...], b: tuple[int, ...]) -> Cause | None:
    (short, long), side = ((a, b), "b") if len(a) < len(b) else ((b, a), "a")
    extra = len(long) - len(short)
    if extra == 0:
        return None
    for where, rest, pad in (("behind", long[:-extra], long[-extra:]), ("in front", long[extra:], long[:extra])):
        if rest == short and len(set(pad)) == 1 and (extra > 1 or pad[0] == 0 or pad[0] not in short):
            text = (f"side {side} has {extra} padding token(s) {pad[0]} {where}: padded bounds were taken for the "
                    "bounds of the tokens")  # fmt: skip
            if extra == 1:  # one token alone may be anything that stands at an end
                other = "a begin-of-sequence token" if where == "in front" else "the last token, which the other side dropped,"
                text = f"side {side} has one more token {pad[0]} {where}: {other} or padding taken for a token"
            return Cause("padding", text, 0.0, {"side": side, "pad": pad[0], "count": extra, "where": where})
    return None


def _other_end(a: tuple[int, ...], b: tuple[int, ...]) -> Cause | None:
    """The same tokens, padded in front on one side and behind on the other."""
    if len(a) != len(b):
        return None
    for left, right, side in ((a, b, "a"), (b, a, "b")):
        pad, count = left[0], next((i for i, t in enumerate(left) if t != left[0]), 0)
        if count and right[-count:] == (pad,) * count and left[count:] == right[:-count]:
            text = f"{count} padding token(s) {pad} in front on side {side} and behind on the other: give both masks"
            return Cause("padding", text, 0.0, {"side": side, "pad": pad, "count": count, "where": "in front"})
    return None


def _shift(a: tuple[int, ...], b: tuple[int, ...]) -> Cause | None:
    for lag in range(1, min(len(a), len(b), 65)):
        for sign, x, y in ((1, a, b), (-1, b, a)):
            overlap = min(len(x), len(y) - lag)
            # Short or monotonous overlaps fit by accident: ask for most of the sequence, and for variety.
            if len(a) != len(b) or overlap < 3 or 2 * overlap <= len(x) or len(set(x[:overlap])) < 3:
                continue
            if x[:overlap] == y[lag : lag + overlap]:
                text = f"side b is side a shifted by {sign * lag} position(s): label or window off by {lag}"
                return Cause("shift", text, 0.0, {"lag": sign * lag, "overlap": overlap})
    return None


def _edits(a: tuple[int, ...], b: tuple[int, ...]) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(index in a, removed, added), between the common prefix and suffix."""
    head = 0
    while head < min(len(a), len(b)) and a[head] == b[head]:
        head += 1
    tail = 0
    while tail < min(len(a), len(b)) - head and a[-1 - tail] == b[-1 - tail]:
        tail += 1
    x, y = a[head : len(a) - tail], b[head : len(b) - tail]
    if max(len(x), len(y)) > _LONGEST:
        return []
    codes = difflib.SequenceMatcher(None, x, y, autojunk=False).get_opcodes()
    return [(head + i1, x[i1:i2], y[j1:j2]) for op, i1, i2, j1, j2 in codes if op != "equal"]


def _inserted(a: tuple[int, ...], b: tuple[int, ...], edits: list) -> Cause:
    side = "b" if edits[0][1] == () else "a"
    at, x, y = edits[0]
    ids = y or x
    before = a[at - 1] if at else None
    same = len({(e[1] or e[2]) for e in edits}) == 1
    text = (f"side {side} has {len(ids)} token(s) {list(ids)[:8]} more at index {at}"
            + (f", after token {before}" if before is not None else "")
            + (f"; the same at {len(edits)} places" if same and len(edits) > 1 else "")
            + ": text rendered and tokenised again (chat template) instead of keeping the sampled ids")  # fmt: skip
    return Cause("retokenised", text, 0.0,
                 {"inserted": list(ids), "side": side, "index": at, "after": before, "places": len(edits)})
