"""``vime repro`` as a command: exit codes, refusals before anything is started, one JSON document."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from alignment import runlog
from tests.alignment.test_runs import lines_of, write


def repro(*args):
    return subprocess.run([sys.executable, "-m", "vime.cli", "repro", *map(str, args)], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200"}, check=False)


def folder_of(path, lines):
    path.mkdir()
    write(path / runlog.FILE, lines)
    return path


def other_loss():
    lines = lines_of()
    lines[2]["digests"]["loss"] = "f64:other"
    return lines


@pytest.mark.parametrize(("lines", "options", "code", "word"), [
    (lines_of(), (), 0, "PASS"), (other_loss(), (), 1, "loss differs first"), (lines_of()[:-1], (), 10, "no end line"),
    (lines_of(recipe={"lr": 5}), (), 10, "different recipe"), (lines_of(versions={"torch": "1"}), (), 10, "--across versions"),
    (lines_of(versions={"torch": "1"}), ("--across", "versions"), 0, "across versions"), ([], (), 10, "empty: no step was recorded")])
def test_compare_ends_with_the_code_of_its_verdict(tmp_path, lines, options, code, word):
    a, b = folder_of(tmp_path / "a", lines_of()), folder_of(tmp_path / "b", lines)
    result = repro("compare", a, b, *options)
    assert result.returncode == code and "Traceback" not in result.stderr, result.stderr
    said = json.loads(repro("compare", a, b, *options, "--json").stdout)
    assert {"verdict", "coverage", "first_bad", "cause"} <= said.keys()
    assert word in json.dumps(said)


@pytest.mark.parametrize(("args", "word"), [
    (("compare", "none", "none"), "holds no ledger"), (("run", "--output-dir", "full"), "is not empty"),
    (("run", "--output-dir", "full/ledger.jsonl"), "--output-dir full/ledger.jsonl cannot be written"),
    (("run", "--output-dir", "new", "--profile", "dense-tiny", "--hf-checkpoint=m"), "both name a model"),
    (("run", "--output-dir", "new", "--timeout", "nan"), "seconds above 0 are expected"),
    (("run", "--output-dir", "new", "--save", "x"), "--save is set by vime repro run itself"),
    (("run", "--output-dir", "new", "--rollout-arrival=given"), "--rollout-arrival"),
    (("run", "--output-dir", "new", "--profile", "nonsense"), "there is no profile 'nonsense'"),
    (("compare", "full", "full", "--across", "recipe"), "across")])
def test_what_cannot_be_used_is_exit_2(tmp_path, monkeypatch, args, word):
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "full", lines_of())
    result = repro(*args)
    assert result.returncode == 2 and "Traceback" not in result.stderr and word in result.stderr, result.stderr
    assert not (tmp_path / "new").exists()


def test_a_run_that_refuses_its_flags_ends_the_command_with_its_words(tmp_path):
    result = repro("run", "--output-dir", tmp_path / "o", "--json", "--hf-checkpoint", tmp_path / "none")
    assert result.returncode == 2 and "run a ended with exit code 2" in result.stderr and "does not exist" in result.stderr
    assert not (tmp_path / "o").exists(), "the same folder takes the next attempt"


def test_the_second_run_alone_needs_the_first(tmp_path):
    """Whole, and no second one beside it, which may have broken off."""
    a, b = tmp_path / "o" / "a", tmp_path / "o" / "elsewhere" / "b"
    a.mkdir(parents=True)
    result = repro("run", "--output-dir", tmp_path / "o", "--only", "b")
    assert result.returncode == 2 and "holds no first run that ended with a report; make it by --only a" in result.stderr
    (a / "report.json").write_text("{}")
    b.mkdir(parents=True)
    result = repro("run", "--output-dir", tmp_path / "o", "--only", "b")
    assert result.returncode == 2 and "is there already" in result.stderr and "remove it to make that run again" in result.stderr


def test_both_at_once_run_at_the_same_time_and_are_judged(tmp_path, monkeypatch):
    from vime.commands import repro as command

    together = threading.Barrier(2, timeout=20)  # breaks where the second waits for the first
    monkeypatch.setattr(command, "train_once", lambda *args: together.wait())
    monkeypatch.setattr(command, "judge", lambda folder, seconds: ("judged", sorted(seconds)))
    assert command.run(tmp_path / "o", [], at_once=True) == ("judged", ["a", "b"])
    with pytest.raises(command.RunRefused, match="leave one out"):
        command.run(tmp_path / "p", [], only="a", at_once=True)


def test_of_two_at_once_the_one_that_fails_ends_the_other(tmp_path, monkeypatch):
    from vime.commands import repro as command

    def train_once(name, output_dir, flags, timeout, quiet, ended):
        if name == "b":
            raise command.RunFailed("run b broke off")
        assert ended.wait(20), "nobody told run a"

    monkeypatch.setattr(command, "train_once", train_once)
    with pytest.raises(command.RunFailed, match="run b broke off"):
        command.run(tmp_path / "o", [], at_once=True)


@pytest.mark.parametrize(("told", "seconds", "word"), [(True, 60, "the other one"), (False, 0, "did not end in time")])
def test_a_run_is_waited_for_no_longer_than_asked(told, seconds, word):
    from vime.commands import repro as command

    ended = threading.Event()
    if told:
        ended.set()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        try:
            with pytest.raises(command.RunFailed, match=word):
                command._wait(process, "a", time.monotonic() + seconds, ended)
        finally:
            process.kill()


def test_settings_of_a_profile_are_no_flags_of_a_run(tmp_path):
    result = repro("run", "--output-dir", tmp_path / "o", "--profile", "dense-tiny:lr=7")
    assert result.returncode == 2 and "give its settings as flags" in " ".join(result.stderr.split())
    assert not (tmp_path / "o").exists()


def test_two_runs_in_two_commands_say_how_long_both_took(tmp_path, monkeypatch):
    from vime.commands import repro as command

    def train_once(name, output_dir, *rest):
        folder = command.folder_of(name, output_dir)
        folder.mkdir(parents=True)
        (folder / "report.json").write_text("{}")

    monkeypatch.setattr(command, "train_once", train_once)
    monkeypatch.setattr(command, "judge", lambda output_dir, seconds: ("judged", seconds))
    assert command.run(tmp_path / "o", [], only="a") is None
    assert command.run(tmp_path / "o", [], only="b") == ("judged", {"a": 0.0, "b": 0.0})
    assert command.run(tmp_path / "both", []) == ("judged", {"a": 0.0, "b": 0.0})


@pytest.mark.parametrize(("flags", "expected"), [
    ([], 6), (["--rollout-batch-size", "32", "--n-samples-per-prompt=8"], 96), (["--rollout-batch-size", "1"], 3),
    (["--rollout-batch-size"], 6), (["--rollout-batch-size", "2", "--rollout-batch-size", "16"], 24),
    (["--rollout-batch-size", "1", "--n-samples-per-prompt", "2"], 1), (["--rollout-batch-size=1", "--n-samples-per-prompt=3"], 2),
    (["--rollout-batch-size=1", "--n-samples-per-prompt=1"], 1)])
def test_requests_in_flight_are_a_part_of_a_step(flags, expected):
    from vime.commands.repro import in_flight

    assert in_flight(flags) == expected
