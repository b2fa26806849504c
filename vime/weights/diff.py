"""Two HF checkpoint folders, bit by bit. The judging is :mod:`alignment.bits`; this reads and puts in order.

Key set, dtypes, shapes and counts are verdicts of their own: a comparison of the common tensors alone is green for
a checkpoint that lost one.
"""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from alignment.bits import compare, verdict_of
from alignment.places import place_of
from alignment.verdict import Coverage, Place, Status, Verdict, combine
from vime.weights.checkpoint import HfCheckpoint

Report = Callable[[int, int], None]


def diff(a: str | Path | HfCheckpoint, b: str | Path | HfCheckpoint, name: str = "weights",
         progress: Report | None = None, stage: str | None = None) -> Verdict:
    """Compare every tensor of two folders. Raises :class:`CheckpointError` for a folder that cannot be read."""
    a, b = (x if isinstance(x, HfCheckpoint) else HfCheckpoint(x) for x in (a, b))
    bits = bits_verdict(a, b, progress, stage)
    out = combine(name, [keys_verdict(a, b, stage), spec_verdict(a, b, 0, stage), spec_verdict(a, b, 1, stage), bits])
    out.coverage = {k: v for c in out.children for k, v in c.coverage.items()}
    a.check_unchanged()
    b.check_unchanged()
    return out


def keys_verdict(a: HfCheckpoint, b: HfCheckpoint, stage: str | None = None) -> Verdict:
    """The same names on both sides."""
    lost, extra = sorted(a.keys() - b.keys()), sorted(b.keys() - a.keys())
    parts = [f"{len(lost)} lost: {_few(lost)}"] if lost else []
    parts += [f"{len(extra)} more: {_few(extra)}"] if extra else []
    first = min(lost + extra, default=None)
    return Verdict("names", Status.INVALID if parts else Status.PASS, "; ".join(parts),
                   coverage={"names": Coverage(len(a.keys() & b.keys()), len(a.keys() | b.keys()))},
                   first_bad=None if first is None else place_of(first, stage=stage))


def spec_verdict(a: HfCheckpoint, b: HfCheckpoint, field: int, stage: str | None = None) -> Verdict:
    """Dtypes (``field`` 0) or shapes (1) of the tensors that both hold. A dtype difference is a difference; shapes
    that differ leave nothing to compare."""
    what = ("dtypes", "shapes")[field]
    both = sorted(a.keys() & b.keys())
    bad = [n for n in both if a.specs[n][field] != b.specs[n][field]]
    reason = f"{len(bad)} differ; {bad[0]}: {a.specs[bad[0]][field]} against {b.specs[bad[0]][field]}" if bad else ""
    status = Status.PASS if not bad else (Status.FAIL, Status.INVALID)[field]
    return Verdict(what, status, reason, coverage={what: Coverage(len(both), len(a.keys() | b.keys()))},
                   first_bad=place_of(bad[0], stage=stage) if bad else None)


def bits_verdict(a: HfCheckpoint, b: HfCheckpoint, progress: Report | None = None, stage: str | None = None) -> Verdict:
    """Every element of every tensor that both hold, in ``a``'s order. Memory: two pieces."""
    both = [n for n in a if n in b]
    children: list[Verdict] = []
    equal = compared = elements = 0
    for number, name in enumerate(both, 1):
        result = compare(a[name], b[name], name)
        elements, compared = elements + result.total, compared + result.compared
        verdict = verdict_of(result, place_of(name, stage=stage))
        if verdict.green:
            equal += 1
        elif verdict.status is not Status.NOT_RUN or result.total:
            children.append(verdict)
        if progress is not None:
            progress(number, len(both))
    bad: list[Place] = [c.first_bad for c in children if c.first_bad is not None]
    worst = min(children, key=lambda c: c.status is not Status.FAIL, default=None)
    return Verdict(
        "bits",
        Status.PASS if worst is None else worst.status,
        "" if worst is None else f"{len(children)} of {len(both)} tensors differ; {worst.name}: {worst.reason}",
        coverage={"tensors": Coverage(len(both), len(a.keys() | b.keys())), "elements": Coverage(compared, elements)},
        first_bad=None if worst is None else worst.first_bad,
        downstream=[p for p in bad if worst is not None and p is not worst.first_bad],
        stats={"tensors": len(both), "equal": equal, "differing": len(children)},
        children=children[:50],
    )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
