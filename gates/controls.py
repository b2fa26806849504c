"""Negative controls: a gate is worth its planted faults.

A control is the gate's own comparison with one fault planted on one side. It is caught only if the verdict is FAIL
**and** names the planted place; red at the wrong place, or INVALID because everything broke, is not caught.
"""
from __future__ import annotations

import dataclasses

from alignment.verdict import Place, Status, Verdict


@dataclasses.dataclass(frozen=True)
class Control:
    """One planted fault and what the gate said about it. ``expected`` holds the fields of Place that must match.

    A fault without a place of its own (alignment switched off altogether) has ``anywhere``: any place will do, and the
    report says so. Raises ValueError for an empty place without it, which would accept every FAIL unnoticed.
    """

    name: str
    expected: Place
    said: Verdict
    anywhere: bool = False

    def __post_init__(self) -> None:
        if not self.expected.to_dict() and not self.anywhere:
            raise ValueError(f"control {self.name}: its place is empty, so a FAIL anywhere would count as caught; expected is the place "
                             "where the fault was planted, or anywhere=True where it has none")
        if self.expected.to_dict() and self.anywhere:
            raise ValueError(f"control {self.name}: planted at {self.expected} and anywhere; expected is one of the two")

    @property
    def caught(self) -> bool:
        """True if the gate failed at the planted place."""
        return self.said.status is Status.FAIL and self.said.first_bad is not None and self.miss() is None

    def miss(self) -> str | None:
        """How the verdict's place misses the planted one, or None where every expected field matches."""
        found = (self.said.first_bad or Place()).to_dict()
        if not found:
            return "reported no place"
        wrong = {k: (v, found.get(k)) for k, v in self.expected.to_dict().items() if found.get(k) != v}
        if not wrong:
            return None
        return ", ".join(f"{k}: planted at {want!r}, reported {got!r}" for k, (want, got) in wrong.items())

    def verdict(self) -> Verdict:
        """What the control says about the gate: INVALID where the gate did not catch its own fault."""
        if self.caught:
            raise ValueError(f"control {self.name} was caught; it adds no verdict")
        if self.said.status is not Status.FAIL:
            how = f"the gate said {self.said.status} ({self.said.reason or 'no reason'})"
        else:
            how = f"the gate failed elsewhere ({self.miss()})"
        return Verdict(f"control {self.name}", Status.INVALID,
                       f"planted {self.name} {'anywhere' if self.anywhere else f'at {self.expected}'}, and {how}: a gate that misses its "
                       "own fault proves nothing", first_bad=None if self.anywhere else self.expected)

    def to_dict(self) -> dict[str, object]:
        return {"name": self.name, "caught": self.caught, "planted": "anywhere" if self.anywhere else str(self.expected),
                "verdict": str(self.said.status), "first_bad": str(self.said.first_bad) if self.said.first_bad else None}
