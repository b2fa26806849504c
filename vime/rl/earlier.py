"""What a run that goes on from a checkpoint knows of the steps before it: their verdicts and metrics, from its own ledger.

Without them the verdict on the whole run would be one on the steps since the restart, and a FAIL before it would be forgotten.
"""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignment import runlines
from alignment.verdict import Status, Verdict
from vime.rl.loop import StepResult
from vime.rl.runlog import RunLog

#: The metrics of every step, one JSON object a line.
METRICS = "metrics.jsonl"


def steps(log: RunLog, first_step: int) -> list[StepResult]:
    """Every step before ``first_step``, from the one with which the ledger begins; a step that cannot be read is NOT_RUN.

    Empty where the run began in this process, has no ledger, or goes on in another folder than it began in.
    """
    if log.before is None or log.path is None:
        return []
    written = _metrics(log.path.parent)
    out = []
    for step in range(log.before.first_step, first_step):
        line = log.before.steps.get(step, {})
        metrics = line.get("metrics")
        metrics = metrics if isinstance(metrics, dict) else {}
        more = written.get(step, {})  # text, lists and seconds, too; not where a kill left the line of the step before it was done again
        if metrics and all(more.get(name) == value for name, value in metrics.items()):
            metrics = more
        out.append(StepResult(step, bool(line.get("trained")), dict(metrics), _verdicts(line, step), []))
    return out


def _verdicts(line: Mapping[str, Any], step: int) -> list[Verdict]:
    said = line.get("verdicts")
    if not line:
        why = f"the ledger has no line of step {step}, which was done before the restart"
    elif line.get("trained") is not True:
        why = f"the ledger has only a comparison of step {step}, which was trained before the restart"
    elif not said:
        why = f"the ledger's line of step {step} has no verdict: an earlier version wrote it"
    else:
        try:
            return [Verdict.from_dict(v) for v in said]
        except (AttributeError, KeyError, TypeError, ValueError):
            why = f"the verdicts in the ledger's line of step {step} have a form that this version does not know"
    return [Verdict(f"step {step}", Status.NOT_RUN, why)]


def _metrics(folder: Path) -> dict[int, dict[str, Any]]:
    """The lines of ``metrics.jsonl`` by step; those that are none are left out, since the ledger has the numbers as well."""
    try:
        lines = (folder / METRICS).read_bytes().splitlines()
    except OSError:
        return {}
    bodies = [b for b in map(runlines.parse, lines) if b is not None and runlines.is_step(b.get("step"))]
    return {b["step"]: {k: v for k, v in b.items() if k != "step"} for b in bodies}
