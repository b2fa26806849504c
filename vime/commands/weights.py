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
        return run(a, b, progress=lambda done, total: report("compare", done, total))


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
