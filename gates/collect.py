"""What every selected gate said, and what the run as a whole says.

Pytest knows passed, failed and skipped. A gate knows PASS, FAIL, INVALID and NOT_RUN, and only PASS is green. This
module turns the one into the other: whatever is not a recorded PASS makes the test report a failure, so that ``-x``,
``--lf``, JUnit and the exit code all see it, and the exit code is forced once more at the end of the session for
whatever found a way around that (``pytest.exit(returncode=0)``, a rerun plugin, a gate that was never reached).
"""
from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from alignment.verdict import Status, Verdict, combine
from gates.devices import Decision, Machine, decide, probe
from gates.markers import PREFIX, GateMark, parse
from gates.options import Options
from gates.profiles import Profile
from vime.errors import MissingPackage, brief, plain


class NotRun(Exception):
    """Raised by a gate (or a fixture it needs) that cannot run here. The message says why."""


def require_device(profile: Profile, device: str) -> None:
    """Raise :class:`NotRun` for a profile that does not run on the device that was decided for a gate."""
    if device not in profile.devices:
        raise NotRun(f"profile {profile.name} runs on {', '.join(profile.devices)}, this gate on {device}")


@dataclasses.dataclass
class GateRun:
    """One selected gate: its markers, where it runs, and what it has said so far.

    ``records`` are the verdicts given through the fixture, ``ends`` those that pytest's own outcome adds (a raise,
    a skip). A second attempt by a rerun plugin adds to both: a failure is not forgiven by a later success.
    """

    nodeid: str
    marks: list[GateMark]
    records: list[Verdict] = dataclasses.field(default_factory=list)
    ends: list[Verdict] = dataclasses.field(default_factory=list)
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    decision: Decision | None = None
    started: float | None = None
    seconds: float | None = None
    given_up: str | None = None
    calling: bool = False
    finished: bool = False

    @property
    def name(self) -> str:
        return "+".join(m.gate for m in self.marks)

    def verdict(self) -> Verdict:
        """The gate's verdict as of now."""
        if not self.finished:
            reason = "never reached" if self.started is None else "started and did not finish"
            return Verdict(self.name, Status.NOT_RUN, reason, info=self._info())
        said = self.records + self.ends
        if not said:
            return Verdict(self.name, Status.NOT_RUN, self.given_up or "it recorded nothing: call gate.record(verdict)", info=self._info())
        if all(v.green for v in said) and (lacks := self._lacks()):
            said = [*said, Verdict(self.name, Status.NOT_RUN, lacks)]
        if len(said) == 1:
            return dataclasses.replace(said[0], name=self.name, info={**said[0].info, **self._info()})
        return combine(self.name, said, tier=tier_of(said), info=self._info())

    def _lacks(self) -> str:
        """What a gate that is green so far still owes, or nothing."""
        if self.given_up is not None:
            return self.given_up
        if all(v.info.get("third_party") for v in self.records):
            return "only a third party was recorded, which says nothing about the two sides: call gate.record(verdict)"
        if any(m.gate == "cost" for m in self.marks) and "cost" not in self.info:
            return "no cost was measured: call gate.cost(aligned, stock)"
        return ""

    def _info(self) -> dict[str, Any]:
        return {"nodeid": self.nodeid, **({"device": self.decision.device} if self.decision else {}),
                **({"seconds": self.seconds} if self.seconds is not None else {}), **self.info}

    def reached(self, what: str) -> None:
        """Note when the gate got so far, in seconds since its setup began: where the time of a slow gate goes."""
        if self.started is not None:
            self.info.setdefault("timeline", []).append([round(time.time() - self.started, 1), what])


def tier_of(verdicts: Sequence[Verdict]) -> str:
    """The lowest tier of several: one child judged at 1e-6 makes the whole a 1e-6 verdict. A third party has its own
    rounding and its own bound, which says nothing about the two sides."""
    lower = [v.tier for v in verdicts if v.tier != "exact" and not v.info.get("third_party")]
    return max(lower, key=bound) if lower else "exact"


def bound(tier: str) -> float:
    """A tier as a number, 0 for exact; one that is no number is the lowest of all."""
    if tier == "exact":
        return 0.0
    try:
        return float(tier)
    except ValueError:
        return float("inf")


class Session:
    """The gates of one pytest session. ``machine`` is looked at once, when the first gate is set up."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.runs: dict[str, GateRun] = {}
        self.unseen: list[Verdict] = []  # gates that were asked for, or hidden by a skipped module, and have no item
        self.collect_skips: list[tuple[str, str, list[str]]] = []
        self.began = time.time()
        self._machine: Machine | None = None

    # --- collection ---------------------------------------------------------------------------------------------

    def check(self, items: Sequence[pytest.Item]) -> dict[str, list[GateMark]]:
        """Validate the markers of everything collected, also of what is deselected later."""
        return {item.nodeid: marks for item in items if (marks := parse(item))}

    def of_another_device(self, items: Sequence[pytest.Item], marks: dict[str, list[GateMark]]) -> list[pytest.Item]:
        """Items of the device that ``--gate-device`` did not name, if the same gate has others for the one it named: a gate is what
        it is on that device. One without others stays, and is NOT_RUN."""
        forced = self.options.device
        here = {m.gate for found in marks.values() for m in found if m.device in (None, forced)}
        return [item for item in items if forced and (found := marks.get(item.nodeid))
                and all(m.device not in (None, forced) and m.gate in here for m in found)]

    def skipped_module(self, nodeid: str, path: Path, reason: str) -> None:
        """A module that skips itself hides its gates: remember which ones it would have brought."""
        try:
            text = path.read_text(errors="replace")
        except OSError:
            return
        names = list(dict.fromkeys(re.findall(rf"\bmark\.{PREFIX}(\w+)", text)))
        if names:
            self.collect_skips.append((nodeid, reason, names))

    def select(self, items: Sequence[pytest.Item], marks: dict[str, list[GateMark]], complete: bool) -> None:
        """The final selection is known. ``complete``: nothing was narrowed, so a hidden gate counts as selected."""
        for item in items:
            if item.nodeid in marks:
                self.runs[item.nodeid] = GateRun(item.nodeid, marks[item.nodeid])
        found = {m.gate for run in self.runs.values() for m in run.marks}
        for gate in dict.fromkeys(self.options.required + self.options.asked):
            if gate in found or (self.options.last_failed and found and gate not in self.options.required):
                continue
            why = [f"{nodeid} skipped itself: {reason}" for nodeid, reason, names in self.collect_skips if gate in names]
            self.unseen.append(Verdict(gate, Status.NOT_RUN, "; ".join(
                ["asked for, and no such gate was collected", *(why or ["no test collected here carries the marker "
                                                                        f"{PREFIX}{gate}, or it was deselected"])])))
        if complete:
            for nodeid, reason, names in self.collect_skips:
                self.unseen += [
                    Verdict(gate, Status.NOT_RUN, f"its module skipped itself: {reason}", info={"nodeid": nodeid})
                    for gate in names if gate not in self.options.required
                ]

    @property
    def active(self) -> bool:
        """False in a session that selected no gate and asked for none: the plugin then says and does nothing."""
        return bool(self.runs or self.unseen)

    # --- running ------------------------------------------------------------------------------------------------

    def setup(self, run: GateRun) -> None:
        """Decide the device before any fixture is built. Raises NotRun where the gate cannot run."""
        run.started = run.started or time.time()
        run.finished = False
        if self.options.parallel:
            raise NotRun(self.options.parallel)
        if self._machine is None:
            self._machine = probe()
        only = {m.device for m in run.marks if m.device}
        if len(only) > 1:
            raise NotRun(f"its markers name different devices: {', '.join(sorted(only))}")
        run.decision = decide(max(m.gpus for m in run.marks), self._machine,
                              forced=self.options.device, only=next(iter(only), None))
        if run.decision.device is None:
            raise NotRun(run.decision.reason)

    def judge(self, run: GateRun, report: pytest.TestReport, call: pytest.CallInfo[None]) -> None:
        """Take one phase's outcome into the gate's verdict, and that verdict into the report."""
        end = _end(report, call)
        if end is not None and not (end.status is Status.FAIL and any(not v.green for v in run.records)):
            run.ends.append(end)  # an assertion after a recorded failure says nothing new
        if run.calling:
            return  # a subtest: the gate itself goes on
        run.finished = run.finished or report.when != "setup" or not report.passed
        run.seconds = round(time.time() - (run.started or time.time()), 1)
        if report.when == "setup" and report.passed:
            return
        if hasattr(report, "wasxfail"):
            del report.wasxfail
        verdict = run.verdict()
        if not verdict.green and report.when != "teardown":
            if report.outcome != "failed" or (call.excinfo and call.excinfo.errisinstance(NotRun)):
                report.longrepr = verdict.summary()
            else:
                report.sections.append(("gate verdict", verdict.summary()))
            report.outcome = "failed"
        report.gate_status = verdict.status.value  # type: ignore[attr-defined]

    def verdict(self) -> Verdict:
        """The verdict of the run."""
        verdicts = self.verdicts()
        return combine("gates", verdicts, tier=tier_of(verdicts), info=planted_and_caught(verdicts))

    def verdicts(self) -> list[Verdict]:
        """One verdict for each gate that was selected or asked for."""
        return [r.verdict() for r in self.runs.values()] + self.unseen


#: Where pytest's config carries the session.
SESSION: pytest.StashKey[Session] = pytest.StashKey()


def planted_and_caught(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Mutation score over several gates: how many planted faults were caught, each at its place."""
    scores = [v.info["mutation"] for v in verdicts if "mutation" in v.info]
    if not scores:
        return {}
    planted, caught = sum(s["planted"] for s in scores), sum(s["caught"] for s in scores)
    return {"mutation": {"planted": planted, "caught": caught}}


def _end(report: pytest.TestReport, call: pytest.CallInfo[None]) -> Verdict | None:
    """What pytest's outcome of one phase adds to a gate's verdict, or None."""
    name = f"pytest {report.when}"
    if hasattr(report, "wasxfail"):
        if report.passed:
            return None  # it passed against expectation: its records stand
        return Verdict(name, Status.NOT_RUN, f"xfailed: {report.wasxfail or 'no reason given'}; "
                                             "an expected failure proves nothing")
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return Verdict(name, Status.NOT_RUN, "skipped: " + reason.removeprefix("Skipped: "))
    if call.excinfo is None:
        return None if report.passed else Verdict(name, Status.FAIL, str(report.longrepr).strip()[-300:], info={"raised": True})
    error = call.excinfo.value
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    if isinstance(error, NotRun) or isinstance(plain(error), MissingPackage):
        return Verdict(name, Status.NOT_RUN, str(plain(error)))
    if isinstance(error, pytest.fail.Exception) and str(error).lstrip().startswith("Timeout"):
        return Verdict(name, Status.INVALID, f"timed out, so it could not be judged ({str(error).strip()})")
    if report.when == "call" and isinstance(error, (AssertionError, pytest.fail.Exception)):
        return Verdict(name, Status.FAIL, f"raised {text}", info={"raised": True})  # no comparison's: a control does not count it as caught
    return Verdict(name, Status.INVALID, f"{report.when} raised {type(error).__name__}: {brief(error)}")
