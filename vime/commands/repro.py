"""``vime repro``: one recipe twice, in fresh processes and under other conditions; and two ledgers side by side.

The first run is plain. The second has another folder, a hash seed that is set too late to have an effect, fewer
requests in flight, another log level and the requests of a step in another order: none of it may change a bit, and the
comparison is NOT_RUN for what did not really differ.
"""
from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import vime
from alignment import runs
from alignment.errors import InputError
from alignment.files import write_text
from alignment.verdict import Status, Verdict, combine
from vime.commands.output import require_folder
from vime.errors import WRONG_USAGE, BadInput, VimeError

#: Conditions that must have been different, by their name in the ledger.
CONDITIONS = ("process", "folder", "hash_seed", "concurrency", "arrival", "log_level")

#: Flags that this command sets itself.
_OURS = ("--output-dir", "--save", "--load", "--rollout-concurrency", "--rollout-arrival", "--json", "--engine-url")
_PATHS = ("--hf-checkpoint", "--data", "--update-weight-disk-dir")
#: Sets the hash seed when python has started already, which is what a script that does so gets: nothing.
_LATE = "import os, sys; os.environ['PYTHONHASHSEED'] = '4242'; sys.argv[0] = 'vime'; from vime.cli import main; main()"


class RunFailed(VimeError):
    """One of the two runs could not be made; the message is its own."""


class RunRefused(BadInput):
    """The flags cannot be used."""


def compare(a: Path, b: Path, across: Sequence[str] = (), from_step: int = 0) -> Verdict:
    """The verdict on two ledgers. Raises BadInput where there is none."""
    try:
        return runs.compare(a, b, across=across, from_step=from_step)
    except (InputError, OSError) as error:
        raise BadInput(str(error)) from None


def run(output_dir: Path, flags: Sequence[str], profile: str | None = None, timeout: float = 7200.0, quiet: bool = False,
        only: str | None = None, at_once: bool = False) -> tuple[Verdict, dict[str, Any]] | None:
    """Train twice and compare; the verdict and the JSON fields of the report.

    ``only`` is for machines where a command has a limit: ``"a"`` makes the first run and returns None, ``"b"`` makes the
    second beside it and compares. ``at_once``: both at the same time, where one device holds both; the seconds are then those of
    runs that shared it, and another load on the device is one more condition that must not matter.

    Raises:
        OutputUnusable: ``output_dir`` is a file, or cannot be written to.
        RunRefused: a flag that this command sets itself, no time, an unknown profile, a folder that is not empty, a second run
            without a first.
        RunFailed: a run ended with an error.
    """
    for flag in flags:
        if flag.partition("=")[0] in _OURS:
            raise RunRefused(f"{flag} is set by vime repro run itself, differently for each of the two runs; leave it out")
    if not 0 < timeout < float("inf"):
        raise RunRefused(f"--timeout {timeout:g}: seconds above 0 are expected")
    require_folder(output_dir, "--output-dir")
    if profile is not None and any(flag.partition("=")[0] == "--hf-checkpoint" for flag in flags):
        raise RunRefused("--profile and --hf-checkpoint both name a model; leave one out")
    if at_once and only:
        raise RunRefused("--at-once makes both runs, --only one of them; leave one out")
    if only == "b":
        if not (folder_of("a", output_dir) / "report.json").is_file():
            raise RunRefused(f"{output_dir} holds no first run that ended with a report; make it by --only a")
        if folder_of("b", output_dir).exists():
            raise RunRefused(f"{folder_of('b', output_dir)} is there already, of a second run that ended or broke off; remove it to make "
                             "that run again")
    elif output_dir.exists() and any(output_dir.iterdir()):
        raise RunRefused(f"{output_dir} is not empty; give a new folder, so that two runs are never mixed with older ones")
    arguments = _absolute_flags(flags)
    if profile is not None:
        arguments += ["--hf-checkpoint", str(_checkpoint(profile))]
    began, kept = time.monotonic(), output_dir / "seconds.json"
    seconds: dict[str, float] = json.loads(kept.read_text()) if only == "b" and kept.is_file() else {}

    ended = threading.Event()

    def timed(name: str) -> None:
        started = time.monotonic()
        train_once(name, output_dir, arguments, timeout - (started - began), quiet, ended)
        seconds[name] = round(time.monotonic() - started, 1)

    if at_once:
        with ThreadPoolExecutor(2) as pool:
            try:
                for done in as_completed([pool.submit(timed, name) for name in ("a", "b")]):
                    done.result()
            except BaseException:  # an interrupt too: one run alone is no comparison
                ended.set()
                raise
    else:
        for name in (only,) if only else ("a", "b"):
            timed(name)
    if only != "a":
        return judge(output_dir, seconds)
    write_text(kept, json.dumps(seconds))  # for the report, which is on both
    return None


def folder_of(name: str, output_dir: Path) -> Path:
    """Where run ``a`` or ``b`` lies: not beside each other, since the place is one of the conditions."""
    return output_dir / name if name == "a" else output_dir / "elsewhere" / name


def judge(output_dir: Path, seconds: dict[str, float]) -> tuple[Verdict, dict[str, Any]]:
    """The verdict on the two runs in ``output_dir``, the JSON fields of the report, and the report itself beside them."""
    a, b = folder_of("a", output_dir), folder_of("b", output_dir)
    verdict = _with_own(runs.compare(a, b, moved=CONDITIONS), [_own("A", a), _own("B", b)])
    extra = {"runs": {"a": str(a), "b": str(b)}, "seconds": seconds, "ledger_cost": {n: _cost(x) for n, x in (("a", a), ("b", b))}}
    from alignment import report

    write_text(output_dir / "report.json", report.to_json(verdict, **extra))
    write_text(output_dir / "report.html", report.html(verdict, title="vime repro"))
    return verdict, extra


def _with_own(verdict: Verdict, own: list[Verdict]) -> Verdict:
    """Two equal runs that were both wrong are no PASS: the runs' own verdicts count, after the comparison."""
    whole = combine(verdict.name, [verdict, *own])
    if verdict.status is not Status.PASS:
        verdict.children += own
        return verdict
    return Verdict(verdict.name, whole.status, whole.reason, coverage=verdict.coverage, first_bad=whole.first_bad, causes=whole.causes,
                   stats=verdict.stats, info=verdict.info, children=[*verdict.children, *own])


def _own(side: str, folder: Path) -> Verdict:
    return Verdict.from_dict({**json.loads((folder / "report.json").read_text(encoding="utf-8")), "name": f"run {side} itself", "children": []})


def _cost(folder: Path) -> dict[str, Any]:
    from alignment.runlog import read

    return (read(folder).end or {}).get("cost", {})


def _checkpoint(profile: str) -> Path:
    from gates.profiles import UnknownProfile, find, split

    try:
        found = find(profile)
    except UnknownProfile as error:
        raise RunRefused(str(error)) from None
    if split(profile)[1]:
        raise RunRefused(f"--profile {profile}: a run takes the checkpoint of a profile only; give its settings as flags of vime train")
    return found.checkpoint()


def in_flight(flags: Sequence[str]) -> int:
    """Requests in flight of the second run: three, or as many as make three waves of the requests of a step, one uneven; and fewer
    than all of them wherever there are two."""
    asked = {"--rollout-batch-size": 4, "--n-samples-per-prompt": 4}
    for flag, following in itertools.pairwise([*flags, ""]):
        name, equals, value = flag.partition("=")
        value = value if equals else following
        if name in asked and value.isdigit():
            asked[name] = int(value)
    requests = asked["--rollout-batch-size"] * asked["--n-samples-per-prompt"]
    return max(1, min(max(3, 3 * requests // 8), requests - 1))


def train_once(name: str, output_dir: Path, flags: Sequence[str], timeout: float, quiet: bool, ended: threading.Event) -> None:
    """Run ``a`` or ``b`` in a process of its own. One that ends with a verdict other than PASS has still happened. ``ended`` ends
    it early.

    Raises:
        RunRefused, RunFailed: it could not be made.
    """
    folder = folder_of(name, output_dir)
    folder.mkdir(parents=True)
    flags = [*map(str, flags), "--output-dir", str(folder.absolute())]
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONHASHSEED", "VLLM_LOGGING_LEVEL")} | one_program()
    with contextlib.ExitStack() as stack:
        if name == "a":
            command = [sys.executable, "-m", "vime.cli", "train", *flags]
            env |= {"PYTHONHASHSEED": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
            cwd: str | None = None
        else:
            command = [sys.executable, "-c", _LATE, "train", *flags, "--rollout-concurrency", str(in_flight(flags)), "--rollout-arrival", "shuffled"]
            cwd = stack.enter_context(tempfile.TemporaryDirectory(prefix="vime-elsewhere-"))
            env |= {"VLLM_LOGGING_LEVEL": "INFO", "TMPDIR": cwd}
        said = open(folder / "run.log", "w+", encoding="utf-8")  # noqa: SIM115
        stack.enter_context(said)
        print(f"vime repro: run {name} in {folder}", file=sys.stderr, flush=True)
        process = subprocess.Popen(command, env=env, cwd=cwd, stdout=subprocess.DEVNULL, stderr=said if quiet else None,
                                   stdin=subprocess.DEVNULL, start_new_session=quiet)
        try:
            code = _wait(process, name, time.monotonic() + max(1.0, timeout), ended)
        finally:
            if process.poll() is None:  # its trainer and engine end with it
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()
                process.wait()
        if not (folder / "report.json").is_file():
            said.seek(0)
            tail = "".join(said.readlines()[-12:])
            text = f"run {name} ended with exit code {code} and no report" + (f":\n{tail}" if tail else "; its message is above")
            if code != WRONG_USAGE:
                raise RunFailed(text)
            _leave_no_trace(said.name, output_dir)
            raise RunRefused(text)


def _leave_no_trace(log: str, output_dir: Path) -> None:
    """Of a run that refused its flags: so that the same folder takes the next attempt. What holds anything else stays."""
    Path(log).unlink()
    for folder in Path(log).parents:
        with contextlib.suppress(OSError):  # not empty, so that the ones above it are not, either
            folder.rmdir()
        if folder == output_dir:
            return


def one_program() -> dict[str, str]:
    """Variables with which a run, and what it starts, imports the package of this process: neither the one in the folder where it
    is started nor another that is installed."""
    root = str(Path(vime.__file__).absolute().parents[1])
    return {"PYTHONPATH": os.pathsep.join(filter(None, (root, _absolute(os.environ.get("PYTHONPATH", ""))))), "PYTHONSAFEPATH": "1"}


def _wait(process: subprocess.Popen[bytes], name: str, deadline: float, ended: threading.Event) -> int:
    """The exit code of a run. Raises RunFailed when it is late, or the other one is over."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=0.5)
        if ended.is_set():
            raise RunFailed(f"run {name} was ended, since the other one did not come to its end")
        if time.monotonic() > deadline:
            raise RunFailed(f"run {name} did not end in time; raise --timeout, or take fewer steps")


def _absolute_flags(flags: Sequence[str]) -> list[str]:
    """The flags with their paths absolute: the second run starts in another folder."""
    out: list[str] = []
    for flag in flags:
        name, equals, value = flag.partition("=")
        if equals and name in _PATHS:
            flag = f"{name}={Path(value).expanduser().absolute()}"
        elif out and out[-1] in _PATHS:
            flag = str(Path(flag).expanduser().absolute())
        out.append(flag)
    return out


def _absolute(path: str) -> str:
    return os.pathsep.join(str(Path(p).absolute()) for p in path.split(os.pathsep) if p)
