"""The table at the end of a gate run, in plain text: it has to survive a CI log and 80 columns."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alignment.verdict import Verdict

HEAD = ("gate", "verdict", "coverage", "first bad place", "cost", "controls")


def clean(text: str) -> str:
    """One printable line: names come from other people's files and may hold escape sequences."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def row(verdict: Verdict) -> tuple[str, ...]:
    """The cells of one gate."""
    cost: Any = verdict.info.get("cost")
    mutation: Any = verdict.info.get("mutation")
    cells = (
        verdict.name,
        verdict.status.value,
        ", ".join(f"{unit} {c}" for unit, c in verdict.coverage.items()) or "nothing",
        str(verdict.first_bad) if verdict.first_bad else "-",
        f"{cost['ratio']:.2f}x" if cost else "-",
        f"{mutation['caught']}/{mutation['planted']}" if mutation else "-",
    )
    return tuple(clean(c) for c in cells)


def lines(verdicts: Sequence[Verdict], width: int = 110) -> list[str]:
    """Table rows, each followed by reason and cause where the gate is not green; cut to ``width``."""
    rows = [row(v) for v in verdicts]
    names = [r[0] for r in rows]
    rows = [(f"{r[0]} {_test(v)}".strip(), *r[1:]) if names.count(r[0]) > 1 else r
            for v, r in zip(verdicts, rows, strict=True)]
    widths = [max(len(r[i]) for r in [HEAD, *rows]) for i in range(len(HEAD))]
    spare = width - 2 * (len(HEAD) - 1)
    for column in (3, 2):  # places and coverage can be long; shorten them before anything wraps
        widths[column] = max(len(HEAD[column]), min(widths[column], spare - sum(widths) + widths[column]))
    out = [_line(HEAD, widths)]
    for verdict, cells in zip(verdicts, rows, strict=True):
        out.append(_line(cells, widths))
        if isinstance(third := verdict.info.get("third_party_by"), str):
            out.append(f"    third party: {clean(third)}")
        if not verdict.green:
            if len(cells[3]) > widths[3]:
                out.append(f"    first bad: {cells[3]}")
            if verdict.reason:
                out.append(f"    {clean(verdict.reason)}")
            out += [f"    cause: {clean(c.text)}" for c in verdict.causes[:2]]
    return out


def _test(verdict: Verdict) -> str:
    """The test's own name, to tell several tests of one gate apart."""
    return clean(str(verdict.info.get("nodeid", "")).rpartition("::")[2])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    fitted = [c if len(c) <= w else c[: max(w - 1, 0)] + "…" for c, w in zip(cells, widths, strict=True)]
    return "  ".join(f"{c:<{w}}" for c, w in zip(fitted, widths, strict=True)).rstrip()
