"""The night's verdict on reports made by hand: nothing but a whole, green night is green."""
from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from alignment import runlog
from alignment.runlog import QUANTITIES
from alignment.verdict import Coverage, Place, Status, Verdict, combine
from tests.alignment.test_runs import lines_of, step_of, write

ROOT = Path(__file__).resolve().parents[2]
GATES, CONTROLS = ("rerun", "logprob", "cost"), ("rerun", "logprob")


@pytest.fixture(scope="module")
def nightly():
    spec = importlib.util.spec_from_file_location("vime_nightly", ROOT / "ci" / "nightly.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def passed(name, **info):
    return Verdict(name, Status.PASS, coverage={"tokens": Coverage(3, 3)}, info=info)


def dump(path, verdict, **extra):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**verdict.to_dict(), **extra}))


def night(folder, lines=None, *, leave_out=(), ratio=1.2, share=0.01):
    """The reports of a green night, as the shell script leaves them."""
    dump(folder / "tiny" / "report.json",
         combine("gates", [passed(g, **({"cost": {"ratio": ratio}} if g == "cost" else {})) for g in GATES if g not in leave_out]), complete=True)
    for gate in CONTROLS:
        dump(folder / f"tiny-control-{gate}" / "report.json",
             Verdict("gates", Status.FAIL, "planted", coverage={"tokens": Coverage(3, 3)}, first_bad=Place(layer=1)), complete=True)
    dump(folder / "tiny-repro" / "report.json", passed("repro"), ledger_cost={"a": {"share": share}, "b": {"share": share}},
         seconds={"a": 10.0, "b": 11.0})
    (folder / "tiny-repro" / "a").mkdir()
    write(folder / "tiny-repro" / "a" / runlog.FILE, lines or lines_of())
    return folder


def run(nightly, folder, history, *more):
    history.mkdir(exist_ok=True)
    code = nightly.main(["--report", str(folder), "--history", str(history), "--profile", "tiny", *(f"--gate={g}" for g in GATES),
                         *(f"--control={g}" for g in CONTROLS), *more])
    return code, json.loads((folder / "nightly.json").read_text())


def test_a_green_night_is_kept_and_the_next_one_compared_with_it(nightly, tmp_path):
    history = tmp_path / "history"
    code, said = run(nightly, night(tmp_path / "1"), history)
    assert code == 0 and said["verdict"] == "PASS" and "the first night" in said["info"]["history"]["tiny"]
    assert len(list(history.iterdir())) == 1
    code, said = run(nightly, night(tmp_path / "2"), history, "--cost-max", "1.5", "--seconds-max", "60")
    assert code == 0 and "same hardware, versions and recipe" in said["info"]["history"]["tiny"]
    names = {c["name"]: c["verdict"] for c in said["children"]}
    assert names["tiny: against the last green night"] == "PASS" and names["tiny: cost of cost"] == "PASS"
    assert "<html" in (tmp_path / "2" / "index.html").read_text()
    suite = ET.parse(tmp_path / "2" / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors"), suite.get("skipped")) == (str(len(names)), "0", "0", "0")


def test_a_night_of_other_bits_fails_and_is_not_kept(nightly, tmp_path):
    history = tmp_path / "history"
    run(nightly, night(tmp_path / "1"), history)
    lines = copy.deepcopy(lines_of())
    lines[2]["digests"]["gradients"] = "xxh3:other"
    code, said = run(nightly, night(tmp_path / "2", lines), history)
    assert code == 1 and said["first_bad"]["step"] == 1 and said["first_bad"]["stage"] == "gradients"
    assert len(list(history.iterdir())) == 1
    suite = ET.parse(tmp_path / "2" / "junit.xml").getroot()
    assert suite.get("failures") == "1" and "gradients differ first" in suite.find(".//failure").get("message")


@pytest.mark.parametrize(("versions", "word"), [({"torch": "2.14"}, "torch '2.13' in A, '2.14' in B"), ({"torch": "2.13", "code": "c"}, "code ")])
@pytest.mark.parametrize("same", [True, False])
def test_other_versions_are_compared_across_and_said(nightly, tmp_path, same, versions, word):
    history = tmp_path / "history"
    run(nightly, night(tmp_path / "1"), history)
    lines = lines_of(versions=versions)
    if not same:
        lines[3]["digests"]["loss"] = "f64:other"
    code, said = run(nightly, night(tmp_path / "2", lines), history)
    assert code == 0
    assert "across versions" in said["info"]["history"]["tiny"] and ("the same bits" in said["info"]["history"]["tiny"]) == same
    (note,) = [c for c in said["children"] if c["name"] == "tiny: across versions"]
    assert word in note["reason"]
    code, said = run(nightly, night(tmp_path / "3", lines), history)  # and from now on with the new versions
    assert code == 0 and "same hardware, versions" in said["info"]["history"]["tiny"]


@pytest.mark.parametrize("field", ["hardware", "recipe", "topology"])
def test_another_machine_or_recipe_is_another_first_night(nightly, tmp_path, field):
    history = tmp_path / "history"
    run(nightly, night(tmp_path / "1"), history)
    code, said = run(nightly, night(tmp_path / "2", lines_of(**{field: {"x": 1}})), history)
    assert code == 0 and "the first night" in said["info"]["history"]["tiny"]


@pytest.mark.parametrize("check", [True, False])
def test_a_night_of_another_length_is_another_first_night(nightly, tmp_path, check):
    """One of more steps, or of as many with a last check: the nights after it are compared with it and not with a shorter one."""
    history = tmp_path / "history"
    run(nightly, night(tmp_path / "1"), history)
    lines = lines_of(3 if check else 5)
    if check:
        lines.insert(-1, {**step_of(3, QUANTITIES[:7]), "trained": False})
    code, said = run(nightly, night(tmp_path / "2", lines), history)
    word = "(3 steps and a last check)" if check else "(5 steps)"
    assert code == 0 and "the first night" in said["info"]["history"]["tiny"] and word in said["info"]["history"]["tiny"]
    first, longer = sorted(p.name for p in history.iterdir())
    for name, again, with_ in (("3", lines, longer), ("4", lines_of(), first)):
        code, said = run(nightly, night(tmp_path / name, again), history)
        assert code == 0 and f"compared with {with_}" in said["info"]["history"]["tiny"]
    code, said = run(nightly, night(tmp_path / "5", [{**lines[0], "versions": {"torch": "9"}}, *lines[1:]]), history)
    assert code == 0 and "across versions" in said["info"]["history"]["tiny"] and "the same bits" in said["info"]["history"]["tiny"]


def failed(said, name):
    return next((c["verdict"], c["reason"]) for c in said["children"] if c["name"] == name)


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_damaged_ledger_is_no_first_night(nightly, tmp_path, damaged):
    """The reports are green, and no night was before it: it is not kept as one to compare with."""
    folder = night(tmp_path / "1")
    path = folder / "tiny-repro" / "a" / runlog.FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(b"{" + line[2:] if i == damaged else line for i, line in enumerate(lines)))
    code, said = run(nightly, folder, tmp_path / "history")
    assert code == Status.INVALID.exit_code and not list((tmp_path / "history").iterdir())
    assert "the ledger of tonight is damaged: " in next(c for c in said["children"] if c["name"].endswith("last green night"))["reason"]


def test_a_gate_that_did_not_run_fails_the_night(nightly, tmp_path):
    code, said = run(nightly, night(tmp_path / "1", leave_out=["logprob"]), tmp_path / "h")
    assert code == 11 and failed(said, "tiny: gate logprob")[0] == "NOT_RUN"
    folder = night(tmp_path / "2")
    (folder / "tiny" / "report.json").unlink()
    code, said = run(nightly, folder, tmp_path / "h")
    assert code == 11 and "did not run" in failed(said, "tiny: gate rerun")[1]
    assert not list((tmp_path / "h").iterdir())


def test_an_interrupted_or_damaged_report_fails_the_night(nightly, tmp_path):
    folder = night(tmp_path / "1")
    dump(folder / "tiny" / "report.json", combine("gates", [passed(g) for g in GATES]), complete=False, running="test_logprob")
    code, said = run(nightly, folder, tmp_path / "h")
    assert code == 10 and "ended in the middle of test_logprob" in failed(said, "tiny: gates")[1]
    folder = night(tmp_path / "2")
    (folder / "tiny-repro" / "report.json").write_text("{")
    code, said = run(nightly, folder, tmp_path / "h")
    assert code == 10 and "cannot be read" in failed(said, "tiny: recipe twice")[1]


def test_a_control_that_was_not_caught_fails_the_night(nightly, tmp_path):
    folder = night(tmp_path / "1")
    dump(folder / "tiny-control-rerun" / "report.json", passed("gates"), complete=True)
    code, said = run(nightly, folder, tmp_path / "h")
    assert code == 1 and "this gate cannot fail" in failed(said, "tiny: control of rerun")[1]


@pytest.mark.parametrize(("other", "code", "word"), [
    (passed("rerun", dtype="float32"), 1, "not found in 1 of 2 tests (float32): this gate cannot fail"),
    (Verdict("rerun", Status.FAIL, "raised AssertionError", info={"raised": True}), 10, "broke off in 1 of 2 tests (rerun) before the planted"),
    (Verdict("rerun", Status.FAIL, children=[Verdict("pytest call", Status.FAIL, info={"raised": True})]), 10, "broke off in 1 of 2 tests")])
def test_a_control_that_was_caught_in_one_dtype_only_fails_the_night(nightly, tmp_path, other, code, word):
    folder = night(tmp_path / "1")
    caught = Verdict("rerun", Status.FAIL, "planted", coverage={"tokens": Coverage(3, 3)}, first_bad=Place(layer=1), info={"dtype": "bfloat16"})
    dump(folder / "tiny-control-rerun" / "report.json", combine("gates", [caught, caught]), complete=True)
    assert run(nightly, folder, tmp_path / "h")[0] == 0
    dump(folder / "tiny-control-rerun" / "report.json", combine("gates", [caught, other]), complete=True)
    found, said = run(nightly, folder, tmp_path / "h")
    assert found == code and word in failed(said, "tiny: control of rerun")[1]


def test_a_budget_of_what_was_not_measured_is_not_kept(nightly, tmp_path):
    folder = night(tmp_path / "1")
    dump(folder / "tiny" / "report.json", combine("gates", [passed(g) for g in GATES]), complete=True)
    report = folder / "tiny-repro" / "report.json"
    for seconds in ({}, {"b": 11.0}, None):
        report.write_text(json.dumps({**json.loads(report.read_text()), "seconds": seconds}))
        code, said = run(nightly, folder, tmp_path / "h", "--cost-max", "1.5", "--seconds-max", "60")
        assert code == 11 and failed(said, "tiny: time of the recipe") == ("NOT_RUN", "the time of both runs is not recorded")
        assert failed(said, "tiny: cost of cost") == ("NOT_RUN", "no cost is recorded")


@pytest.mark.parametrize("more", ["/models/mine", "a/b", "", "tiny"])
def test_a_profile_that_names_no_folder_of_its_own_is_wrong_usage(nightly, tmp_path, more, capsys):
    with pytest.raises(SystemExit) as caught:
        run(nightly, night(tmp_path / "1"), tmp_path / "h", "--profile", more)
    assert caught.value.code == 2 and f"--profile {more}" in capsys.readouterr().err


def test_a_cost_over_its_budget_fails_the_night(nightly, tmp_path):
    code, said = run(nightly, night(tmp_path / "1", ratio=1.6), tmp_path / "h", "--cost-max", "1.5")
    assert code == 1 and failed(said, "tiny: cost of cost") == ("FAIL", "1.6x of the unaligned run, the budget is 1.5")
    folder = night(tmp_path / "both")  # one test a dtype: the larger counts
    report = combine("gates", [*(passed(g) for g in GATES if g != "cost"), passed("cost", cost={"ratio": 1.1}), passed("cost", cost={"ratio": 1.7})])
    dump(folder / "tiny" / "report.json", report, complete=True)
    code, said = run(nightly, folder, tmp_path / "h", "--cost-max", "1.5")
    assert code == 1 and failed(said, "tiny: cost of cost")[1].startswith("1.7x")
    code, said = run(nightly, night(tmp_path / "2", share=0.031), tmp_path / "h")
    assert code == 1 and "0.031 of a step, the budget is 0.03" in failed(said, "tiny: cost of the ledger")[1]
    code, said = run(nightly, night(tmp_path / "3", share=float("nan")), tmp_path / "h")
    assert code == 1, "a cost that is no number is no cost within the budget"
    code, said = run(nightly, night(tmp_path / "4"), tmp_path / "h", "--seconds-max", "20")
    assert code == 1 and "21 s, the budget is 20" in failed(said, "tiny: time of the recipe")[1]


def test_a_recipe_that_did_not_run_fails_the_night(nightly, tmp_path):
    folder = night(tmp_path / "1")
    (folder / "tiny-repro" / "report.json").unlink()
    (folder / "tiny-repro" / "a" / runlog.FILE).unlink()
    code, said = run(nightly, folder, tmp_path / "h")
    assert code == 11 and failed(said, "tiny: recipe twice")[0] == "NOT_RUN"
    assert failed(said, "tiny: against the last green night")[0] == "NOT_RUN"


def test_the_pipelines_call_the_scripts():
    for name in ("github-actions.yml", "buildkite.yml"):
        text = (ROOT / "ci" / name).read_text()
        assert "ci/nightly.sh" in text and "ci/gate.sh" in text


@pytest.mark.parametrize(("script", "env"), [("nightly.sh", {"PROFILES": "dense-tiny models/mine"}), ("gate.sh", {"REPORT": f"{__file__}/out"})])
def test_the_scripts_refuse_what_they_cannot_do_as_wrong_usage(script, env):
    done = subprocess.run([ROOT / "ci" / script], env={**os.environ, "PYTHON": "/bin/false", **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and ("models/mine" in done.stderr or "test_nightly.py" in done.stderr)
