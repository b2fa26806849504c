"""The subjects of the packaged gates: a harness a dtype, shared by all gates of the session."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gates.collect import require_device
from gates.devices import decide, probe
from gates.expert_fixture import expert_harness, expert_lab
from gates.fixtures import Gate
from gates.profiles import Profile, UnknownProfile, find

__all__ = ["expert_harness", "expert_lab"]

DEFAULT = "smollm2-135m"


def _profile(config: pytest.Config) -> Profile:
    try:
        return find(DEFAULT if (name := config.getoption("gate_profile")) is None else name)
    except UnknownProfile as err:
        raise pytest.UsageError(f"--gate-profile: {err}") from None


def pytest_configure(config: pytest.Config) -> None:
    _profile(config)  # a misspelt profile is a usage error before anything is collected


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every gate runs in each dtype of its profile on the device; gates of one dtype follow each other and share one harness."""
    if "dtype" in metafunc.fixturenames and metafunc.module.__name__.partition(".")[0] == "gates":
        profile = _profile(metafunc.config)
        on_gpus = decide(1, probe(), forced=metafunc.config.getoption("gate_device")).device == "cuda"
        metafunc.parametrize("dtype", profile.cuda_dtypes if on_gpus else profile.dtypes, scope="session")


class Lab:
    """Brings harnesses up when a gate first asks, and down when another dtype's turn comes."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._open: dict[tuple[Any, ...], Any] = {}

    def harness(self, device: str, dtype: str, **changes: Any) -> Any:
        """The harness of these settings; those of other dtypes are closed first."""
        from gates.harness import Harness

        key = (device, dtype, tuple(sorted(changes.items())))
        if key not in self._open:
            self.close([k for k in self._open if k[:2] != key[:2]])
            self._open[key] = Harness(self.profile, device, dtype, **changes).__enter__()
        return self._open[key]

    def drop(self, harness: Any) -> None:
        """Close one harness now."""
        self.close([k for k, h in self._open.items() if h is harness])

    def close(self, keys: list[tuple[Any, ...]] | None = None) -> None:
        for key in list(self._open) if keys is None else keys:
            self._open.pop(key).__exit__(None, None, None)


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    one = Lab(_profile(request.config))
    yield one
    one.close()


@pytest.fixture
def harness(gate: Gate, lab: Lab, dtype: str) -> Any:
    """Trainer and engine of the session's profile, on the device that was decided for this gate."""
    require_device(lab.profile, gate.device)
    one = lab.harness(gate.device, dtype)
    one.in_step()
    gate.reached("trainer and engine are up")
    gate.describe(model=lab.profile.name, dtype=dtype)
    yield one
    try:
        gate.describe(**one.facts())
    except Exception:
        lab.drop(one)  # one side is gone; the next gate gets a fresh pair
        raise
