"""What is selected, what is asked for and missing, and what the plugin does where nothing is."""
from __future__ import annotations

import subprocess
import sys

import pytest

from gates.markers import asked_for
from tests.gates.kit import gate, machine, report, run

pytest_plugins = ["pytester"]

PASS = gate("gate.record(said('PASS'))")
FAIL = gate("gate.record(said('FAIL'))", "gate_batch", "test_bad")


@pytest.mark.parametrize(("expression", "gates"), [
    ("gate_ep8", ["ep8"]), ("gate_ep8 and slow", ["ep8"]), ("not gate_ep8", []), ("slow", []), ("", []),
    ("gate_ep8 or gate_ep2", ["ep2", "ep8"]), ("slow and not gate_ep8", []), ("not (slow or not gate_ep1)", ["ep1"]),
    ("gate_unknown", []),
])
def test_what_an_expression_asks_for(expression, gates):
    assert asked_for(expression) == gates


def test_nothing_collected_is_not_run(pytester):
    result = run(pytester, PASS, "-m", "gate_ep8", "--gate-report", "out")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["ep8 *NOT_RUN*", "*asked for, and no such gate was collected*gate_ep8*"])
    assert report(pytester.path / "out")["verdict"] == "NOT_RUN"


def test_one_of_two_asked_for_is_missing(pytester):
    result = run(pytester, PASS, "-m", "gate_ep8 or gate_logprob")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["logprob *PASS*", "ep8 *NOT_RUN*"])


def test_a_skipped_module_hides_no_gate(pytester):
    hidden = "\npytest.importorskip('surely_not_installed')\n" + gate("pass", "gate_ep8")
    for args in ([], ["-m", "gate_ep8"]):
        result = run(pytester, hidden, *args)
        assert result.ret == 1
        result.stdout.fnmatch_lines(["ep8 *NOT_RUN*", "*skipped itself: could not import 'surely_not_installed'*"])


def test_required_gates(pytester):
    assert run(pytester, PASS, "--gate-require", "logprob").ret == 0
    result = run(pytester, PASS + FAIL, "--gate-require", "gate_batch", "-k", "not test_bad")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["logprob *PASS*", "batch *NOT_RUN*", "*or it was deselected*"])
    result = run(pytester, "\ndef test_plain(): pass\n", "--gate-require", "weights")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["weights *NOT_RUN*"])


def test_stop_at_the_first_failure(pytester):
    result = run(pytester, FAIL + PASS, "-x", "--gate-report", "out")
    assert result.ret == 1
    verdicts = {c["name"]: c["reason"] for c in report(pytester.path / "out")["children"]}
    assert verdicts["logprob"] == "never reached"


def test_a_skip_also_stops_and_is_also_last_failed(pytester):
    machine(pytester)
    skipped = gate("pytest.skip('no')", "gate_batch", "test_bad")
    from tests.gates.kit import HEADER
    pytester.makepyfile(test_it=HEADER + skipped + PASS)
    result = pytester.runpytest_subprocess("-x")
    assert result.ret == 1 and "never reached" in result.stdout.str()
    pytester.runpytest_subprocess()
    result = pytester.runpytest_subprocess("--lf", "-m", "gate_batch or gate_logprob")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["batch *NOT_RUN*", "NOT_RUN: 0 of 1 gate(s) PASS*"])


def test_keyword(pytester):
    result = run(pytester, FAIL + PASS, "-k", "gate_logprob")
    assert result.ret == 0
    assert "batch" not in result.stdout.str().partition("= gates =")[2]


def test_inert_where_no_gate_is_selected(pytester, every_plugin):
    pytester.makepyfile("""
        import sys
        def test_plain():
            assert not {"torch", "vllm", "megatron", "numpy", "rich", "jinja2"} & set(sys.modules)
    """)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:anyio")
    assert result.ret == 0
    assert "gates" not in result.stdout.str().replace("vime_gates", "").replace("plugins:", "")
    pytester.makepyfile("")
    assert pytester.runpytest_subprocess().ret == 5  # pytest's own "nothing collected" is left alone


def test_collect_only_judges_nothing(pytester):
    result = run(pytester, PASS, "--collect-only", "-q", "--gate-report", "out")
    assert result.ret == 0
    assert not (pytester.path / "out").exists()


def test_setup_only_is_not_run(pytester):
    result = run(pytester, PASS, "--setup-only")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["logprob *NOT_RUN*"])


def test_xdist_is_refused(pytester, every_plugin):
    result = run(pytester, PASS, "-n", "2", "-m", "gate_logprob")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*gates do not run under pytest-xdist*"])
    result = run(pytester, PASS, "-n", "2")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*gates do not run under pytest-xdist*"])
    assert run(pytester, "\ndef test_plain(): pass\n", "-n", "2").ret == 0


def test_the_packaged_gates_are_found_from_a_foreign_folder(tmp_path, every_plugin):
    (tmp_path / "setup.cfg").write_text("[tool:pytest]\n")
    out = subprocess.run([sys.executable, "-m", "pytest", "--pyargs", "gates", "-m", "gate_logprob", "--collect-only", "-q"],
                         cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stdout + out.stderr
    assert "test_logprob.py::" in out.stdout
