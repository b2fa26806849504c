"""The scripts that measure on a GPU, with what they measure replaced: what they say of it, and how they end."""
from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest

from alignment import runlog
from alignment.verdict import Coverage, Status, Verdict
from tests.alignment.test_runs import lines_of, write

ROOT = Path(__file__).resolve().parents[2]


def script(name):
    spec = importlib.util.spec_from_file_location(f"ci_{name}", ROOT / "ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def answers(value):
    yield value


@pytest.mark.parametrize(("ratio", "code"), [(1.0, 0), (1.09, 0), (1.2, 1)])
def test_generation_over_its_budget_ends_with_1(monkeypatch, tmp_path, ratio, code):
    """1.2 is within the budget of one request, and one that is over is enough."""
    cost, took = script("cost_cuda"), []
    monkeypatch.setattr(cost, "pairs", lambda ours, stock, count: took.append(count) or {"ratio": ratio, "pairs": count})
    monkeypatch.setattr(cost, "aligned_engine", lambda args: answers(lambda count, length: 1.0))
    monkeypatch.setattr(cost, "stock_engine", lambda args: answers(lambda count, length: 1.0))
    monkeypatch.setattr(sys, "argv", ["cost_cuda.py", "--hf-checkpoint", "m", "--logs", str(tmp_path), "--concurrency", "64", "1"])
    assert cost.main() == code and took == [5, 5]
    args = types.SimpleNamespace(model="m")
    found = [c["verdict"] for c in cost.claims(args, {n: {"ratio": ratio, "pairs": 5} for n in ("64", "1")})]
    assert found == ["FAIL" if code else "PASS", "PASS"]


@pytest.mark.parametrize(("ratio", "code"), [(1.0, 0), (1.2, 1)])
def test_a_step_over_its_budget_ends_with_1(monkeypatch, tmp_path, capsys, ratio, code):
    step = script("step_cuda")
    monkeypatch.setattr(step, "child", lambda kind, args: answers(lambda line: dict.fromkeys(
        ("step", "forward_backward", "optimizer"), 1.0 if kind == "stock" else ratio)))
    monkeypatch.setattr(sys, "argv", ["step_cuda.py", "--logs", str(tmp_path)])
    assert step.main() == code and ("FAIL 1.20x" in capsys.readouterr().out) == bool(code)


def test_evidence_of_two_runs_says_what_the_ledger_says(monkeypatch, tmp_path):
    """Not what the script takes for granted: device and dtype are those of the runs."""
    evidence = script("repro_evidence")
    (tmp_path / "a").mkdir()
    write(tmp_path / "a" / runlog.FILE, lines_of(topology={"device": "cpu"}, recipe={"dtype": "float32"}, fingerprint="0"))
    verdict = Verdict("repro", Status.PASS, coverage={"steps": Coverage(1, 1)})
    (tmp_path / "report.json").write_text(json.dumps({**verdict.to_dict(), "seconds": {"a": 3.0, "b": 4.5}, "ledger_cost": {}}))
    monkeypatch.setattr(sys, "argv", ["repro_evidence.py", str(tmp_path), "--model", "m", "--out", str(tmp_path / "e.json")])
    assert evidence.main() == 0
    found = json.loads((tmp_path / "e.json").read_text())
    assert (found["claims"][0]["device"], found["claims"][0]["dtype"], found["seconds"]) == ("cpu", "float32", 7.5)
