"""``vime gate``: the packaged gates through pytest in a process of their own, and their verdict as an exit code."""
from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from alignment.verdict import Status
from vime.errors import WRONG_USAGE, BadInput


class UnknownGate(BadInput):
    """No gate of that name."""


def run(names: Sequence[str], profile: str | None, device: str | None, tier: str | None, report: str | None, control: bool,
        cost_max: float | None, as_json: bool) -> int:
    """Run the gates; pytest's output goes to the terminal (to standard error with ``as_json``). Returns the exit code."""
    from gates.markers import gate_name

    try:
        wanted = [gate_name(name) for name in names]
    except ValueError as error:
        raise UnknownGate(str(error)) from None
    with tempfile.TemporaryDirectory(prefix="vime-gate-") as scratch:
        folder = Path(report) if report else Path(scratch)
        command = [sys.executable, "-m", "pytest", "--pyargs", "gates", "-m", " or ".join(f"gate_{n}" for n in wanted),
                   "--gate-report", str(folder), "-p", "no:cacheprovider"]
        for flag, value in (("--gate-profile", profile), ("--gate-device", device), ("--gate-tier", tier), ("--gate-cost-max", cost_max)):
            if value is not None:
                command += [flag, str(value)]
        for name in wanted:
            command += ["--gate-require", name]
        if control:
            command.append("--gate-control")
        before = _stamp(folder / "report.json")
        code = subprocess.run(command, stdout=sys.stderr if as_json else None, check=False).returncode
        if code == 4:  # pytest's own: wrong usage, its message is above
            return WRONG_USAGE
        path = folder / "report.json"
        if not path.is_file() or _stamp(path) == before:
            return Status.NOT_RUN.exit_code
        text = path.read_text(encoding="utf-8")
    if as_json:
        sys.stdout.write(text + "\n")
    return Status(json.loads(text)["verdict"]).exit_code


def _stamp(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.is_file() else None
