"""Two runs of one recipe are one run, also through a stop; and what usually breaks that is found at its step and quantity.

The faults are planted from outside (``tests/rl/faults``). Everything is the real thing on a tiny model: a trainer, an
engine, updates, in fresh processes each time.
"""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from alignment import runlog, runs
from alignment.verdict import Status
from tests.rl.tiny import write_checkpoint, write_jsonl
from vime.commands import repro
from vime.rl.data import generate

FAULTS = Path(__file__).parent / "faults"
STEPS = 5


def vime(*args, fault="", **env):
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **env}
    environment.pop("PYTHONHASHSEED", None)
    if fault:
        environment |= {"VIME_TEST_FAULT": fault, "PYTHONPATH": os.pathsep.join([str(FAULTS), environment.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, "-m", "vime.cli", *map(str, args)], capture_output=True, text=True, timeout=800,
                          env=environment, check=False)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    write_jsonl(generate(3), folder / "three.jsonl")  # two prompts a step: the second step sees the first prompt again
    return ["--hf-checkpoint", write_checkpoint(folder / "model"), "--data", folder / "three.jsonl", "--dtype", "bfloat16",
            "--rollout-batch-size", 2, "--n-samples-per-prompt", 4, "--rollout-max-response-len", 9, "--lr", "2e-4", "--reward", "gate",
            "--max-num-batched-tokens", 64, "--max-tokens-per-gpu", 300, "--kv-cache-gib", 0.125, "--max-model-len", 256]


@pytest.fixture(scope="module")
def twice(flags, tmp_path_factory):
    """``vime repro run``: its folder and its JSON."""
    folder = tmp_path_factory.mktemp("repro") / "out"
    result = vime("repro", "run", "--output-dir", folder, "--json", *flags, "--num-rollout", STEPS)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder, json.loads(result.stdout)


def test_two_fresh_runs_under_other_conditions_are_one_run(twice):
    folder, said = twice
    assert said["verdict"] == "PASS" and said["coverage"]["steps"] == {"compared": STEPS + 1, "expected": STEPS + 1}
    for condition in ("process", "folder", "hash_seed", "concurrency", "arrival", "log_level"):
        a, b = said["info"]["conditions"][condition]
        assert a != b, condition
    assert "set too late" in said["info"]["conditions"]["hash_seed"][1]
    assert {c["name"]: c["verdict"] for c in said["children"]}["run A itself"] == "PASS"
    assert (folder / "report.html").is_file()
    first = runlog.read(folder / "a").steps[0]
    assert set(first["digests"]) == set(runlog.QUANTITIES)
    assert len(first["parts"]["gradients"]) > 10 and first["kernels"]["trainer"] and first["kernels"]["engine"]


@pytest.mark.parametrize(("samples", "tried"), [(2, True), (1, False)])
def test_few_requests_of_a_step_go_otherwise_in_the_second_run_or_are_not_run(flags, tmp_path, samples, tried):
    """One request a step cannot go otherwise, whatever was asked for."""
    few = ["--rollout-batch-size", 1, "--n-samples-per-prompt", samples, "--num-rollout", 0]
    result = vime("repro", "run", "--output-dir", tmp_path / "o", "--json", *flags, *few)
    said = json.loads(result.stdout)
    verdicts = {c["name"]: c["verdict"] for c in said["children"]}
    assert verdicts["other concurrency"] == verdicts["other arrival"] == ("PASS" if tried else "NOT_RUN"), result.stderr[-3000:]
    a, b = (runlog.read(tmp_path / "o" / place).steps[0]["sent"] for place in ("a", "elsewhere/b"))
    assert (a["in_flight"], b["in_flight"]) == (samples, 1) and (a["order"] != b["order"]) == tried
    assert said["verdict"] == ("PASS" if tried else "NOT_RUN")


@pytest.mark.parametrize("name", ["a", "b"])
def test_both_runs_are_of_the_package_that_started_them(tmp_path, monkeypatch, name):
    """Neither the one in the folder where they are started, as in a clone beside an installed package, nor one that is found first."""
    (tmp_path / "vime").mkdir()
    (tmp_path / "vime" / "__init__.py").touch()
    (tmp_path / "vime" / "cli.py").write_text("def main():\n    raise SystemExit('another program')\nif __name__ == '__main__':\n    main()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ".")
    with pytest.raises(repro.RunRefused, match="does not exist"):
        repro.train_once(name, tmp_path / "o", ["--hf-checkpoint", str(tmp_path / "none")], 60, True, threading.Event())


@pytest.mark.parametrize(("fault", "quantity"), [
    ("unseeded_shuffle", "prompts"), ("clock_seed", "seeds"), ("set_order", "batch_composition"), ("add_order", "gradients"),
    ("stale_cache", "rollout_logprobs")])
def test_what_usually_breaks_it_is_found_at_its_step_and_quantity(twice, flags, tmp_path, fault, quantity):
    result = vime("train", *flags, "--num-rollout", 2, "--no-check-last-update", "--output-dir", tmp_path, fault=f"{fault}:1")
    assert (tmp_path / "report.json").is_file(), result.stderr[-3000:]
    verdict = runs.compare(twice[0] / "a", tmp_path)
    assert verdict.status is Status.FAIL, verdict.summary()
    assert (verdict.first_bad.step, verdict.first_bad.stage) == (1, quantity), verdict.summary()
    if fault == "add_order":
        assert verdict.first_bad.tensor == "decoder.layers.1.mlp.linear_fc2.weight"
    if fault == "stale_cache":  # the run itself says so, too: its engine no longer agrees with its trainer
        assert result.returncode == 1 and any(c.kind == "own_verdict" for c in verdict.causes)
        assert "made-0-0" in verdict.first_bad.request or "three.jsonl-1" in verdict.first_bad.request


def continued(flags, source, steps, root, output, **kwargs):
    """Go on from one checkpoint alone."""
    folder = root / f"from-{steps}"
    folder.mkdir()
    shutil.copytree(source / f"step-{steps:06d}", folder / f"step-{steps:06d}")
    return vime("train", *flags, "--num-rollout", STEPS, "--load", folder, "--output-dir", output, **kwargs)


@pytest.fixture(scope="module")
def killed(flags, tmp_path_factory):
    """A run that is killed while it writes its third checkpoint, and the same command again."""
    root = tmp_path_factory.mktemp("killed")
    both = [*flags, "--num-rollout", STEPS, "--save", root / "ck", "--load", root / "ck", "--output-dir", root / "run"]
    first = vime("train", *both, fault="die_writing:3")
    assert first.returncode == 10 and "SIGKILL" in first.stderr, first.stderr[-3000:]
    assert (root / "ck" / ".step-000003.part").is_dir() and not (root / "ck" / "step-000003").exists()
    return root, vime("train", *both)


def test_killed_in_the_middle_of_a_checkpoint_it_goes_on_from_the_one_before(twice, killed):
    root, second = killed
    assert second.returncode == 0, second.stderr[-3000:]
    assert ".step-000003.part was not finished" in second.stderr and "continuing after 2 steps" in second.stderr
    verdict = runs.compare(twice[0] / "a", root / "run")
    assert verdict.status is Status.PASS, verdict.summary()
    assert [step for step, _, _ in runlog.read(root / "run").replayed] == [2]
    report = json.loads((root / "run" / "report.json").read_text())
    lines = [json.loads(line) for line in (root / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [s["step"] for s in report["steps"]] == [m["step"] for m in lines] == list(range(STEPS + 1))
    assert all("seconds" in m and "train_rollout_logprob_abs_diff" in m for m in lines)
    assert sorted(p.name for p in (root / "ck").iterdir() if not p.name.startswith(".")) == [f"step-{i:06d}" for i in range(1, STEPS + 1)]


def test_what_was_wrong_before_a_stop_is_not_forgotten(flags, tmp_path):
    both = [*flags, "--no-check-last-update", "--save", tmp_path / "ck", "--load", tmp_path / "ck", "--output-dir", tmp_path / "run"]
    first = vime("train", *both, "--num-rollout", 2, fault="stale_cache:1")
    assert first.returncode == 1, first.stderr[-3000:]
    second = vime("train", *both, "--num-rollout", 3, "--json")
    assert second.returncode == 1 and "before the restart: FAIL, " in second.stderr, second.stderr[-3000:]
    document = json.loads(second.stdout)
    assert document["verdict"] == "FAIL" and document["first_bad"]["step"] == 1
    assert [s["verdicts"][0]["verdict"] for s in document["steps"]] == ["PASS", "FAIL", "PASS"]
    assert runlog.read(tmp_path / "run").end["verdict"] == "FAIL"


@pytest.mark.parametrize("steps", [1, 4])
def test_a_run_that_stopped_gives_the_bits_of_one_that_did_not(twice, killed, flags, tmp_path, steps):
    result = continued(flags, killed[0] / "ck", steps, tmp_path, tmp_path / "run")
    assert result.returncode == 0, result.stderr[-3000:]
    verdict = runs.compare(twice[0] / "a", tmp_path / "run", from_step=steps)
    assert verdict.status is Status.PASS, verdict.summary()
    assert str(verdict.coverage["steps"]) == f"{STEPS + 1 - steps}/{STEPS + 1 - steps}"
    whole = runs.compare(twice[0] / "a", tmp_path / "run")
    assert whole.status is Status.INVALID and f"--from-step {steps}" in whole.reason
