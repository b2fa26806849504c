"""A gate that dies leaves no green behind: killed, timed out, exiting by itself, interrupted."""
from __future__ import annotations

import pytest

from tests.gates.kit import gate, report, run

pytest_plugins = ["pytester"]

PASS = gate("gate.record(said('PASS'))", "gate_batch", "test_good")


@pytest.mark.parametrize("death", [
    "os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getpid(), signal.SIGSEGV)", "os.abort()",
])
def test_killed_by_a_signal(pytester, death):
    (pytester.path / "out").mkdir()
    (pytester.path / "out" / "report.json").write_text('{"verdict": "PASS", "complete": true}')
    (pytester.path / "out" / "report.html").write_text("PASS")
    result = run(pytester, PASS + gate(f"gate.record(said('PASS')); {death}"), "--gate-report", "out",
                 "-p", "no:faulthandler")
    assert result.ret < 0
    found = report(pytester.path / "out")
    assert (found["verdict"], found["complete"]) == ("NOT_RUN", False)
    assert found["running"] == "test_it.py::test_it"
    verdicts = {c["name"]: (c["verdict"], c["reason"]) for c in found["children"]}
    assert verdicts == {"batch": ("PASS", ""), "logprob": ("NOT_RUN", "started and did not finish")}
    assert not (pytester.path / "out" / "report.html").exists()


def test_exit_zero_behind_pytests_back_leaves_an_unfinished_report(pytester):
    result = run(pytester, gate("gate.record(said('PASS')); os._exit(0)"), "--gate-report", "out")
    assert result.ret == 0  # nothing inside the process can prevent this; gates.runner reads the report instead
    found = report(pytester.path / "out")
    assert (found["verdict"], found["complete"]) == ("NOT_RUN", False)


@pytest.mark.parametrize("method", ["signal", "thread"])
def test_timeout(pytester, method):
    result = run(pytester, gate("gate.record(said('PASS')); time.sleep(60)"), "--gate-report", "out",
                 "--timeout", "1", "--timeout-method", method)
    assert result.ret == 1
    found = report(pytester.path / "out")
    assert found["verdict"] == ("INVALID" if method == "signal" else "NOT_RUN")
    if method == "signal":
        result.stdout.fnmatch_lines(["*timed out, so it could not be judged*"])


def test_pytest_exit_with_zero_is_not_green(pytester):
    result = run(pytester, gate("gate.record(said('PASS')); pytest.exit('enough', returncode=0)"), "--gate-report", "out")
    assert result.ret == 1
    assert report(pytester.path / "out")["children"][0]["reason"] == "started and did not finish"


def test_interrupted(pytester):
    result = run(pytester, gate("raise KeyboardInterrupt"))
    assert result.ret == 2
    result.stdout.fnmatch_lines(["logprob *NOT_RUN*"])


def test_a_second_attempt_does_not_forgive(pytester):
    """What a rerun plugin does: the same item again, until it is green."""
    body = "\ncount = []\n" + gate("count.append(1); gate.record(said('FAIL' if len(count) == 1 else 'PASS'))")
    machine_again = """
import gates.collect, pytest
from gates.devices import Machine
from _pytest.runner import runtestprotocol
gates.collect.probe = lambda: Machine(0)
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    runtestprotocol(item, nextitem=nextitem, log=False)
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        item.ihook.pytest_runtest_logreport(report=report)
    return True
"""
    from tests.gates.kit import HEADER
    pytester.makeconftest(machine_again)
    pytester.makepyfile(test_it=HEADER + body)
    result = pytester.runpytest_subprocess("--gate-report", "out")
    assert result.ret == 1
    assert report(pytester.path / "out")["verdict"] == "FAIL"
