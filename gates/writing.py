"""``--gate-report DIR``: report.json after every gate, report.html and evidence.json at the end.

report.json is written before the first gate runs, with every gate NOT_RUN, and again after each one: a run that is
killed half-way leaves a file that says so, never the green one of yesterday.
"""
from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment import evidence
from alignment.files import write_text
from alignment.report import html, strict

if TYPE_CHECKING:
    from gates.collect import Session


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
    write_text(folder / "report.json", json.dumps(strict(document(session, complete)), indent=1, default=str) + "\n")
    for stale in ("report.html", "evidence.json"):
        (folder / stale).unlink(missing_ok=True)
    if complete:
        write_text(folder / "report.html", html(session.verdict(), title="vime gates"))
        found = evidence_of(session)
        if found is not None:
            evidence.write(folder / "evidence.json", found)


def no_commit(folder: Path) -> str:
    """What to say where the evidence of ``folder`` names no commit (a package installed from a clone is in no git folder); else nothing."""
    path = folder / "evidence.json"
    if not path.is_file() or json.loads(path.read_text())["commit"] is not None:
        return ""
    return (f"its evidence names no commit and will not be taken under ci/evidence: run from the clone itself, or set {evidence.COMMIT_ENV} "
            "to the commit that this package was installed from")


def evidence_of(session: Session) -> dict[str, Any] | None:
    """The evidence of this run, or None where no gate said what it ran on, and under ``--gate-control``."""
    claims, contracts = [], {}
    for verdict in session.verdicts():
        info = verdict.info
        if not {"model", "dtype", "device"} <= info.keys():
            continue
        if contract := info.get("contract"):
            contracts[contract["fingerprint"]] = {k: v for k, v in contract.items() if k != "fingerprint"}
        claims.append(evidence.claim(verdict, model=info["model"], device=info["device"], dtype=info["dtype"],
                                     topology=info.get("topology", "tp1 pp1 ep1"), stand_ins=info.get("stand_ins", ()),
                                     refused=info.get("refused")))
    if not claims or session.options.control:
        return None
    return strict(evidence.build(claims, contracts=contracts, seconds=time.time() - session.began))
