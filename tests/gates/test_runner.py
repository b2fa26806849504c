"""Gates from a program: the report is believed only as far as the exit code agrees."""
from __future__ import annotations

import gc
import json

import pytest

from alignment.verdict import Coverage, Status, Verdict, combine
from gates import runner
from gates.__main__ import main
from gates.harness import Harness
from gates.profiles import find
from tests.rl.tiny import write_checkpoint

GOOD = combine("gates", [Verdict("logprob", "PASS", coverage={"tokens": Coverage(3, 3)})])


def leave(folder, verdict=GOOD, **fields):
    (folder / "report.json").write_text(json.dumps({**verdict.to_dict(), "complete": True, "running": None, **fields}))


def test_green(tmp_path):
    leave(tmp_path)
    assert runner.read(tmp_path, 0).status is Status.PASS


@pytest.mark.parametrize(("code", "fields", "text"), [
    (1, {}, "every gate passed, and pytest ended with exit code 1"),
    (-9, {"complete": False, "running": "t.py::test_x"}, "killed by signal 9 before the gates were done, in t.py::test_x"),
    (0, {"complete": False}, "ended with exit code 0 before the gates were done"),
    (-11, {}, "killed by signal 11"),
])
def test_green_report_of_a_bad_end(tmp_path, code, fields, text):
    leave(tmp_path, **fields)
    found = runner.read(tmp_path, code)
    assert found.status is Status.INVALID and text in found.reason


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", '{"verdict": "PASS"}', '{"name": "x", "verdict": "GREEN"}'])
def test_no_report(tmp_path, content):
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    found = runner.read(tmp_path, 0, "Traceback\nKilled")
    assert found.status is Status.INVALID and "left no report" in found.reason and "Killed" in found.reason


def test_a_real_difference_outranks_a_bad_end(tmp_path):
    leave(tmp_path, combine("gates", [Verdict("logprob", "FAIL", "2 differ")]), complete=False)
    assert runner.read(tmp_path, -9).status is Status.FAIL


def test_usage(tmp_path):
    with pytest.raises(runner.GateUsageError, match="did you mean 'logprob'"):
        runner.run(["logprop"])
    with pytest.raises(runner.GateUsageError, match=r"no profile 'smollm'.*Did you mean smollm2-135m"):
        runner.run(["logprob"], profile="smollm", output=-3)


def test_a_missing_device_is_not_run(tmp_path):
    import torch
    assert not torch.cuda.is_available()
    found = runner.run(["gate_rerun"], device="cuda", profile="dense-tiny", report=tmp_path / "out", output=-3)
    assert found.status is Status.NOT_RUN and "needs 1 GPU(s) and sees 0" in found.reason
    assert (tmp_path / "out" / "report.html").exists()


def test_a_gate_that_hangs(tmp_path):
    found = runner.run(["rerun"], device="cuda", profile="dense-tiny", report=tmp_path, timeout=0.2, output=-3)
    assert found.status is Status.INVALID


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_timeout_that_is_no_time_is_refused(tmp_path, seconds):
    with pytest.raises(runner.GateUsageError, match=r"--timeout .*seconds above 0 are expected"):
        runner.run(["rerun"], device="cuda", profile="dense-tiny", report=tmp_path, timeout=seconds, output=-3)


def test_a_report_that_is_a_file_is_refused_before_anything_is_started(tmp_path, monkeypatch, capsys):
    (tmp_path / "taken").write_text("mine")
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("pytest was started"))
    for place in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(runner.GateUsageError, match=rf"--report {place} cannot be written: {tmp_path / 'taken'} is there and no folder"):
            runner.run(["rerun"], profile="dense-tiny", report=place, output=-3)
    monkeypatch.setattr("sys.argv", ["gates", "rerun", "--report", str(tmp_path / "taken")])
    assert main() == 2 and "is there and no folder" in capsys.readouterr().err
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize("name", ["gates", "rerun"])
def test_a_folder_that_is_called_like_another_argument_is_the_profile(tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    found = runner.run(["rerun"], profile=name, device="cuda", report=tmp_path / "out", output=-3)
    assert found.status is Status.NOT_RUN and "needs 1 GPU(s)" in found.reason
    assert json.loads((tmp_path / "out" / "report.json").read_text())["options"]["profile"] == str(tmp_path / name)


@pytest.mark.parametrize("stays", [True, False])
def test_logs_stay_where_a_start_failed_after_one_was_written(tmp_path, monkeypatch, stays):
    def start(self):
        if stays:
            self.log_dir.mkdir(parents=True)
            (self.log_dir / "engine.log").write_text("at 7:4:")
        raise OSError("the engine could not start")

    monkeypatch.setattr("vime.rl.session.Session.__enter__", start)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    harness = Harness(find(str(write_checkpoint(tmp_path / "c"))), "cpu", "float32")
    with pytest.raises(OSError, match="could not start"):
        harness.__enter__()
    del harness
    gc.collect()
    assert [p.read_text() for p in (tmp_path / "t").rglob("engine.log")] == ["at 7:4:"] * stays
    assert stays or not list((tmp_path / "t").iterdir())
