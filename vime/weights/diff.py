"""Two HF checkpoint folders, bit by bit. The judging is :mod:`alignment.weights`; this reads.

Key set, dtypes, shapes and counts are verdicts of their own: a comparison of the common tensors alone is green for
a checkpoint that lost one.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from alignment.compare import never_itself
from alignment.places import causal_order, place_of
from alignment.verdict import Coverage, Status, Verdict, combine
from alignment.weights import judge
from vime.weights.checkpoint import HfCheckpoint

Report = Callable[[int, int], None]


def diff(a: str | Path | HfCheckpoint, b: str | Path | HfCheckpoint, name: str = "weights",
         progress: Report | None = None, stage: str | None = None) -> Verdict:
    """Compare every tensor of two folders; a folder against itself is NOT_RUN. Raises :class:`CheckpointError` for a
    folder that cannot be read."""
    a, b = (x if isinstance(x, HfCheckpoint) else HfCheckpoint(x) for x in (a, b))
    bits = judge(_Watched(a, progress) if progress else a, b, name="bits", stage=stage,
                 order=causal_order({**a.files, **b.files}))
    children = [keys_verdict(a, b, stage), spec_verdict(a, b, 0, stage), spec_verdict(a, b, 1, stage), bits]
    out = combine(name, children)
    if bits.first_bad is not None:  # it has seen names, dtypes, shapes and content, in the order in which a model computes
        out.first_bad, out.causes = bits.first_bad, list(bits.causes)
        lead = next(c for c in children if c.first_bad is not None and c.first_bad.tensor == bits.first_bad.tensor)
        out.reason = f"{lead.name}: {lead.reason}"
        out.downstream = bits.downstream
    out.coverage = {k: v for c in out.children for k, v in c.coverage.items()}
    out.info = bits.info
    a.check_unchanged()
    b.check_unchanged()
    return never_itself(out, a.folder, b.folder)


def keys_verdict(a: HfCheckpoint, b: HfCheckpoint, stage: str | None = None) -> Verdict:
    """The same names on both sides."""
    lost, extra = (causal_order(list(x.keys() - y.keys())) for x, y in ((a, b), (b, a)))
    parts = [f"{len(lost)} lost: {_few(lost)}"] if lost else []
    parts += [f"{len(extra)} more: {_few(extra)}"] if extra else []
    first = next(iter(causal_order([*lost, *extra])), None)
    return Verdict("names", Status.INVALID if parts else Status.PASS, "; ".join(parts),
                   coverage={"names": Coverage(len(a.keys() & b.keys()), len(a.keys() | b.keys()))},
                   first_bad=None if first is None else place_of(first, stage=stage))


def spec_verdict(a: HfCheckpoint, b: HfCheckpoint, field: int, stage: str | None = None) -> Verdict:
    """Dtypes (``field`` 0) or shapes (1) of the tensors that both hold. A dtype difference is a difference; shapes
    that differ leave nothing to compare."""
    what = ("dtypes", "shapes")[field]
    both = causal_order(list(a.keys() & b.keys()))
    bad = [n for n in both if a.specs[n][field] != b.specs[n][field]]
    reason = f"{len(bad)} differ; {bad[0]}: {a.specs[bad[0]][field]} against {b.specs[bad[0]][field]}" if bad else ""
    status = Status.PASS if not bad else (Status.FAIL, Status.INVALID)[field]
    return Verdict(what, status, reason, coverage={what: Coverage(len(both), len(a.keys() | b.keys()))},
                   first_bad=place_of(bad[0], stage=stage) if bad else None)


class _Watched(Mapping[str, torch.Tensor]):
    """A checkpoint that tells how many of its tensors were read."""

    def __init__(self, checkpoint: HfCheckpoint, progress: Report):
        self._checkpoint, self._progress, self._seen = checkpoint, progress, 0

    def __getitem__(self, name: str) -> torch.Tensor:
        self._seen = min(self._seen + 1, len(self))
        self._progress(self._seen, len(self))
        return self._checkpoint[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint)

    def __len__(self) -> int:
        return len(self._checkpoint)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
