"""Evidence: what was measured, on what, by which commit, in a form that can be checked later.

A claim without a file is an opinion, and a file whose commit does not exist, or that was written by a tree with
uncommitted changes, describes code nobody can read. :func:`check_folder` refuses both.
"""
from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from alignment import files, machine
from alignment.verdict import Coverage, Status, Verdict, worst

SCHEMA = 1
#: Name a commit where the tree that runs has no git folder (a copy on another machine).
COMMIT_ENV = "VIME_COMMIT"
#: Files written from then on say how long the run took. Two older ones do not: their writers left it at 0.
TIMED_SINCE = "2026-11-29T23:00:00Z"
#: Files written from then on name the GPU of a claim on one. Two older ones do not: their writers never imported torch.
NAMED_SINCE = "2026-11-30T01:15:00Z"
#: What runs when evidence is made: the package, and the scripts that measure. The evidence that they write is no code.
RUNS = ("vime", "alignment", "gates", "ci", "scripts", "tools", ":(exclude)ci/evidence")
_BEGAN = time.monotonic()


def schema() -> dict[str, Any]:
    """The JSON schema of an evidence file."""
    return json.loads(resources.files("alignment").joinpath("evidence.schema.json").read_text())


def claim(verdict: Verdict, *, model: str, device: str, dtype: str, topology: str = "tp1 pp1 ep1",
          stand_ins: Sequence[str] = (), refused: str | None = None) -> dict[str, Any]:
    """One claim of an evidence file: what ``verdict`` says about a model, a device and a topology.

    ``stand_ins`` names what was not the real thing (a transport with the same signatures, a reduced width); a claim
    with one is never shown as proven. ``refused`` is the reason why vime refuses this combination.
    """
    info = verdict.info
    contract = info.get("contract")
    return {
        "gate": verdict.name, "test": str(info.get("nodeid", "")).rpartition("/")[2], "verdict": verdict.status.value,
        "reason": verdict.reason, "refused": refused, "tier": verdict.tier,
        "coverage": {u: {"compared": c.compared, "expected": c.expected} for u, c in verdict.coverage.items()},
        "first_bad": None if verdict.first_bad is None else str(verdict.first_bad), "cause": verdict.cause,
        "model": model, "device": device, "dtype": dtype, "topology": topology, "stand_ins": list(stand_ins),
        "contract": contract["fingerprint"] if contract else None, "cost": info.get("cost"), "mutation": info.get("mutation"),
    }


def build(claims: Sequence[dict[str, Any]], *, kind: str = "gates", contracts: dict[str, dict[str, Any]] | None = None,
          seconds: float | None = None, numbers: dict[str, Any] | None = None, notes: str = "",
          repo: Path | None = None) -> dict[str, Any]:
    """An evidence document of this machine and this commit; ``contracts`` maps fingerprints to fields, ``seconds`` is how
    long the run took (by default, since this process loaded this module). Raises ValueError naming what the schema refuses."""
    seconds = time.monotonic() - _BEGAN if seconds is None else seconds
    commit, dirty = commit_of(repo)
    on_gpu = any(c.get("device") == "cuda" for c in claims)
    scores = [c["mutation"] for c in claims if c.get("mutation")]
    document = {
        "schema": SCHEMA, "kind": kind, "created": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit, "dirty": dirty, "seconds": round(seconds, 1) or round(seconds, 6), "hardware": machine.hardware(gpus=on_gpu),
        "versions": machine.versions(),
        "contracts": contracts or {},
        "verdict": worst(Status(c["verdict"]) for c in claims).value, "claims": list(claims),
        "mutation": {k: sum(s[k] for s in scores) for k in ("planted", "caught")} if scores else None,
        "numbers": numbers or {}, "notes": notes,
    }
    found = problems(document)
    if found:
        raise ValueError("this evidence does not fit its schema: " + "; ".join(found))
    return document


def text(document: dict[str, Any]) -> str:
    """The file's content: strict JSON."""
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def write(path: Path, document: dict[str, Any]) -> None:
    """Write the file whole or not at all: a run that is killed here leaves the evidence of before."""
    files.write_text(path, text(document))


def commit_of(repo: Path | None = None) -> tuple[str | None, bool]:
    """Commit of the code that runs, and whether tracked files differ from it. ``VIME_COMMIT`` speaks for a copy
    without git; then nothing is known to differ."""
    folder = repo or Path(__file__).resolve().parent.parent
    head = _git(folder, "rev-parse", "--verify", "HEAD") if (folder / ".git").exists() else None
    if head is None:
        return os.environ.get(COMMIT_ENV) or None, False
    return head, bool(_git(folder, "status", "--porcelain", "--untracked-files=no", "--", *RUNS))


def _git(folder: Path, *args: str) -> str | None:
    try:
        out = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout.strip() if out.returncode == 0 else None


def problems(document: Any) -> list[str]:
    """Everything wrong with one document: schema, a verdict its claims do not support, a sum that does not add up."""
    import jsonschema

    found = [f"{'/'.join(map(str, e.absolute_path)) or 'document'}: {e.message[:300]}"
             for e in jsonschema.Draft202012Validator(schema()).iter_errors(document)]
    if found:
        return found
    claims = document["claims"]
    if not document.get("seconds") and document["created"] >= TIMED_SINCE:
        found.append("took 0 seconds: its writer did not measure, or nothing ran")
    on_gpu = [c["gate"] for c in claims if c["device"] == "cuda" and c["verdict"] == "PASS"]
    if on_gpu and not document["hardware"]["gpus"] and document["created"] >= NAMED_SINCE:
        found.append(f"claim {on_gpu[0]} is PASS on cuda, and the file names no GPU: it was written where torch sees none")
    told = worst(Status(c["verdict"]) for c in claims)
    if document["verdict"] != told.value:
        found.append(f"verdict is {document['verdict']}, and its claims amount to {told}")
    for c in claims:
        cover = {u: Coverage(v["compared"], v["expected"]) for u, v in c["coverage"].items()}
        if c["verdict"] == "PASS" and Verdict(c["gate"], Status.PASS, coverage=cover).status is not Status.PASS:
            found.append(f"claim {c['gate']} is PASS with coverage {c['coverage']}")
        if c.get("contract") and c["contract"] not in document["contracts"]:
            found.append(f"claim {c['gate']} was made under contract {c['contract']}, which the file does not hold")
        if c.get("mutation") and c["mutation"]["caught"] > c["mutation"]["planted"]:
            found.append(f"claim {c['gate']} caught more faults than were planted")
        if c["verdict"] == "PASS" and c.get("mutation") and c["mutation"]["caught"] < c["mutation"]["planted"]:
            found.append(f"claim {c['gate']} is PASS and missed a planted fault")
    return found


def check_folder(folder: Path, repo: Path | None = None) -> list[str]:
    """Everything wrong with the evidence files under ``folder``, as "file: problem" lines.

    ``repo`` is the git folder in which the commits must exist; without one that is not asked.
    """
    found: list[str] = []
    for path in sorted(folder.rglob("*.json")):
        where = str(path.relative_to(folder))
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as err:
            found.append(f"{where}: is not JSON ({err})")
            continue
        wrong = problems(document)
        found += [f"{where}: {w}" for w in wrong]
        if wrong or repo is None:
            continue
        commit = document["commit"]
        if commit is None:
            found.append(f"{where}: names no commit; run from a git folder or set {COMMIT_ENV}")
        elif _git(repo, "cat-file", "-e", f"{commit}^{{commit}}") is None:
            found.append(f"{where}: commit {commit} does not exist in this repository")
        if document["dirty"]:
            found.append(f"{where}: was written with uncommitted changes, so its commit does not describe what ran")
    return found


def load_folder(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Every valid evidence file under ``folder``, oldest first. Raises ValueError naming the first bad one."""
    out = []
    for path in folder.rglob("*.json"):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            wrong = problems(document)
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as err:
            wrong = [str(err)]
        if wrong:
            raise ValueError(f"{path.name}: {wrong[0]}")
        out.append((path, document))
    return sorted(out, key=lambda item: (item[1]["created"], item[0].name))


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m alignment.evidence FOLDER``: 0 where every file holds, 1 with one line a problem."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m alignment.evidence", description=(main.__doc__ or "").strip())
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    if not folder.is_dir():
        print(f"{folder} is not a folder", file=sys.stderr)
        return 2
    top = _git(folder, "rev-parse", "--show-toplevel")
    found = check_folder(folder, Path(top) if top else None)
    print("\n".join(found) if found else f"{len(list(folder.rglob('*.json')))} evidence file(s) hold")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
