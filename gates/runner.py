"""Gates from a program: run the packaged ones in a pytest process and read what they said.

``vime gate`` is this function with a command line around it. The report file is the witness, not the exit code: a
process that was killed, or that left behind pytest's back, has written that it did not finish.
"""
from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from alignment.verdict import Status, Verdict, combine
from gates.markers import GATES, PREFIX, gate_name
from gates.profiles import UnknownProfile, absolute, find
from vime.commands.output import OutputUnusable, require_folder

#: Set for the pytest process where nobody asked for a report: its folder is gone when a person could read of it.
TEMPORARY = "VIME_GATES_TEMPORARY"
_HOME = Path(__file__).resolve().parent.parent


class GateUsageError(ValueError):
    """The gates could not be started as asked (pytest's exit code 4). The message is pytest's."""


def run(names: Sequence[str] = (), *, profile: str | None = None, device: str | None = None, tier: str | None = None,
        report: str | os.PathLike[str] | None = None, control: bool = False, cost_max: float | None = None,
        timeout: float | None = None, output: IO[Any] | int | None = None, pytest_args: Sequence[str] = ()) -> Verdict:
    """Run gates and return the verdict of the run; its children are the gates.

    Args:
        names: gates, e.g. ``["rerun", "logprob"]``; none means every dense gate.
        profile, device, tier, report, control, cost_max: the ``--gate-*`` options.
        timeout: seconds for all of them; whatever has not finished by then is INVALID, and its processes are ended.
        output: where pytest's output goes (a file or descriptor); this process's own output by default.
        pytest_args: further arguments for pytest.

    Raises:
        GateUsageError: an unknown gate, profile or option, a report that cannot be a folder, a timeout that is no time.
    """
    try:
        wanted = [gate_name(n) for n in names or [g for g in GATES if not g.startswith("ep")]]
    except ValueError as err:
        raise GateUsageError(str(err)) from None
    if profile is not None:
        try:
            find(profile)
        except UnknownProfile as err:
            raise GateUsageError(f"--profile: {err}") from None
        profile = absolute(profile)  # pytest starts in another folder
    if timeout is not None and not 0 < timeout < threading.TIMEOUT_MAX:
        raise GateUsageError(f"--timeout {timeout:g}: seconds above 0 are expected, and no more than {threading.TIMEOUT_MAX:.0f}")
    if report is not None:
        try:
            require_folder(Path(report), "--report")
        except OutputUnusable as err:
            raise GateUsageError(str(err)) from None
    with contextlib.ExitStack() as stack:
        folder = Path(report if report is not None else stack.enter_context(tempfile.TemporaryDirectory(prefix="vime-gate-")))
        errors = stack.enter_context(tempfile.TemporaryFile("w+"))
        command = [sys.executable, "-m", "pytest", "--pyargs", "gates", "-p", "gates.plugin", "-p", "no:cacheprovider", "-q",
                   "-c", os.devnull, "--rootdir", str(_HOME),
                   "-m", " or ".join(PREFIX + n for n in wanted), "--gate-report", str(folder.absolute())]
        command += [a for n in wanted for a in ("--gate-require", n)]
        for flag, value in (("profile", profile), ("device", device), ("tier", tier), ("cost-max", cost_max)):
            command += [f"--gate-{flag}", str(value)] if value is not None else []
        command += ["--gate-control"] if control else []
        (folder / "report.json").unlink(missing_ok=True)
        # From the package's own folder, without the caller's pytest settings and plugins: what a gate means must not
        # depend on the repository it is started from.
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        environment[TEMPORARY] = "" if report is not None else "1"
        process = subprocess.Popen([*command, *pytest_args], cwd=_HOME, env=environment,
                                   stdout=output, stderr=errors, start_new_session=True)
        late = _wait(process, timeout)
        errors.seek(0)
        return read(folder, process.returncode, errors.read(), f"did not finish within {timeout:g} s" if late else "")


def _wait(process: subprocess.Popen[bytes], timeout: float | None) -> bool:
    """Wait; on a timeout or an interrupt end the process and everything it started. True if it was late."""
    try:
        process.wait(timeout)
        return False
    except subprocess.TimeoutExpired:
        return True
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def read(folder: Path, code: int, errors: str = "", late: str = "") -> Verdict:
    """The verdict that a finished pytest process left in ``folder``, trusted only as far as its exit ``code`` agrees."""
    if code == 4:
        lines = [line.removeprefix("ERROR: ").strip() for line in errors.splitlines() if line.strip()]
        raise GateUsageError("\n".join(lines[-5:]) or "pytest refused to start")
    try:
        document = json.loads((folder / "report.json").read_text())
        found = Verdict.from_dict(document)
        complete = bool(document["complete"])
        running = document.get("running")
    except (OSError, ValueError, KeyError, TypeError) as err:
        tail = " | ".join(errors.strip().splitlines()[-3:])
        return Verdict("gates", Status.INVALID, f"pytest {_ended(code)} and left no report ({type(err).__name__}). {tail}".strip())
    fault = late
    if not complete and not late:
        fault = f"pytest {_ended(code)} before the gates were done" + (f", in {running}" if running else "")
    elif found.green and code != 0:
        fault = f"every gate passed, and pytest {_ended(code)}: something else failed"
    if not fault:
        return found
    return combine("gates", [*found.children, Verdict("pytest", Status.INVALID, fault)], info=found.info)


def _ended(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
