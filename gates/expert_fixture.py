"""The fixture of the gates on experts: a harness by number of ranks, one up at a time, shared by tests that follow each other."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gates.collect import require_device
from gates.experts import default_profile, settings
from gates.fixtures import Gate
from gates.harness import Harness
from gates.profiles import find

_UP: dict[tuple[Any, ...], Harness] = {}


@pytest.fixture(scope="session")
def expert_lab() -> Iterator[dict[tuple[Any, ...], Harness]]:
    """Harnesses that are up; closed after the last test in a row that uses one (:func:`close_after`)."""
    yield _UP
    close()


def close() -> None:
    """End every harness that is up."""
    while _UP:
        _UP.popitem()[1].__exit__(None, None, None)


def close_after(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Called at the teardown of each test: eight idle ranks keep a small machine busy, so they go when nobody follows."""
    def uses(test: pytest.Item | None) -> bool:
        return "expert_lab" in getattr(test, "fixturenames", ())

    if uses(item) and not uses(nextitem):
        close()


@pytest.fixture
def expert_harness(expert_lab: dict[tuple[Any, ...], Harness]) -> Iterator[Callable[[Gate, int], Harness]]:
    """``expert_harness(gate, ranks)``: trainer ranks that share the experts, and an engine, in bf16."""
    used: list[tuple[Gate, tuple[Any, ...]]] = []

    def give(gate: Gate, ranks: int) -> Harness:
        profile = find(gate.profile or default_profile(ranks, gate.device))
        require_device(profile, gate.device)
        key = (profile.name, gate.device, ranks)
        if key not in expert_lab:
            while expert_lab:  # one at a time: eight ranks and an engine are what a small machine holds
                expert_lab.popitem()[1].__exit__(None, None, None)
            harness = Harness(profile, gate.device, profile.dtypes[0], **settings(ranks, profile.checkpoint(), profile, gate.device))
            expert_lab[key] = harness.__enter__()
        used.append((gate, key))
        expert_lab[key].in_step()
        gate.describe(model=profile.name, dtype=profile.dtypes[0])
        return expert_lab[key]

    yield give
    for gate, key in used:
        try:
            gate.describe(**{**expert_lab[key].facts(), "topology": f"tp1 pp1 ep{key[2]}"})
        except Exception:
            expert_lab.pop(key).__exit__(None, None, None)  # one side is gone
            raise
