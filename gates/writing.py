"""``--gate-report DIR``: report.json after every gate, report.html and evidence.json at the end.

report.json is written before the first gate runs, with every gate NOT_RUN, and again after each one: a run that is
killed half-way leaves a file that says so, never the green one of yesterday.
"""
from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gates.collect import Session


def write_text(path: Path, text: str) -> None:
    """Write aside, then rename: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def document(session: Session, complete: bool) -> dict[str, Any]:
    """The JSON of a gate run: the verdict of the whole, one child a gate, and whether the run came to its end."""
    whole = session.verdict().to_dict()
    options = session.options
    whole["complete"] = complete
    whole["options"] = {"device": options.device, "profile": options.profile, "tier": options.tier,
                        "cost_max": options.cost_max, "control": options.control, "required": list(options.required)}
    running = [r.nodeid for r in session.runs.values() if r.started and not r.finished]
    whole["running"] = running[0] if running else None
    return whole


def write(session: Session, complete: bool) -> None:
    """Write what is known so far to the report folder; the page and the evidence only once the run is complete."""
    assert session.options.report is not None
    folder = session.options.report
    write_text(folder / "report.json", json.dumps(document(session, complete), indent=1, default=str) + "\n")
    if not complete:
        for stale in ("report.html", "evidence.json"):
            (folder / stale).unlink(missing_ok=True)
