"""One verdict, three readers: a person at a terminal, a program, and whoever opens the page a week later.

The page is one file: no network, no fonts, no scripts from elsewhere, so that it can be attached to a job and opened
on a phone. Names in a verdict come from other people's files; everything is escaped, on the terminal as well.
"""
from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from alignment.drawing import draw
from alignment.pictures import walk
from alignment.verdict import Verdict

if TYPE_CHECKING:
    from rich.console import Console

# Keys of Verdict.info that the report shows in a place of their own.
_SHOWN = {"pictures", "contract", "environment", "versions", "hardware", "controls", "mutation", "cost", "happened",
          "nodeid", "device", "kernels"}
_STYLE = {"PASS": "bold green", "FAIL": "bold red", "INVALID": "bold magenta", "NOT_RUN": "bold yellow"}


def one_line(text: object) -> str:
    """Printable text without line breaks or escape sequences: what cannot be printed is shown as ``\\xNN``."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(text))


def to_json(verdict: Verdict, **extra: Any) -> str:
    """The verdict as strict JSON (a non-finite number becomes its name), with ``extra`` top-level fields."""
    return json.dumps(strict({**verdict.to_dict(), **extra}), indent=1, default=str, allow_nan=False)


def strict(value: Any) -> Any:
    """``value`` in a form that strict JSON can hold: a non-finite number becomes its name, keys become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
    return value


def terminal(verdict: Verdict, console: Console | None = None) -> None:
    """Print a verdict and its children in at most a screen: a table, then the first bad place and its causes."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("check", "verdict", "compared", "first bad place", "cost"):
        table.add_column(name, overflow="fold")
    rows = verdict.children or [verdict]
    shown = [v for v in rows if not v.green][:12]
    shown += [v for v in rows if v.green][:max(4, 16 - len(shown))]
    for v in (r for r in rows if any(r is s for s in shown)):
        table.add_row(Text(one_line(v.name)), Text(v.status.value, _STYLE[v.status.value]), Text(one_line(_cover(v))),
                      Text(one_line(v.first_bad) if v.first_bad else "-"), Text(_cost(v)))
    console.print(table)
    if len(shown) < len(rows):
        console.print(f"({len(rows) - len(shown)} more, {sum(not v.green for v in rows) - sum(not v.green for v in shown)}"
                      " of them not green)")
    head = Text(verdict.status.value, _STYLE[verdict.status.value])
    console.print(head + Text(f"  {one_line(verdict.name)}  ({one_line(verdict.tier)}; compared {one_line(_cover(verdict))})"))
    if verdict.reason:
        console.print(Text(f"  {one_line(verdict.reason)}"))
    if verdict.first_bad is not None:
        console.print(Text(f"  first bad: {one_line(verdict.first_bad)}"))
    for cause in verdict.causes[:3]:
        console.print(Text(f"  cause: {one_line(cause.text)}"))
    if verdict.downstream:
        console.print(Text(f"  downstream: {len(verdict.downstream)} further place(s)"))


def html(verdict: Verdict, *, title: str = "", facts: dict[str, Any] | None = None) -> str:
    """The page, as one string.

    Args:
        verdict: the whole; its children are the rows of the table.
        title: heading; the verdict's name by default.
        facts: heading -> (nested) mapping, e.g. ``{"environment": {...}, "contract": {...}}``; shown as tables.
            What the verdicts carry under ``contract``, ``environment``, ``versions``, ``hardware`` and ``kernels``
            is added.
    """
    import jinja2

    env = jinja2.Environment(loader=jinja2.PackageLoader("alignment", "templates"), autoescape=True,
                             trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    env.filters["line"] = one_line
    rows = verdict.children or [verdict]
    pictures = [{"of": " · ".join(dict.fromkeys(n for n in (verdict.name, _test(row), owner.name) if n)), "green": owner.green,
                 **draw(p)} for row in rows for owner, p in walk(row)]
    return env.get_template("report.html.jinja").render(
        title=title or verdict.name, whole=verdict, rows=[_row(v) for v in rows], pictures=[p for p in pictures if not p["green"]],
        equal=[p for p in pictures if p["green"]],
        bad=next((v for v in _flat(verdict) if not v.children and not v.green), None),
        score=verdict.info.get("mutation"), facts=_facts(verdict, facts or {}), green=sum(v.green for v in rows),
    )


def _test(v: Verdict) -> str:
    """The row's own name, and the test's where there is one: several gates draw the same picture."""
    return f"{v.name} {str(v.info.get('nodeid', '')).rpartition('::')[2]}".strip()


def _row(v: Verdict) -> dict[str, Any]:
    return {
        "v": v, "nodeid": v.info.get("nodeid"), "cover": _cover(v), "cost": _cost(v), "controls": v.info.get("controls", []),
        "mutation": v.info.get("mutation"), "happened": v.info.get("happened", {}),
        "stats": {k: _short(x) for k, x in v.stats.items()},
        "info": {k: _short(x) for k, x in v.info.items() if k not in _SHOWN},
        "parts": [c for c in _flat(v) if c is not v and not c.children][:60],
        "parts_total": sum(1 for c in _flat(v) if c is not v and not c.children),
    }


def _flat(v: Verdict) -> list[Verdict]:
    return [v, *(x for c in v.children for x in _flat(c))]


def _cover(v: Verdict) -> str:
    return ", ".join(f"{unit} {c}" for unit, c in v.coverage.items()) or "nothing"


def _cost(v: Verdict) -> str:
    cost = v.info.get("cost")
    return f"{cost['ratio']:.2f}x" if isinstance(cost, dict) and "ratio" in cost else "-"


def _short(value: Any, limit: int = 300) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else json.dumps(value, default=str) if isinstance(
        value, (dict, list, tuple)) else str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _facts(verdict: Verdict, given: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Heading -> rows of dotted name and value; one table for equal facts of several gates."""
    tables: dict[str, dict[str, str]] = {}
    sources = [(k, v) for k, v in given.items()]
    for v in _flat(verdict):
        sources += [(k, v.info[k]) for k in ("contract", "environment", "versions", "hardware", "kernels") if k in v.info]
    for heading, value in sources:
        table = tables.setdefault(heading, {})
        for name, cell in _dotted(value if isinstance(value, dict) else {"value": value}):
            table.setdefault(name, cell)
    return [(heading, list(table.items())) for heading, table in tables.items() if table]


def _dotted(value: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    for key, item in value.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        out += _dotted(item, name) if isinstance(item, dict) and item else [(name, _short(item))]
    return out
