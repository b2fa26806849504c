"""What a comparison says, and nothing else.

A comparison that only answers "equal" or "not equal" can be green for the wrong reason: it compared
nothing, it compared NaN with NaN, it compared half. So there are four answers, a verdict always says how
much was compared of how much, and a verdict that is not PASS names the first bad place.

    PASS      everything expected was compared, and is equal under the tier
    FAIL      compared and different; ``first_bad`` is the first place
    INVALID   could not be judged: non-finite, dtype, shape or key set differ, keys collide, coverage < 100 %
    NOT_RUN   nothing was compared

Only PASS is green.
"""
from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterable
from typing import Any


class Status(enum.StrEnum):
    """The four answers, as strings so that they read the same in JSON, JUnit and the terminal."""

    PASS = "PASS"
    FAIL = "FAIL"
    INVALID = "INVALID"
    NOT_RUN = "NOT_RUN"

    @property
    def exit_code(self) -> int:
        """Exit code of the command line: 0, 1, 10, 11 (2 is wrong usage; 3 to 5 belong to pytest)."""
        return {"PASS": 0, "FAIL": 1, "INVALID": 10, "NOT_RUN": 11}[self.value]

    @property
    def green(self) -> bool:
        return self is Status.PASS

    def __str__(self) -> str:
        return self.value


# A real difference is the strongest news; then "cannot be judged"; then "was not judged".
_SEVERITY = {Status.FAIL: 3, Status.INVALID: 2, Status.NOT_RUN: 1, Status.PASS: 0}


def worst(statuses: Iterable[Status]) -> Status:
    """The status of a set of verdicts. An empty set compared nothing: NOT_RUN, never PASS."""
    statuses = list(statuses)
    return max(statuses, key=_SEVERITY.__getitem__) if statuses else Status.NOT_RUN


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How much was compared of how much was expected, in one unit (tokens, layers, tensors, elements, ranks)."""

    compared: int
    expected: int

    @property
    def complete(self) -> bool:
        """True only if something was expected and all of it was compared, no less and no more."""
        return self.expected > 0 and self.compared == self.expected

    def __str__(self) -> str:
        return f"{self.compared}/{self.expected}"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a difference is. Every field is optional; the set ones are printed in this order.

    ``rank`` is the full parallel rank, e.g. ``{"dp": 0, "pp": 1, "tp": 0, "ep": 3}``; ``index`` the index of the
    element in its tensor; ``run`` which of several runs, ``stage`` which stage of a conversion.
    """

    run: str | None = None
    step: int | None = None
    stage: str | None = None
    rank: dict[str, int] | None = None
    layer: int | None = None
    module: str | None = None
    tensor: str | None = None
    expert: int | None = None
    slot: int | None = None
    request: str | None = None
    position: int | None = None
    token: int | None = None
    row: int | None = None
    index: tuple[int, ...] | None = None

    def __str__(self) -> str:
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if field.name == "rank":
                value = "/".join(f"{k}{v}" for k, v in value.items())
            elif field.name == "index":
                value = "[" + ",".join(map(str, value)) + "]"
            parts.append(f"{field.name} {value}")
        return ", ".join(parts) or "(no place)"

    def to_dict(self) -> dict[str, Any]:
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) is not None}
        if "index" in out:
            out["index"] = list(out["index"])
        return out

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Place:
        known = {f.name for f in dataclasses.fields(cls)}
        data = {k: v for k, v in data.items() if k in known}
        if data.get("index") is not None:
            data["index"] = tuple(data["index"])
        return cls(**data)


@dataclasses.dataclass(frozen=True)
class Cause:
    """A likely cause. It explains a verdict; it never changes one.

    ``kind`` is a stable identifier (``temperature``, ``stale``, ``expert_permutation`` ...), ``text`` one line for
    a person, ``evidence`` the numbers the text rests on, ``residual`` what the cause leaves unexplained
    (0.0: everything).
    """

    kind: str
    text: str
    residual: float | None = None
    evidence: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass
class Verdict:
    """The result of one comparison.

    ``name`` says what was compared. ``tier`` is ``"exact"`` or a named bound such as ``"1e-6"``. ``coverage`` maps a
    unit to a :class:`Coverage`; a PASS with an incomplete one is turned into INVALID (something compared) or
    NOT_RUN (nothing compared) on construction, so that partial is never green. ``downstream`` lists places that
    differ only after ``first_bad``. ``stats`` holds numbers (differing, max, mean ...), ``info`` anything else that
    is worth printing. ``children`` are the verdicts this one was combined from.
    """

    name: str
    status: Status
    reason: str = ""
    tier: str = "exact"
    coverage: dict[str, Coverage] = dataclasses.field(default_factory=dict)
    first_bad: Place | None = None
    causes: list[Cause] = dataclasses.field(default_factory=list)
    downstream: list[Place] = dataclasses.field(default_factory=list)
    stats: dict[str, Any] = dataclasses.field(default_factory=dict)
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    children: list[Verdict] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.status = Status(self.status)
        if self.status is not Status.PASS:
            return
        if not self.coverage or all(c.compared == 0 for c in self.coverage.values()):
            self.status = Status.NOT_RUN
            self.reason = self.reason or "nothing was compared"
            return
        gaps = [f"{unit} {c}" for unit, c in self.coverage.items() if not c.complete]
        if gaps:
            self.status = Status.INVALID
            self.reason = "coverage is not complete: " + ", ".join(gaps)

    @property
    def green(self) -> bool:
        return self.status.green

    @property
    def exit_code(self) -> int:
        return self.status.exit_code

    @property
    def cause(self) -> str | None:
        """The likeliest cause, as one line, or None."""
        return self.causes[0].text if self.causes else None

    def __bool__(self) -> bool:
        """Refused: ``if verdict`` would read every object as true. Use ``verdict.green``."""
        raise TypeError("a Verdict has four values; use .green or compare .status")

    def summary(self) -> str:
        """One screen at most: status, name, coverage, first bad place, cause."""
        cover = ", ".join(f"{unit} {c}" for unit, c in self.coverage.items()) or "nothing"
        lines = [f"{self.status}  {self.name}  ({self.tier}; compared {cover})"]
        if self.reason:
            lines.append(f"  {self.reason}")
        if self.first_bad is not None:
            lines.append(f"  first bad: {self.first_bad}")
        lines += [f"  cause: {c.text}" for c in self.causes[:3]]
        if self.downstream:
            lines.append(f"  downstream: {len(self.downstream)} further place(s), the first at {self.downstream[0]}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready. Carries ``verdict``, ``coverage``, ``first_bad`` and ``cause``, as every ``--json`` does."""
        return {
            "name": self.name,
            "verdict": self.status.value,
            "reason": self.reason,
            "tier": self.tier,
            "coverage": {u: {"compared": c.compared, "expected": c.expected} for u, c in self.coverage.items()},
            "first_bad": None if self.first_bad is None else {**self.first_bad.to_dict(), "text": str(self.first_bad)},
            "cause": self.cause,
            "causes": [c.to_dict() for c in self.causes],
            "downstream": [p.to_dict() for p in self.downstream],
            "stats": self.stats,
            "info": self.info,
            "children": [c.to_dict() for c in self.children],
        }

    def to_json(self, **kwargs: Any) -> str:
        return json.dumps(self.to_dict(), default=str, **kwargs)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Verdict:
        """The inverse of :meth:`to_dict`. Raises ValueError or KeyError on a document of another form."""
        return cls(
            name=data["name"],
            status=Status(data["verdict"]),
            reason=data.get("reason", ""),
            tier=data.get("tier", "exact"),
            coverage={u: Coverage(c["compared"], c["expected"]) for u, c in data.get("coverage", {}).items()},
            first_bad=None if data.get("first_bad") is None else Place.from_dict(data["first_bad"]),
            causes=[Cause(**c) for c in data.get("causes", [])],
            downstream=[Place.from_dict(p) for p in data.get("downstream", [])],
            stats=data.get("stats", {}),
            info=data.get("info", {}),
            children=[cls.from_dict(c) for c in data.get("children", [])],
        )


def combine(name: str, verdicts: Iterable[Verdict], **kwargs: Any) -> Verdict:
    """One verdict for several: the worst status, summed coverage, the first bad place of the first worst child.

    Children keep their order, which must be the order of causation (inputs before outputs, step 0 before step 1):
    the first child that is not green gives the place, all later ones are downstream.
    """
    children = list(verdicts)
    coverage: dict[str, Coverage] = {}
    for child in children:
        for unit, c in child.coverage.items():
            old = coverage.get(unit, Coverage(0, 0))
            coverage[unit] = Coverage(old.compared + c.compared, old.expected + c.expected)
    status = worst(c.status for c in children)
    bad = [c for c in children if c.status is not Status.PASS]
    lead = next((c for c in bad if c.status is status), None)
    return Verdict(
        name=name,
        status=status,
        reason="" if lead is None else f"{lead.name}: {lead.reason}" if lead.reason else lead.name,
        coverage=coverage,
        first_bad=None if lead is None else lead.first_bad,
        causes=[] if lead is None else list(lead.causes),
        downstream=([] if lead is None else list(lead.downstream))
        + [c.first_bad for c in bad if c is not lead and c.first_bad],
        children=children,
        **kwargs,
    )
