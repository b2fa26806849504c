"""The ``gate`` fixture: how a test hands its verdicts to the run, in this repository or in a team's own.

    @pytest.mark.gate_logprob
    def test_my_model(gate):
        gate.record(alignment.logprobs.compare(rollout, trainer, tier=gate.tier))
        gate.control("one ulp", Place(request="r0", position=3), compare(rollout, with_a_fault(trainer)))
        gate.happened("tokens were sampled", len(rollout) > 0)

A gate judges nothing itself: verdicts come from :mod:`alignment`.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest

from alignment.verdict import Coverage, Place, Status, Verdict
from gates.collect import SESSION, GateRun, NotRun, bound, tier_of
from gates.controls import Control
from gates.costs import median_ratio, ratio_of
from gates.options import Options


class Gate:
    """What a gate test sees of its run.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``, decided before any other fixture was built.
        profile: ``--gate-profile``, else the marker's, else None (the harness then takes its default).
        tier: ``--gate-tier``, else the marker's, else ``"exact"``.
        control_only: ``--gate-control``: plant the gate's own fault and record the verdict it gives.
    """

    def __init__(self, run: GateRun, options: Options) -> None:
        self._run = run
        self._controls: list[Control] = []
        assert run.decision is not None and run.decision.device is not None
        self.name = run.name
        self.device: str = run.decision.device
        self.profile = options.profile or next((m.profile for m in run.marks if m.profile), None)
        self._asked_tier = options.tier or next((m.tier for m in run.marks if m.tier), None)
        self.tier = self._asked_tier or "exact"
        self.cost_max = options.cost_max or next((m.cost_max for m in run.marks if m.cost_max), None)
        self.control_only = options.control

    def record(self, verdict: Verdict) -> Verdict:
        """Add one verdict to this gate; the gate is green only if all of them are. Returns it."""
        if not isinstance(verdict, Verdict):
            raise TypeError(f"gate.record takes an alignment.verdict.Verdict, found {type(verdict).__name__}: {verdict!r}")
        self._run.records.append(self._of_the_asked_tier(_consistent(verdict)))
        self.reached(verdict.name)
        return verdict

    def _of_the_asked_tier(self, verdict: Verdict) -> Verdict:
        """INVALID where a tier was asked for (by option or marker) and a green verdict comes from a lower one."""
        if not verdict.green or verdict.info.get("third_party") or self._asked_tier is None:
            return verdict
        lowest = tier_of([verdict, *_parts(verdict)])
        if bound(lowest) <= bound(self._asked_tier):
            return verdict
        return dataclasses.replace(verdict, status=Status.INVALID, reason=f"judged at tier {lowest}, and {self._asked_tier} was asked "
                                   "for: pass tier=gate.tier to the comparison")

    def third_party(self, verdict: Verdict) -> Verdict:
        """Add what an implementation that shares nothing with the two sides says, at the bound of its own rounding.

        It has to be green too; its tier does not lower the gate's own.
        """
        verdict.info["third_party"] = True
        return self.record(verdict)

    def control(self, name: str, planted: Place, said: Verdict, *, anywhere: bool = False) -> bool:
        """Record what the gate's own comparison ``said`` about the fault ``name`` planted at ``planted``.

        A fault that is not reported as FAIL at that place makes the gate INVALID. Returns whether it was caught. A fault
        that has no place takes an empty one **and** ``anywhere=True``; an empty place alone is a ValueError.
        """
        if not isinstance(planted, Place) or not isinstance(said, Verdict):
            raise TypeError(f"gate.control takes a name, a Place and a Verdict, found {planted!r} and {said!r}")
        control = Control(name, planted, said, anywhere)
        self._controls.append(control)
        self.reached(f"control: {name}")
        if not control.caught:
            self._run.records.append(control.verdict())
        self._run.info["controls"] = [c.to_dict() for c in self._controls]
        self._run.info["mutation"] = {"planted": len(self._controls), "caught": sum(c.caught for c in self._controls)}
        return control.caught

    def happened(self, claim: str, value: Any) -> None:
        """Say that something happened (weights changed, rewards varied, cache hits > 0). A false ``value`` is NOT_RUN."""
        self._run.info.setdefault("happened", {})[claim] = value
        self.reached(claim)
        if value != value or not value:  # NaN is true, and nothing happened NaN times
            self._run.records.append(Verdict(claim, Status.NOT_RUN, f"{claim}: this did not happen (found {value!r}), "
                                                                    "so the gate proves nothing about it"))

    def cost(self, aligned_s: Sequence[float], stock_s: Sequence[float], what: str = "") -> Verdict:
        """Record the cost ratio of alternating pairs (seconds each, same order) and judge it against ``cost_max``.

        The cost is the median of the pairs' ratios (:func:`gates.costs.ratio_of`).
        """
        if len(aligned_s) != len(stock_s) or not aligned_s or not all(
                math.isfinite(s) and s > 0 for s in (*aligned_s, *stock_s)):
            raise ValueError(f"cost takes pairs of times above 0, found {list(aligned_s)} and {list(stock_s)}")
        numbers = ratio_of(aligned_s, stock_s) | {"what": what}
        ratio = median_ratio(aligned_s, stock_s)  # judged as it is, shown rounded
        costs = self._run.info.setdefault("costs", [])
        costs.append(numbers)
        self._run.info["cost"] = max(costs, key=lambda c: c["ratio"])  # one number for the table: the dearest part
        over = self.cost_max is not None and ratio > self.cost_max
        return self.record(Verdict(
            f"cost {what}".strip(), Status.FAIL if over else Status.PASS,
            f"{ratio:.2f}x the unaligned run, {self.cost_max:g}x allowed" if over else "", tier=self.tier,
            coverage={"pairs": Coverage(len(aligned_s), len(aligned_s))}, stats=numbers))

    def reached(self, what: str) -> None:
        """Note in the report when the gate got so far, in seconds since its setup began."""
        self._run.reached(what)

    def describe(self, **facts: Any) -> None:
        """Facts for the report and the evidence: ``contract``, ``versions``, ``kernels``, ``model``, ``topology`` ..."""
        self._run.info.update(facts)

    def not_run(self, reason: str) -> NoReturn:
        """End this gate as NOT_RUN."""
        self._run.given_up = reason  # also where the test catches what is raised here
        raise NotRun(reason)


def _parts(verdict: Verdict) -> list[Verdict]:
    """All verdicts that a verdict was combined from, but those of a third party."""
    return [p for c in verdict.children if not c.info.get("third_party") for p in (c, *_parts(c))]


def _consistent(verdict: Verdict) -> Verdict:
    """The verdict as of now (what is done to it later does not count), INVALID where it says PASS and something else too."""
    if not verdict.green:
        return dataclasses.replace(verdict)
    red = next((c for c in verdict.children if not c.green), None)
    against = f"a part of it is {red.status} ({red.name})" if red is not None else (
        f"its first bad place is {verdict.first_bad}" if verdict.first_bad is not None else
        f"{verdict.stats['differing']} differ" if verdict.tier == "exact" and verdict.stats.get("differing") else "")
    if not against:
        return dataclasses.replace(verdict)
    return dataclasses.replace(verdict, status=Status.INVALID, reason=f"it says PASS, and {against}")


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> Gate:
    """The handle of a gate test: ``gate.record(verdict)``, ``gate.device``, ``gate.profile``, ``gate.tier``."""
    session = request.config.stash[SESSION]
    run = session.runs.get(request.node.nodeid)
    if run is None:
        raise pytest.UsageError(f"{request.node.nodeid} uses the gate fixture and carries no gate marker; "
                                "add one, e.g. @pytest.mark.gate_logprob")
    return Gate(run, session.options)
