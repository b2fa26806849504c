"""Every verdict and exit code, through a real pytest."""
from __future__ import annotations

import json

import pytest

from alignment import evidence
from tests.gates.kit import gate, properties, report, run

pytest_plugins = ["pytester"]

PASS = "gate.record(said('PASS'))"


@pytest.mark.parametrize(("body", "status", "text"), [
    (PASS, "PASS", "tokens 3/3"),
    ("gate.record(said('FAIL', first_bad=Place(layer=4, tensor='q'), causes=[Cause('stale', 'one step late')]))",
     "FAIL", "layer 4, tensor q"),
    ("gate.record(said('INVALID', reason='non-finite'))", "INVALID", "non-finite"),
    ("gate.record(said('NOT_RUN', reason='nothing to see'))", "NOT_RUN", "nothing to see"),
    ("gate.record(said('PASS', 2, 3))", "INVALID", "coverage is not complete: tokens 2/3"),
    ("gate.record(said('PASS', 0, 3))", "NOT_RUN", "nothing was compared"),
    ("gate.record(Verdict('x', 'PASS'))", "NOT_RUN", "nothing was compared"),
    ("pass", "NOT_RUN", "it recorded nothing"),
    ("gate.not_run('no model here')", "NOT_RUN", "no model here"),
    ("pytest.skip('later')", "NOT_RUN", "skipped: later"),
    (f"{PASS}; pytest.skip('the rest')", "NOT_RUN", "skipped: the rest"),
    ("pytest.xfail('known')", "NOT_RUN", "xfailed"),
    ("assert 1 == 2", "FAIL", "raised AssertionError"),
    (f"{PASS}; assert 1 == 2", "FAIL", "raised AssertionError"),
    ("raise TypeError('boo')", "INVALID", "call raised TypeError: boo"),
    (f"{PASS}; raise TypeError('boo')", "INVALID", "call raised TypeError: boo"),
    ("raise TypeError('could not start (its log is /l): CompilationError: at 7:4:\\n  def f(x):\\n\\n    x +\\n    ^\\nno such name')", "INVALID",
     "call raised TypeError: could not start (its log is /l): CompilationError: at 7:4: | def f(x): | x + | no such name"),
    ("raise TypeError('first\\n' + 'middle\\n' * 20 + 'last')", "INVALID", "TypeError: first | ... | middle | middle | middle | last"),
    ("raise SystemExit(0)", "INVALID", "call raised SystemExit"),
    ("raise ModuleNotFoundError('No module named vllm', name='vllm')", "NOT_RUN", "vllm is not installed in this Python; run"),
    ("raise ModuleNotFoundError('No module named x', name='x')", "INVALID", "call raised ModuleNotFoundError"),
    ("gate.record(True)", "INVALID", "takes an alignment.verdict.Verdict, found bool"),
    (f"{PASS}; gate.happened('weights changed', 0)", "NOT_RUN", "weights changed: this did not happen"),
    (f"{PASS}; gate.happened('weights changed', 12)", "PASS", "tokens 3/3"),
    (f"{PASS}; gate.control('ulp', Place(layer=2), said('FAIL', first_bad=Place(layer=2, tensor='q')))", "PASS", "1/1"),
    (f"{PASS}; gate.control('ulp', Place(layer=2), said('FAIL', first_bad=Place(layer=3)))", "INVALID",
     "layer: planted at 2, reported 3"),
    (f"{PASS}; gate.control('ulp', Place(layer=2), said('PASS'))", "INVALID", "the gate said PASS"),
    (f"{PASS}; gate.control('ulp', Place(layer=2), said('INVALID'))", "INVALID", "the gate said INVALID"),
    (f"{PASS}; gate.control('ulp', None, said('FAIL'))", "INVALID", "takes a name, a Place and a Verdict"),
    (f"{PASS}; gate.control('off', Place(), said('FAIL', first_bad=Place(layer=3)))", "INVALID", "its place is empty"),
    (f"{PASS}; gate.control('off', Place(layer=3), said('FAIL', first_bad=Place(layer=3)), anywhere=True)", "INVALID", "one of the two"),
    (f"{PASS}; gate.control('off', Place(), said('FAIL', first_bad=Place(layer=3)), anywhere=True)", "PASS", "1/1"),
    (f"{PASS}; gate.control('off', Place(), said('FAIL'), anywhere=True)", "INVALID", "reported no place"),
    (f"{PASS}; gate.control('off', Place(), said('PASS'), anywhere=True)", "INVALID", "planted off anywhere, and the gate said PASS"),
    ("v = gate.record(said('FAIL', reason='differs')); v.status = 'PASS'", "FAIL", "differs"),
    ("gate.record(said('PASS', first_bad=Place(position=3)))", "INVALID", "its first bad place is position 3"),
    ("gate.record(said('PASS', children=[said('FAIL')]))", "INVALID", "a part of it is FAIL"),
    ("gate.record(said('PASS', stats={'differing': 5}))", "INVALID", "it says PASS, and 5 differ"),
    ("gate.third_party(said('PASS', tier='1e-2'))", "NOT_RUN", "only a third party was recorded"),
    (f"{PASS}; gate.happened('hits', float('nan'))", "NOT_RUN", "this did not happen (found nan)"),
    (f"{PASS}; gate.cost([float('nan')], [1.0])", "INVALID", "cost takes pairs of times above 0"),
    (PASS + """
    try: gate.not_run('gave up')
    except Exception: pass""", "NOT_RUN", "gave up"),
])
def test_one_gate(pytester, body, status, text):
    result = run(pytester, gate(body), "--gate-report", "out", "--junitxml", "junit.xml")
    assert result.ret == (0 if status == "PASS" else 1)
    found = report(pytester.path / "out")
    assert (found["verdict"], found["complete"]) == (status, True)
    (props,) = properties(pytester.path / "junit.xml")
    assert props["gate.verdict"] == status
    assert text in result.stdout.str()
    result.stdout.fnmatch_lines([f"logprob *{status}*", f"{status}: * gate(s) PASS*"])


@pytest.mark.parametrize(("body", "raised"), [("assert 1 == 2", True), ("gate.record(said('FAIL')); assert 1 == 2", False)])
def test_a_fail_says_whether_an_assertion_made_it(pytester, body, raised):
    """``ci/nightly.py`` takes that of a comparison alone for a control that was caught."""
    run(pytester, gate(body), "--gate-report", "out")
    (said,) = report(pytester.path / "out")["children"]
    assert said["verdict"] == "FAIL" and said["info"].get("raised", False) == raised


@pytest.mark.parametrize(("mark", "status"), [
    ("@pytest.mark.skip(reason='no')", "NOT_RUN"),
    ("@pytest.mark.skipif(True, reason='no GPU')", "NOT_RUN"),
    ("@pytest.mark.xfail(run=False)", "NOT_RUN"),
    ("@pytest.mark.xfail(raises=AssertionError)", "NOT_RUN"),
    ("@pytest.mark.usefixtures('missing_fixture')", "INVALID"),
])
def test_marks_that_pytest_calls_green(pytester, mark, status):
    body = "gate.record(said('PASS')); assert 0" if "raises" in mark else PASS
    result = run(pytester, "\n" + mark + gate(body), "--gate-report", "out")
    assert result.ret == 1
    assert report(pytester.path / "out")["verdict"] == status


def test_a_fixture_that_skips_or_breaks(pytester):
    body = """
@pytest.fixture
def engine(): pytest.skip("no engine")
@pytest.fixture
def broken(): raise OSError("disk")
@pytest.fixture
def late():
    yield
    raise OSError("left a process behind")
@pytest.mark.gate_batch
def test_batch(engine, gate): gate.record(said("PASS"))
@pytest.mark.gate_weights
def test_weights(broken, gate): gate.record(said("PASS"))
@pytest.mark.gate_rerun
def test_rerun(late, gate): gate.record(said("PASS"))
"""
    result = run(pytester, body, "--gate-report", "out")
    assert result.ret == 1
    verdicts = {c["name"]: (c["verdict"], c["reason"]) for c in report(pytester.path / "out")["children"]}
    assert verdicts["batch"] == ("NOT_RUN", "skipped: no engine")
    assert verdicts["weights"] == ("INVALID", "setup raised OSError: disk")
    assert verdicts["rerun"][0] == "INVALID" and "teardown raised OSError" in verdicts["rerun"][1]


@pytest.mark.parametrize(("second", "status"), [
    ("pass", "PASS"), ("assert 0", "FAIL"), ("raise OSError", "INVALID"), ("pytest.skip('no')", "NOT_RUN"),
])
def test_subtests(pytester, second, status):
    body = f"""
@pytest.mark.gate_logprob
def test_it(gate, subtests):
    with subtests.test("a"): pass
    with subtests.test("b"): {second}
    gate.record(said("PASS"))
"""
    result = run(pytester, body, "--gate-report", "out")
    assert result.ret == (0 if status == "PASS" else 1)
    assert report(pytester.path / "out")["verdict"] == status


def test_cost_is_judged_and_printed(pytester):
    body = gate("gate.cost([1.2, 1.3, 1.1], [1.0, 1.0, 1.0])", "gate_cost(cost_max=1.25)")
    result = run(pytester, body)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["cost *PASS *pairs 3/3*1.20x*"])
    result = run(pytester, body, "--gate-cost-max", "1.1")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*1.20x the unaligned run, 1.1x allowed*"])


def test_a_cost_gate_without_a_cost(pytester):
    result = run(pytester, gate("gate.record(said('PASS'))", "gate_cost(cost_max=1.25)"))
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*no cost was measured*"])


def test_the_lowest_tier_of_several_is_said(pytester):
    result = run(pytester, gate("gate.record(said('PASS', tier='1e-6')); gate.record(said('PASS', tier='0.5'))"), "--gate-report", "out")
    assert report(pytester.path / "out")["children"][0]["tier"] == "0.5", result.stdout.str()


@pytest.mark.parametrize(("mark", "asked", "body", "good"), [
    ("", "exact", "tier='1e-6'", False), ("", "exact", "", True), ("", "1e-6", "tier='1e-6'", True), ("", "1e-6", "tier='1e-3'", False),
    ("", "exact", "children=[said('PASS', tier='1e-6')]", False), ("", None, "tier='1e-6'", True), ("", "exact", "tier='loose'", False),
    ("(tier='exact')", None, "tier='1e-6'", False), ("(tier='1e-6')", None, "tier='1e-6'", True), ("(tier='1e-6')", "exact", "tier='1e-6'", False),
    ("", "exact", "info={'third_party': True}, tier='1e-2')); gate.record(said('PASS'", True),
])  # fmt: skip
def test_a_lower_tier_than_asked_for_is_not_green(pytester, mark, asked, body, good):
    result = run(pytester, gate(f"gate.record(said('PASS'{', ' if body else ''}{body}))", f"gate_logprob{mark}"), "--gate-report", "out",
                 *(["--gate-tier", asked] if asked else []))
    found = report(pytester.path / "out")
    assert (found["verdict"], result.ret) == (("PASS", 0) if good else ("INVALID", 1)), result.stdout.str()
    if not good:
        assert "was asked for" in found["reason"]


def test_page_and_evidence(pytester):
    body = gate("gate.describe(model='m', dtype='bfloat16'); gate.record(said('PASS'))") + gate(
        "gate.record(said('FAIL'))", "gate_batch", "test_undescribed")
    result = run(pytester, body, "--gate-report", "out")
    assert result.ret == 1
    found = json.loads((pytester.path / "out" / "evidence.json").read_text())
    assert evidence.problems(found) == []
    assert [(c["gate"], c["model"], c["device"], c["verdict"]) for c in found["claims"]] == [("logprob", "m", "cpu", "PASS")]
    assert "1 of 2 PASS" in (pytester.path / "out" / "report.html").read_text()
    run(pytester, body, "--gate-report", "out", "--gate-control")
    assert not (pytester.path / "out" / "evidence.json").exists()


def test_hostile_names_stay_on_one_line(pytester):
    body = gate("gate.record(said('FAIL', first_bad=Place(tensor='a\\x1b[2Jb\\nc<script>')))")
    result = run(pytester, body)
    assert result.ret == 1
    table = result.stdout.str().partition("= gates =")[2].partition("short test summary")[0]
    assert "a\\x1b[2Jb\\x0ac" in table and "\x1b[2J" not in table


def test_team_fixture_without_a_marker_is_refused(pytester):
    result = run(pytester, "\ndef test_it(gate): pass\n")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*carries no gate marker*"])


@pytest.mark.parametrize("commit", [None, "a" * 40])
def test_a_report_says_when_its_evidence_names_no_commit(tmp_path, commit):
    from gates.writing import no_commit

    assert no_commit(tmp_path) == ""
    (tmp_path / "evidence.json").write_text(json.dumps({"commit": commit}))
    assert ("VIME_COMMIT" in no_commit(tmp_path)) == (commit is None)
