"""Judges a weight ledger: which stage of a weight's way was the first at which it was wrong, where, and what was there.

A ledger holds digests only. For every cell (stage, rank, tensor, shard) the caller says what had to be there, derived
from the source and never from the stage before, and what was found. A tool that compares the two ends of the way says
that they differ; with a truth at every stage the first stage that differs is where the fault is, and all later ones
are downstream.
"""
from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence

from alignment import pictures
from alignment.errors import InputError
from alignment.verdict import Cause, Coverage, Place, Status, Verdict

_EXPERT = re.compile(r"experts\.\d+\.")


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One digest that was expected (``want``) or found. ``rank`` is the full parallel rank, ``expert`` the global id,
    ``shard`` the number of the tensor-parallel shard, or of the slice of a stacked tensor. Cells come in the order
    in which the first one is to be named: by stage, then as the model computes, then by rank."""

    stage: str
    name: str
    want: str | None
    found: str | None
    rank: dict[str, int] | None = None
    layer: int | None = None
    expert: int | None = None
    shard: int | None = None

    @property
    def good(self) -> bool:
        return self.want is not None and self.want == self.found

    @property
    def place(self) -> Place:
        return Place(stage=self.stage, rank=self.rank, layer=self.layer, tensor=self.name, expert=self.expert)


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where a wrong digest is right: the tensor, expert and shard it belongs to, or what was done to it (``note``)."""

    name: str
    layer: int | None = None
    expert: int | None = None
    shard: int | None = None
    kind: str = "other_tensor"
    note: str = ""


def judge(name: str, stages: Sequence[str], cells: Iterable[Cell], origin: Callable[[Cell], Origin | None] | None = None,
          experts_per_rank: int = 0) -> Verdict:
    """One Verdict for a whole ledger, with a child for every stage in order.

    A cell that had to be there and is not, or is there and belongs to nobody, differs as much as one with other bits:
    the truth says what is expected, so FAIL is meant. A stage without cells is left out; a ledger without cells is
    NOT_RUN. ``origin`` explains a wrong digest. ``experts_per_rank`` makes boundary experts come first.

    Raises InputError for a stage that is not in ``stages`` and for two forms of digest in one cell.
    """
    by_stage: dict[str, list[Cell]] = {stage: [] for stage in stages}
    good: dict[str, int] = dict.fromkeys(stages, 0)
    states: dict[str, dict[str, str]] = {}
    for cell in cells:
        if cell.stage not in by_stage:
            raise InputError(f"ledger stage {cell.stage!r}", "one of " + ", ".join(stages))
        if cell.want and cell.found and cell.want.partition(":")[0] != cell.found.partition(":")[0]:
            raise InputError(f"digests of {cell.name} are {cell.want} and {cell.found}", "two digests of one form")
        row = states.setdefault(cell.name, {})
        if cell.good:
            good[cell.stage] += 1
            row.setdefault(cell.stage, "equal")
        else:
            by_stage[cell.stage].append(cell)
            row[cell.stage] = "missing" if cell.found is None else "first"
    present = [s for s in stages if good[s] or by_stage[s]]
    children = [_judge_stage(s, good[s], by_stage[s], origin, experts_per_rank) for s in present]
    bad = [c for c in children if not c.green]
    first = bad[0] if bad else None
    if first is not None:
        after = present[present.index(bad[0].name) + 1 :]
        for row in states.values():
            row.update({s: "downstream" for s in after if row.get(s) in ("first", "missing")})
    total = sum(good.values()) + sum(map(len, by_stage.values()))
    out = Verdict(
        name,
        Status.PASS if not bad else Status.FAIL,
        reason="" if first is None else f"stage {first.name}: {first.reason}",
        coverage={"entries": Coverage(total, total)},
        first_bad=None if first is None else first.first_bad,
        causes=[] if first is None else list(first.causes),
        downstream=[c.first_bad for c in bad[1:] if c.first_bad is not None],
        stats={"stages": {s: {"equal": good[s], "wrong": len(by_stage[s])} for s in present}},
        children=children,
    )
    return pictures.attach(out, pictures.ledger(name, present, states)) if states else out


def _judge_stage(stage: str, good: int, bad: list[Cell], origin: Callable[[Cell], Origin | None] | None,
                 experts_per_rank: int) -> Verdict:
    total = good + len(bad)
    if not bad:
        return Verdict(stage, Status.PASS, coverage={"entries": Coverage(total, total)})
    lead = min(enumerate(bad), key=lambda pair: (_boundary(pair[1], experts_per_rank), pair[0]))[1]
    lost, extra = sum(c.found is None for c in bad), sum(c.want is None for c in bad)
    parts = [f"{len(bad)} of {total} entries are wrong"]
    parts += [f"{lost} lost"] if lost else []
    parts += [f"{extra} that belong to nobody"] if extra else []
    ranks = sorted({c.rank["rank"] for c in bad if c.rank and "rank" in c.rank})
    parts += [f"on ranks {ranges(ranks)}"] if len(ranks) > 1 else []
    causes = []
    origins = {id(c): origin(c) for c in bad[:20000]} if origin else {}
    moved = permutation([(c, o) for c in bad if c.rank == lead.rank and _family(c.name) == _family(lead.name)
                         and (o := origins.get(id(c))) is not None])
    if moved:
        causes.append(Cause("expert_permutation", moved, evidence={"rank": lead.rank, "layer": lead.layer}))
    if (found := origins.get(id(lead))) is not None:
        causes.append(Cause(found.kind, _describe(lead, found)))
    elif lead.found is None:
        causes.append(Cause("lost", f"{lead.name} is not there at this stage"))
    elif not causes:
        causes.append(Cause("unknown", "its bits are those of no tensor, shard or known corruption of this checkpoint"))
    return Verdict(stage, Status.FAIL, reason=", ".join(parts), coverage={"entries": Coverage(total, total)},
                   first_bad=lead.place, causes=causes, downstream=[c.place for c in bad[:50] if c is not lead],
                   info={} if lead.shard is None else {"shard": lead.shard})


def permutation(moved: Iterable[tuple[Cell, Origin]]) -> str | None:
    """``"experts 32..63 hold 0..31"``: wrong experts whose bits are those of other experts, as runs."""
    pairs = sorted({(c.expert, o.expert) for c, o in moved
                    if c.expert is not None and o.expert is not None and o.expert != c.expert})
    if not pairs:
        return None
    runs: list[list[int]] = []  # first, last, source of first
    for expert, held in pairs:
        if runs and expert == runs[-1][1] + 1 and held - expert == runs[-1][2] - runs[-1][0]:
            runs[-1][1] = expert
        else:
            runs.append([expert, expert, held])
    texts = [f"{_span(a, b)} hold{'s' if a == b else ''} {_span(h, h + b - a)}" for a, b, h in runs]
    more = f" and {len(texts) - 6} more" if len(texts) > 6 else ""
    return ("expert " if len(pairs) == 1 else "experts ") + ", ".join(texts[:6]) + more


def ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"0..2, 5"``."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(_span(a, b) for a, b in runs)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}..{last}"


def _boundary(cell: Cell, experts_per_rank: int) -> int:
    """0 for a tensor that is no expert and for the first and last expert of a block, 1 for those inside."""
    if cell.expert is None or experts_per_rank < 1:
        return 0
    return int(cell.expert % experts_per_rank not in (0, experts_per_rank - 1))


def _family(name: str) -> str:
    """The name with the expert's number taken out (the layer stays)."""
    return _EXPERT.sub("experts.*.", name)


def _describe(cell: Cell, origin: Origin) -> str:
    if origin.note:
        return f"{cell.name}: {origin.note}"
    where = origin.name if origin.name != cell.name else f"{origin.name}, shard {origin.shard}"
    extra = f" (shard {origin.shard})" if origin.shard not in (None, cell.shard) and origin.name != cell.name else ""
    return f"{cell.name} holds the bits of {where}{extra}"
