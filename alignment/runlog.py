"""Reads the ledger of a run: one JSON line a step, appended and flushed, so that a run that is killed keeps its past.

A line ends with its own checksum, so that a line that was cut (the run was killed while writing), changed by hand or
glued to another one is told apart from a good one. Nothing is skipped silently: what cannot be read is a problem with
a line number, and a ledger with a problem is never judged as complete.

Lines, by ``kind``:

``start``  what the run is: recipe, topology, versions, hardware, environment, conditions; ``resumed_from`` is the number
           of steps that were done before (a continued run appends a second ``start``).
``step``   ``digests`` of every quantity of one step, ``parts`` of them by name, numbers beside them; ``sent`` is how many requests
           were in flight at once and a digest of their order, which are no quantities.
``end``    the run ended by itself after so many steps.
"""
from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import xxhash

from alignment import runlines
from alignment.errors import InputError
from alignment.runlines import QUANTITIES

__all__ = ["FILE", "QUANTITIES", "SCHEMA", "Ledger", "find", "line", "parse", "read"]

SCHEMA = 1
FILE = "ledger.jsonl"

_SUM = re.compile(rb',"sum":"([0-9a-f]{16})"\}$')


@dataclasses.dataclass
class Ledger:
    """What one file says. ``steps`` maps a step to its line; ``problems`` is what is wrong, in file order.

    ``torn`` is True if the last line was cut; ``replayed`` are steps that a continued run did again, as (step, old, new).
    """

    path: str
    starts: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    steps: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    end: dict[str, Any] | None = None
    problems: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    replayed: list[tuple[int, dict[str, Any], dict[str, Any]]] = dataclasses.field(default_factory=list)
    torn: bool = False

    @property
    def start(self) -> dict[str, Any]:
        return self.starts[0] if self.starts else {}

    @property
    def first_step(self) -> int:
        return int(self.start.get("resumed_from") or 0)


def line(body: dict[str, Any]) -> bytes:
    """One line with its checksum. Raises ValueError for a number that is not finite: JSON has none."""
    text = json.dumps(body, separators=(",", ":"), allow_nan=False, default=str).encode()
    return text[:-1] + b',"sum":"' + xxhash.xxh3_64_hexdigest(text).encode() + b'"}\n'


def parse(raw: bytes) -> dict[str, Any] | None:
    """The content of one line (without its end), or None if it is not one that :func:`line` made."""
    match = _SUM.search(raw)
    if match is None:
        return None
    text = raw[:match.start()] + b"}"
    if xxhash.xxh3_64_hexdigest(text).encode() != match.group(1):
        return None
    body = runlines.parse(text)
    return body if body is not None and body.get("kind") in ("start", "step", "end") else None


def find(path: str | Path) -> Path:
    """The ledger's file: ``path`` itself, or ``ledger.jsonl`` in that folder. Raises InputError."""
    path = Path(path)
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{path} holds no ledger", f"{FILE}, or a folder with one",
                         "give the --output-dir of a vime train")
    return file


def read(path: str | Path) -> Ledger:
    """Read a ledger. Raises InputError if there is none; whatever is wrong inside goes into ``problems``."""
    file = find(path)
    data = file.read_bytes()
    out = Ledger(str(path))
    lines = data.split(b"\n")
    tail = lines.pop()
    number = 0
    pending: str | None = None  # an unreadable line is forgiven only where a continued run follows it
    for number, raw in enumerate(lines, 1):
        body = parse(raw)
        if body is None:
            if pending is not None:
                out.problems.append(pending)
            pending = f"line {number} is cut or was changed (its checksum does not fit, or it is no strict JSON)"
            continue
        if pending is not None:
            if body["kind"] == "start" and out.starts:
                out.notes.append(f"{pending}; the run was killed there and continued")
            else:
                out.problems.append(pending)
            pending = None
        _take(out, body, number)
    if pending is not None:
        out.problems.append(pending)
    if tail:
        out.torn = True
        out.problems.append(f"truncated: its last line ({number + 1}) is cut after {len(tail)} bytes; the run was killed while "
                            "writing it, or is still running")
    if not data:
        out.problems.append("empty: no step was recorded")
    elif not out.starts:
        out.problems.append("it has no start line, so nothing says which run it is")
    if out.starts and out.end is None and not out.torn:
        last = max(out.steps, default=None)
        out.problems.append("it has no end line: " + ("no step was recorded" if last is None else f"the run stopped after step {last}")
                            + ", or is still running")
    _count(out)
    return out


def _count(out: Ledger) -> None:
    """Is every step there that was done, and none that was not. Step numbers may be anything: no range is walked."""
    end = out.end or {}
    done = end.get("steps")
    stop = max(out.steps, default=-1) + 1 if done is None else max(done, max(out.steps, default=-1))
    have = sorted(s for s in out.steps if out.first_step <= s < stop)
    lost = max(0, stop - out.first_step) - len(have)
    if lost > 0:
        first = next((want for want, s in enumerate(have, out.first_step) if want != s), out.first_step + len(have))
        out.problems.append(f"step {first} is missing" + (f" and {lost - 1} more" if lost > 1 else "")
                            + (f": the run ended after {done} steps" if done is not None else ""))
    extra = [s for s, x in out.steps.items() if done is not None and (s > done or (s == done and x.get("trained") is not False))]
    if extra:
        out.problems.append(f"step {min(extra)} is there, and the run ended after {done} steps")


def _take(out: Ledger, body: dict[str, Any], number: int) -> None:
    fault = runlines.fault(body)
    if fault is not None:
        out.problems.append(f"line {number} {'' if fault.startswith('is ') else 'cannot be used: '}{fault}")
        if body["kind"] != "start":
            return
        body = {**body, **{f: {} for f in runlines.FACTS if not isinstance(body.get(f), dict)}}
        body["resumed_from"] = body["resumed_from"] if runlines.is_step(body.get("resumed_from")) else None
    if body["kind"] == "start":
        if body.get("schema") != SCHEMA or isinstance(body.get("schema"), bool):
            out.problems.append(f"line {number}: schema {body.get('schema')!r}; this version reads {SCHEMA}")
        if out.starts and body.get("resumed_from") is None:
            out.problems.append(f"line {number} starts another run; one ledger holds one run")
        elif out.starts and any(body.get(f) != out.start.get(f) for f in ("recipe", "topology")):
            out.problems.append(f"line {number} goes on with another recipe or topology than the run began with")
        out.starts.append(body)
        out.end = None
    elif body["kind"] == "end":
        if out.end is not None:
            out.problems.append(f"line {number}: a second end line")
        out.end = body
    else:
        _take_step(out, body, number)


def _take_step(out: Ledger, body: dict[str, Any], number: int) -> None:
    step = body["step"]
    part = len(out.starts) - 1
    before = max((s for s, x in out.steps.items() if x["_run"] == part), default=-1)
    if before > step:
        out.problems.append(f"line {number}: step {step} comes after step {before}: the lines were put in another order")
    if out.end is not None:
        out.problems.append(f"line {number}: step {step} comes after the end line")
    if step in out.steps:
        # A continued run may do again what the one before had done after its last checkpoint; anything else is a fault.
        resumed = out.starts[-1].get("resumed_from") if out.starts[1:] else None
        fresh = (resumed is not None and step >= resumed
                 and out.steps[step]["_run"] < part)
        if not fresh:
            out.problems.append(f"line {number}: step {step} is there twice")
            return
        out.replayed.append((step, out.steps[step], body))
    body["_run"] = part
    out.steps[step] = body
