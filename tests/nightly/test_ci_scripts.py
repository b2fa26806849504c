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


@pytest.mark.parametrize(("change", "name", "status"), [
    ({}, "", Status.PASS), ({"differing": 2}, "alone against together", Status.FAIL), ({"other": 1}, "alone against together", Status.FAIL),
    ({"ratio_off": 3}, "training forward of step 0", Status.FAIL), ({"changed": 0}, "weights changed by update 1", Status.NOT_RUN),
    ({"dropped": 0}, "keys dropped by the indexer", Status.NOT_RUN)])
def test_whatever_the_script_for_experts_finds_is_judged(monkeypatch, change, name, status):
    """A number that is only printed turns nothing red."""
    experts = script("experts_cuda")
    case = {"differing": 0, "other": 0, "ratio_off": 0, "changed": 5, "dropped": 4} | change
    sample = types.SimpleNamespace(token_ids=[1, 2], logprobs=[-1.0, -2.0])
    passed = Verdict("compared", Status.PASS, coverage={"tokens": Coverage(2, 2)})
    for function in ("same_logprobs", "same_layers", "same_weights"):
        monkeypatch.setattr(experts, function, lambda *args: passed)
    monkeypatch.setattr(experts, "differing_elements", lambda *args: {})
    monkeypatch.setattr(experts, "alone", lambda *args: {"differing": case["differing"], "with other tokens": case["other"]})
    client = types.SimpleNamespace(info=lambda: {}, stats=lambda: {"keys_seen": 9, "keys_dropped": case["dropped"], "kernels": {}})
    harness = types.SimpleNamespace(
        session=types.SimpleNamespace(client=client, pool=types.SimpleNamespace(counters=dict)), profile=types.SimpleNamespace(prompts=1),
        requests=lambda *args, **kwargs: [], generate=lambda asked: [sample], logprobs=lambda samples: [{"logprobs": [-1.0, -2.0]}],
        engine_layers=lambda asked: ([], None), trainer_layers=lambda recorded: None,
        train=lambda *args: types.SimpleNamespace(ratio_off=case["ratio_off"], tokens=2, grad_norm=1.0, without_gradient=[]),
        update=lambda: types.SimpleNamespace(version=1, changed=case["changed"], trainer={}, engine={}))
    found = experts.run(harness, "m", 1, {})
    assert [(v.name, v.status) for v in found if not v.green] == ([(name, status)] if name else [])
    assert len(found) == 8
