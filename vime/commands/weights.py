"""``vime weights``: the round trip and the comparison of checkpoints, with progress."""
from __future__ import annotations

from pathlib import Path

from alignment.verdict import Verdict
from vime.commands.progress import TerminalProgress


def roundtrip(hf: Path, tp: int, pp: int, ep: int, etp: int | None, vpp: int, last_stage: int | None, inject: str | None,
              out: Path | None, serve: bool = False) -> Verdict:
    from vime.weights.roundtrip import roundtrip as run
    from vime.weights.topology import Sizes

    sizes = Sizes(tp=tp, pp=pp, ep=ep, etp=etp or 1, vpp=vpp, last_stage=last_stage)
    with TerminalProgress() as progress:
        verdict = run(hf, sizes, inject, out, report=_Reporter(progress), serve=serve)
        if left := verdict.info.get("left_out"):
            progress.note(f"trainer and engine: {left}")
    return verdict


def diff(a: Path, b: Path) -> Verdict:
    from vime.weights.diff import diff as run

    with TerminalProgress() as progress:
        report = _Reporter(progress)
        return _beside(run(a, b, progress=lambda done, total: report("compare", done, total)), a, b)


#: Fields of config.json that say who wrote a folder, not what the model computes.
_WRITTEN_BY = ("transformers_version", "_name_or_path")


def _beside(verdict: Verdict, a: Path, b: Path) -> Verdict:
    """What the tensors do not say: fields of config.json that differ, and files of tensors that are no part of the checkpoint."""
    from vime.weights.checkpoint import HfCheckpoint

    sides = [HfCheckpoint(x) for x in (a, b)]
    x, y = (side.config for side in sides)
    missing = object()
    fields = [f for f in sorted({*x, *y}) if f not in _WRITTEN_BY and x.get(f, missing) != y.get(f, missing)]
    unread = [side.unread() for side in sides]
    notes = []
    if fields:
        verdict.info["config_differs"] = {f: [x.get(f), y.get(f)] for f in fields}
        shown = ", ".join(f"{f} ({str(x.get(f))[:40]} and {str(y.get(f))[:40]})" for f in fields[:4])
        notes.append(f"config.json differs in {shown}" + (f" and {len(fields) - 4} more" if fields[4:] else ""))
    if any(unread):
        verdict.info["not_read"] = {side: names for side, names in zip("ab", unread, strict=True) if names}
        notes.append("not read: " + ", ".join(dict.fromkeys(n for names in unread for n in names)))
    if verdict.green and notes:
        verdict.reason = "tensors only: " + "; ".join(notes)
    return verdict


class _Reporter:
    """Turns (phase, done, total) into phases and advances."""

    def __init__(self, progress: TerminalProgress) -> None:
        self.progress, self.phase, self.done = progress, "", 0

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase != self.phase:
            self.progress.phase(phase, total)
            self.phase, self.done = phase, 0
        self.progress.advance(done - self.done)
        self.done = done
