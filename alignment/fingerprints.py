"""Facts that must be equal before a number is compared: configurations, hash seeds, contracts.

Two ranks may agree on every bit of one input and still run different kernels; the next input tells them apart. So a
differing fact is a FAIL of its own, whatever the numbers say.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alignment.errors import InputError, KeyCollision
from alignment.verdict import Cause, Coverage, Place, Status, Verdict


def flat(facts: Any, prefix: str = "") -> dict[str, Any]:
    """Nested facts under dotted names. Raises KeyCollision where two facts get one name (1 and "1", or "a.b" beside b of a)."""
    if not isinstance(facts, Mapping):
        return {prefix or "value": facts}
    out: dict[str, Any] = {}
    for key, value in facts.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        for field, fact in (flat(value, name) if isinstance(value, Mapping) else {name: value}).items():
            if field in out:
                raise KeyCollision(f"two facts are named {field!r}", "one value a name", "rename one of them")
            out[field] = fact
    return out


def judge(sides: Mapping[Any, Any], *, what: str = "config", name: str | None = None, side: str = "rank") -> Verdict:
    """Compare the facts of several ranks or processes, ``{rank: {op: {field: value}}}``, field by field.

    A fact that one side lacks is a difference. Fewer than two sides are NOT_RUN: one process always agrees with
    itself. ``side`` is what a key of ``sides`` is called ("rank", "process").
    """
    name = name or f"{what} fingerprint"
    if not isinstance(sides, Mapping):
        raise InputError(f"sides of type {type(sides).__name__}", f"a mapping {side} -> facts")
    table = {key: {f: plain(v) for f, v in flat(facts).items()} for key, facts in sides.items()}
    fields = list(dict.fromkeys(f for facts in table.values() for f in facts))
    known = any(v is not None for facts in table.values() for v in facts.values())
    if len(table) < 2 or not known:
        text = f"{len(table)} {side}(s): one alone always agrees with itself" if known else f"no {what} was recorded"
        return Verdict(name, Status.NOT_RUN, text, coverage={f"{side}s": Coverage(0, max(len(table), 2))})
    keys = list(table)
    faults: list[tuple[Place, str, Cause]] = []
    missing = object()
    for field in fields:
        first = next(k for k in keys if field in table[k])
        for key in (k for k in keys if k != first):
            a, b = table[first][field], table[key].get(field, missing)
            if b is missing or not _same(a, b):
                shown = "nothing" if b is missing else _short(b)
                text = f"{what} fingerprint {_label(side, first)}≠{_label(side, key)} ({_tail(field)} {_short(a)} vs {shown})"
                if "." not in field:
                    text = f"{what} fingerprint: {field} {_label(side, first)}≠{_label(side, key)} ({_short(a)} vs {shown})"
                rank = {side: int(key)} if isinstance(key, int) else None
                place = Place(module=field.rpartition(".")[0] or field, rank=rank, run=None if rank else str(key))
                faults.append((place, text, Cause(f"{what}_fingerprint", text, 0.0, {"field": field, "a": _short(a), "b": shown})))
                break
    facts = sum(len(t) for t in table.values())
    return Verdict(
        name, Status.FAIL if faults else Status.PASS, faults[0][1] if faults else "",
        coverage={"facts": Coverage(facts, len(fields) * len(table)) if not faults else Coverage(facts, facts),
                  f"{side}s": Coverage(len(table), len(table))},
        first_bad=faults[0][0] if faults else None, causes=[f[2] for f in faults[:3]], downstream=[f[0] for f in faults[1:]],
        stats={"fields_differing": len(faults)},
    )  # fmt: skip


def plain(value: Any) -> Any:
    """Arrays and tensors as lists, tuples as JSON keeps them: what a fact is written in is no difference."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def _same(a: Any, b: Any) -> bool:
    """Equal and of one type, also inside lists: [1] is neither [True] nor [1.0]."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _label(side: str, key: Any) -> str:
    return f"{side}{key}" if isinstance(key, int) else str(key) if str(key).startswith(side) else f"{side} {key}"


def _tail(field: str) -> str:
    return field.rpartition(".")[2]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
