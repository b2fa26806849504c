"""The gate markers and what may be written in them.

A marker argument that is misspelt is worse than none: ``gate_logprob(teir="1e-6")`` would silently run at another
tier. So every gate marker is checked when it is collected, before anything runs, and a wrong one is a usage error
that names the test, what was found and what is expected.
"""
from __future__ import annotations

import dataclasses
import difflib
from typing import Any

import pytest

PREFIX = "gate_"

#: Tiers a gate can be judged at. ``exact`` is zero differing elements, anything else is a named lower tier.
TIERS = ("exact", "1e-6")
DEVICES = ("cpu", "cuda")

#: Gate -> (GPUs it needs on CUDA, what it claims). The order is the order of the table at the end.
GATES: dict[str, tuple[int, str]] = {
    "rerun": (1, "the same input twice, in the same and in a fresh process, gives the same bits"),
    "batch": (1, "a row does not depend on batch size, order, chunking or prefix cache"),
    "logprob": (1, "trainer and engine give every sampled token the same log-probability"),
    "layerwise": (1, "every layer's output is the same on both sides"),
    "weights": (1, "what the engine holds after an update is what the trainer sent"),
    "cost": (1, "what alignment costs against the unaligned run, in alternating pairs"),
    "ep1": (1, "the end-to-end gate with all experts on one rank"),
    "ep2": (2, "the end-to-end gate with experts over two ranks"),
    "ep8": (8, "the end-to-end gate with experts over eight ranks"),
}


@dataclasses.dataclass(frozen=True)
class GateMark:
    """One validated gate marker.

    Attributes:
        gate: name without the prefix, e.g. ``"logprob"``.
        tier: one of :data:`TIERS`; None leaves it to ``--gate-tier``.
        device: ``"cpu"`` or ``"cuda"`` where the gate runs on that one only.
        gpus: GPUs needed on CUDA.
        profile: profile used where ``--gate-profile`` names none.
        cost_max: bound on the cost ratio (``gate_cost`` only).
    """

    gate: str
    gpus: int
    tier: str | None = None
    device: str | None = None
    profile: str | None = None
    cost_max: float | None = None


def gate_name(text: str) -> str:
    """``logprob`` or ``gate_logprob`` -> ``logprob``. Raises ValueError naming the nearest known gate."""
    name = text.removeprefix(PREFIX)
    if name not in GATES:
        near = difflib.get_close_matches(name, GATES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no gate {text!r}{hint}. Known gates: {', '.join(GATES)}")
    return name


def marker_lines() -> list[str]:
    """The lines pytest shows under ``--markers``."""
    arguments = "tier=None, device=None, gpus=None, profile=None"
    return [
        f"{PREFIX}{name}({arguments}{', cost_max=None' if name == 'cost' else ''}): gate: {claim}"
        for name, (_, claim) in GATES.items()
    ]


def _check(key: str, value: Any) -> str | None:
    """What is wrong with one argument, or None."""
    if key == "tier" and value not in TIERS:
        return f"tier is one of {', '.join(map(repr, TIERS))}"
    if key == "device" and value not in DEVICES:
        return f"device is one of {', '.join(map(repr, DEVICES))}"
    if key == "gpus" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        return "gpus is a whole number of at least 1"
    if key == "profile" and (not isinstance(value, str) or not value):
        return "profile is the name of a profile or a folder"
    if key == "cost_max" and (not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0):
        return "cost_max is a ratio above 0"
    return None


def parse(item: pytest.Item) -> list[GateMark]:
    """Every gate marker of ``item``, nearest first and each gate once. Raises pytest.UsageError on a bad one."""
    marks: dict[str, GateMark] = {}
    for mark in item.iter_markers():
        if not mark.name.startswith(PREFIX):
            continue
        name = mark.name.removeprefix(PREFIX)
        if name not in GATES:
            # Somebody else's registered marker is none of our business; an unregistered one is a misspelt gate.
            if any(line.startswith(mark.name) for line in item.config.getini("markers")):
                continue
            near = difflib.get_close_matches(name, GATES, n=1)
            hint = f" Did you mean {PREFIX}{near[0]}?" if near else ""
            raise pytest.UsageError(
                f"{item.nodeid}: there is no gate marker {mark.name!r}.{hint} "
                f"Known: {', '.join(PREFIX + g for g in GATES)}"
            )
        marks.setdefault(name, _one(item, mark, name))
    return list(marks.values())


def _one(item: pytest.Item, mark: pytest.Mark, name: str) -> GateMark:
    where = f"{item.nodeid}: {mark.name}"
    allowed = [f.name for f in dataclasses.fields(GateMark) if f.name != "gate"]
    if name != "cost":
        allowed.remove("cost_max")
    if mark.args:
        found = ", ".join(map(repr, mark.args))
        raise pytest.UsageError(f"{where} takes keyword arguments only ({', '.join(allowed)}); found {found}")
    for key, value in mark.kwargs.items():
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise pytest.UsageError(f"{where} has no argument {key!r}; expected {', '.join(allowed)}.{hint}")
        wrong = None if value is None else _check(key, value)
        if wrong:
            raise pytest.UsageError(f"{where}({key}={value!r}): {wrong}")
    return GateMark(gate=name, **{"gpus": GATES[name][0], **{k: v for k, v in mark.kwargs.items() if v is not None}})


def asked_for(expression: str) -> list[str]:
    """Gates that a ``-m`` expression asks for: making the marker true can make the expression true.

    ``gate_ep8`` and ``gate_ep8 and slow`` ask for ep8; ``not gate_ep8`` and ``slow`` ask for nothing. Whoever asks
    for a gate and gets none must not see green, so the answer decides when an empty collection is NOT_RUN.
    """
    import itertools
    import re

    from _pytest.mark.expression import Expression

    names = sorted(set(re.findall(r"[A-Za-z_][\w.:+-]*", expression)) - {"not", "and", "or", "True", "False", "None"})
    gates = [n for n in names if n.removeprefix(PREFIX) in GATES and n.startswith(PREFIX)]
    if not gates:
        return []
    if len(names) > 10:  # 2^n assignments: past this, every gate named counts as asked for
        return [n.removeprefix(PREFIX) for n in gates]
    compiled = Expression.compile(expression)

    def value(assignment: dict[str, bool]) -> bool:
        return compiled.evaluate(lambda name, /, **_: assignment.get(name, False))

    asked = []
    for gate in gates:
        others = [n for n in names if n != gate]
        for bits in itertools.product((False, True), repeat=len(others)):
            rest = dict(zip(others, bits, strict=True))
            if value({**rest, gate: True}) and not value({**rest, gate: False}):
                asked.append(gate.removeprefix(PREFIX))
                break
    return asked
