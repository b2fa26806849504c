"""What a night said as a whole: gates that had to run, controls that had to fail, the recipe twice, cost, and last night.

Reads the reports that ``ci/nightly.sh`` left in one folder and writes ``nightly.json``, ``junit.xml`` and ``index.html``
beside them. Only PASS is green: a gate whose report is missing, a control that was not caught and a cost over its
budget fail the night like a wrong bit does. A green night is kept, and the next night of the same hardware, versions,
recipe and number of steps has to give its bits. Where only the versions changed, the two are compared all the same and the report says that
this is across versions; such a difference is told and does not fail the night.

    python ci/nightly.py --report DIR --history DIR --profile dense-tiny --gate logprob [--gate ...]
"""
from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import shutil
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alignment import report as pages
from alignment import runlog, runs
from alignment.errors import InputError
from alignment.files import write_text
from alignment.verdict import Coverage, Status, Verdict, combine

IDENTITY = ("hardware", "versions", "topology", "recipe")


def read_report(path: Path, name: str) -> Verdict:
    """A report as a verdict; a file that is missing or is none is NOT_RUN, one of an interrupted run INVALID."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        verdict = Verdict.from_dict(data)
    except FileNotFoundError:
        return Verdict(name, Status.NOT_RUN, f"{path.name} is missing: it did not run", coverage={"reports": Coverage(0, 1)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Verdict(name, Status.INVALID, f"{path.name} cannot be read: {error}")
    if data.get("complete") is False:
        return Verdict(name, Status.INVALID, f"the run ended in the middle of {data.get('running') or 'it'}", children=verdict.children)
    verdict.name = name
    return verdict


def gates(folder: Path, profile: str, wanted: Sequence[str], cost_max: float | None) -> list[Verdict]:
    """One verdict for each gate that had to run on ``profile``."""
    whole = read_report(folder / profile / "report.json", f"{profile}: gates")
    out = []
    for gate in wanted:
        found = [c for c in whole.children if gate in c.name.split("+")]
        name = f"{profile}: gate {gate}"
        if not found:
            reason = whole.reason if not whole.children else f"no gate of this name is in the report ({whole.reason or whole.status})"
            out.append(Verdict(name, Status.NOT_RUN, reason, coverage={"gates": Coverage(0, 1)}))
            continue
        verdict = found[0] if len(found) == 1 else combine(name, found)
        verdict.name = name
        out.append(verdict)
        ratios = [float(c.info["cost"]["ratio"]) for c in found if isinstance(c.info.get("cost"), dict) and "ratio" in c.info["cost"]]
        if cost_max is not None and gate == "cost" and len(ratios) < len(found):
            out.append(Verdict(f"{profile}: cost of {gate}", Status.NOT_RUN, "no cost is recorded", coverage={"budgets": Coverage(0, 1)}))
        elif cost_max is not None and ratios:
            out.append(_budget(f"{profile}: cost of {gate}", max(ratios), cost_max, "x of the unaligned run"))
    if whole.status is Status.INVALID:
        out.append(whole)
    return out


def _budget(name: str, value: float, limit: float, unit: str) -> Verdict:
    over = not value <= limit
    return Verdict(name, Status.FAIL if over else Status.PASS, f"{value:.4g}{unit}, the budget is {limit:.4g}" if over else "",
                   coverage={"budgets": Coverage(1, 1)}, stats={"value": value, "budget": limit})


def control(folder: Path, profile: str, gate: str) -> Verdict:
    """A gate's own planted fault: every test of the gate (one a dtype) must have said FAIL by a comparison, not by an assertion."""
    name = f"{profile}: control of {gate}"
    found = read_report(folder / f"{profile}-control-{gate}" / "report.json", name)
    if found.status not in (Status.PASS, Status.FAIL):
        return found
    parts = found.children or [found]
    missed = [p for p in parts if p.status is not Status.FAIL or raised(p)]
    covered = {"controls": Coverage(len(parts), len(parts))}
    if not missed:
        return Verdict(name, Status.PASS, coverage=covered, info={"found": str(found.first_bad or found.reason)})
    which = f" in {len(missed)} of {len(parts)} tests ({missed[0].info.get('dtype') or missed[0].name})" if parts[1:] else ""
    if missed[0].status is Status.FAIL:
        return Verdict(name, Status.INVALID, f"its test broke off{which} before the planted fault was compared: {missed[0].reason}", coverage=covered)
    return Verdict(name, Status.FAIL, f"its planted fault was not found{which}: this gate cannot fail", coverage=covered)


def raised(verdict: Verdict) -> bool:
    """Whether a FAIL is that of an assertion of the test, or of a part of it."""
    return bool(verdict.info.get("raised")) or any(raised(c) for c in verdict.children)


def recipe(folder: Path, profile: str, ledger_max: float, seconds_max: float | None) -> list[Verdict]:
    """The recipe twice, the ledger's share of a step, and its time."""
    path = folder / f"{profile}-repro" / "report.json"
    verdict = read_report(path, f"{profile}: recipe twice")
    out = [verdict]
    if not path.is_file() or verdict.status is Status.INVALID:
        return out
    data = json.loads(path.read_text(encoding="utf-8"))
    shares = [c.get("share") for c in (data.get("ledger_cost") or {}).values()]
    if len(shares) < 2 or None in shares:
        out.append(Verdict(f"{profile}: cost of the ledger", Status.NOT_RUN, "no cost is recorded", coverage={"budgets": Coverage(0, 1)}))
    else:
        out.append(_budget(f"{profile}: cost of the ledger", max(shares), ledger_max, " of a step"))
    if seconds_max is not None:
        seconds = list((data.get("seconds") or {}).values())
        if len(seconds) < 2:
            out.append(Verdict(f"{profile}: time of the recipe", Status.NOT_RUN, "the time of both runs is not recorded", coverage={"budgets": Coverage(0, 1)}))
        else:
            out.append(_budget(f"{profile}: time of the recipe", sum(seconds), seconds_max, " s"))
    return out


def facts_of(ledger: runlog.Ledger) -> dict[str, Any]:
    """What a night was of: its first line, and how long it was. The recipe has no length, since no step depends on how many follow."""
    last = any(line.get("trained") is False for line in ledger.steps.values())
    return {**ledger.start, "length": {"num_rollout": (ledger.end or {}).get("steps"), "check_last_update": last}}


def key_of(start: dict[str, Any], fields: Sequence[str]) -> str:
    """A folder name for what two nights must share to be compared."""
    text = json.dumps({f: start.get(f) for f in fields}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def last_green(history: Path, start: dict[str, Any], fields: Sequence[str]) -> Path | None:
    """The newest kept night that shares ``fields`` with tonight."""
    found = []
    for night in sorted(history.glob("*/night.json")):
        try:
            kept = json.loads(night.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if all(kept.get("keys", {}).get(f) == key_of(start, [f]) for f in fields):
            found.append((kept.get("created", ""), night.parent))
    return max(found)[1] if found else None


def against_last(folder: Path, history: Path, profile: str) -> tuple[Verdict | None, str]:
    """Tonight's first run against the last green night's, and what to say; None on the first night of its kind."""
    name = f"{profile}: against the last green night"
    try:
        ledger = runlog.read(folder / f"{profile}-repro" / "a")
    except InputError as error:
        return Verdict(name, Status.NOT_RUN, str(error), coverage={"nights": Coverage(0, 1)}), ""
    missing = [f"it does not say its {f}" for f in IDENTITY if not ledger.start.get(f)]
    if problems := [*ledger.problems, *missing]:  # else a night without a first line would be the first of its kind every time
        return Verdict(name, Status.INVALID, f"the ledger of tonight is damaged: {problems[0]}"), ""
    facts = facts_of(ledger)
    same = last_green(history, facts, (*IDENTITY, "length"))
    if same is not None:
        verdict = runs.compare(same / "ledger.jsonl", ledger, name=name)
        verdict.info["night"] = same.name
        return verdict, f"compared with {same.name}, same hardware, versions and recipe"
    older = last_green(history, facts, ("hardware", "topology", "recipe", "length"))
    if older is None:
        length = facts["length"]
        told = f"{length['num_rollout']} steps" + (" and a last check" if length["check_last_update"] else "")
        return None, f"the first night of this hardware, these versions, this recipe and this length ({told}): nothing to compare with"
    verdict = runs.compare(older / "ledger.jsonl", ledger, name=name, across=["versions"])
    told = f"across versions, with {older.name}: " + ("the same bits" if verdict.green else str(verdict.first_bad or verdict.reason))
    note = Verdict(f"{profile}: across versions", Status.PASS, f"{verdict.reason or 'equal'} (told, and does not fail the night)",
                   coverage={"nights": Coverage(1, 1)}, info={"night": older.name, "compared": verdict.to_dict()})
    return note, told


def keep(folder: Path, history: Path, profile: str) -> None:
    """Keep a green night: its ledger, and what it was a night of. Whole or not at all."""
    source = folder / f"{profile}-repro" / "a" / runlog.FILE
    facts = facts_of(runlog.read(source))
    created = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S%fZ")
    target = history / f"{profile}-{created}"
    aside = history / f".{target.name}.part"
    aside.mkdir(parents=True)
    shutil.copyfile(source, aside / "ledger.jsonl")
    kept = {"created": created, "profile": profile, "keys": {f: key_of(facts, [f]) for f in (*IDENTITY, "length")},
            **{f: facts.get(f) for f in ("versions", "hardware", "length")}}
    (aside / "night.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")
    os.rename(aside, target)


def junit(verdict: Verdict) -> str:
    """JUnit XML: one case a check; whatever is not PASS is a failure, INVALID an error."""
    cases = verdict.children
    suite = ET.Element("testsuite", name=verdict.name, tests=str(len(cases)),
                       failures=str(sum(c.status in (Status.FAIL, Status.NOT_RUN) for c in cases)),
                       errors=str(sum(c.status is Status.INVALID for c in cases)), skipped="0")
    for c in cases:
        profile, _, name = c.name.partition(": ")
        case = ET.SubElement(suite, "testcase", classname=f"nightly.{profile}", name=name or profile)
        if not c.green:
            kind = "error" if c.status is Status.INVALID else "failure"
            ET.SubElement(case, kind, type=c.status.value, message=pages.one_line(c.reason)).text = pages.one_line(c.summary())
        elif c.reason:
            ET.SubElement(case, "system-out").text = pages.one_line(c.reason)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def judge(options: argparse.Namespace) -> Verdict:
    """The verdict of the night; its children are the checks."""
    children: list[Verdict] = []
    told: dict[str, str] = {}
    for profile in options.profile:
        children += gates(options.report, profile, options.gate, options.cost_max)
        children += [control(options.report, profile, gate) for gate in options.control]
        if not options.no_recipe:
            children += recipe(options.report, profile, options.ledger_max, options.seconds_max)
            verdict, told[profile] = against_last(options.report, options.history, profile)
            children += [] if verdict is None else [verdict]
    night = combine("nightly", children, info={"history": told})
    if night.green and not options.no_recipe:
        for profile in options.profile:
            keep(options.report, options.history, profile)
    return night


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--report", type=Path, required=True, help="folder with tonight's reports")
    parser.add_argument("--history", type=Path, required=True, help="folder with the green nights")
    parser.add_argument("--profile", action="append", required=True)
    parser.add_argument("--gate", action="append", default=[], help="a gate that had to run")
    parser.add_argument("--control", action="append", default=[], help="a gate whose planted fault had to be found")
    parser.add_argument("--no-recipe", action="store_true", help="the recipe was not part of this night")
    parser.add_argument("--cost-max", type=float, help="largest cost ratio of a gate")
    parser.add_argument("--ledger-max", type=float, default=0.03, help="largest share of a step that the ledger may take")
    parser.add_argument("--seconds-max", type=float, help="most seconds for the recipe, both runs")
    options = parser.parse_args(arguments)
    if odd := [p for p in options.profile if not p or Path(p).name != p]:  # its reports would lie in another folder than where they are looked for
        parser.error(f"--profile {odd[0]}: the name of a profile is expected, which is a folder of the reports as well; found a path")
    if twice := [p for p in options.profile if options.profile.count(p) > 1]:
        parser.error(f"--profile {twice[0]} is given twice; each profile has one night")
    verdict = judge(options)
    for name, text in (("nightly.json", pages.to_json(verdict, created=datetime.datetime.now(datetime.UTC).isoformat())),
                       ("junit.xml", junit(verdict)), ("index.html", pages.html(verdict, title="vime nightly", facts=verdict.info))):
        write_text(options.report / name, text)
    pages.terminal(verdict)
    for profile, text in verdict.info["history"].items():
        print(f"{profile}: {text}")
    return verdict.exit_code


if __name__ == "__main__":
    sys.exit(main())
