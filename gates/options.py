"""The ``--gate-*`` options, validated before anything is collected."""
from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path

import pytest

from gates.markers import DEVICES, TIERS, asked_for, gate_name
from gates.profiles import UnknownProfile, find


def _gate(text: str) -> str:
    try:
        return gate_name(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(str(err)) from None


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"a ratio above 0 is expected, e.g. 1.3; found {text!r}")
    return value


def add(parser: pytest.Parser) -> None:
    """Register the options. Pinned by a test: the names and the help text are part of the promise."""
    group = parser.getgroup("vime gates", "vime gates")
    group.addoption("--gate-device", choices=DEVICES, default=None, metavar="{cpu,cuda}",
                    help="Force a device. A forced device that is missing is NOT_RUN, never a skip. "
                         "Default: CUDA where enough GPUs are visible, CPU only where there is no GPU and no driver.")
    group.addoption("--gate-profile", default=None, metavar="NAME",
                    help="Profile, or a folder with a Hugging Face checkpoint. Default: each gate's own.")
    group.addoption("--gate-tier", choices=TIERS, default=None, metavar="{exact,1e-6}",
                    help="Judge at this tier. Default: each gate's own, else exact.")
    group.addoption("--gate-report", default=None, metavar="DIR",
                    help="Write report.json, report.html and evidence.json to DIR.")
    group.addoption("--gate-cost-max", type=_ratio, default=None, metavar="RATIO",
                    help="Fail a cost gate whose aligned run takes more than RATIO times the unaligned one.")
    group.addoption("--gate-require", type=_gate, action="append", default=[], metavar="NAME",
                    help="This gate has to run: NOT_RUN and exit 1 if it did not. Repeatable.")
    group.addoption("--gate-control", action="store_true", default=False,
                    help="Plant each gate's own fault: the gate must FAIL at the planted place, exit 1.")


@dataclasses.dataclass(frozen=True)
class Options:
    """The ``--gate-*`` options of this run.

    ``required`` are the gates of ``--gate-require``, ``asked`` those that ``-m`` asks for; ``last_failed`` says that
    ``--lf`` narrows the latter. ``parallel`` is the reason why gates cannot run here, or None.
    """

    device: str | None
    profile: str | None
    tier: str | None
    report: Path | None
    cost_max: float | None
    control: bool
    required: tuple[str, ...]
    asked: tuple[str, ...]
    last_failed: bool
    parallel: str | None

    @classmethod
    def read(cls, config: pytest.Config) -> Options:
        """Read and check. Raises pytest.UsageError on an unknown profile and a report folder that cannot be one."""
        get = config.getoption
        try:
            find("smollm2-135m" if get("gate_profile") is None else get("gate_profile"))
        except UnknownProfile as err:
            raise pytest.UsageError(f"--gate-profile: {err}") from None
        report = get("gate_report")
        if report is not None:
            report = Path(report).absolute()
            if report.exists() and not report.is_dir():
                raise pytest.UsageError(f"--gate-report: {str(report)!r} exists and is not a folder")
        return cls(
            device=get("gate_device"), profile=get("gate_profile"), tier=get("gate_tier"), report=report,
            cost_max=get("gate_cost_max"), control=get("gate_control"),
            required=tuple(dict.fromkeys(get("gate_require"))), asked=tuple(asked_for(get("markexpr", "") or "")),
            last_failed=bool(get("lf", False)), parallel=_parallel(config),
        )


def _parallel(config: pytest.Config) -> str | None:
    """Why gates cannot run here: pytest-xdist is spreading the tests over processes. None where it is not."""
    if not hasattr(config, "workerinput") and config.getoption("dist", "no") == "no":
        return None
    return ("gates do not run under pytest-xdist: they share one engine and one pool of ranks, and two at a time "
            "would measure each other. Run them without -n (or with -n0).")
