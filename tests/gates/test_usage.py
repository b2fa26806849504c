"""Options and markers: the help is pinned, wrong use is refused before anything runs."""
from __future__ import annotations

import pytest

from tests.gates.kit import gate, run

pytest_plugins = ["pytester"]

HELP = """\
vime gates:
  --gate-device={cpu,cuda}
                        Force a device. A forced device that is missing is
                        NOT_RUN, never a skip. Default: CUDA where enough GPUs
                        are visible, CPU only where there is no GPU and no
                        driver.
  --gate-profile=NAME   Profile, or a folder with a Hugging Face checkpoint.
                        Default: each gate's own.
  --gate-tier={exact,1e-6}
                        Judge at this tier. Default: each gate's own, else
                        exact.
  --gate-report=DIR     Write report.json, report.html and evidence.json to
                        DIR.
  --gate-cost-max=RATIO
                        Fail a cost gate whose aligned run takes more than RATIO
                        times the unaligned one.
  --gate-require=NAME   This gate has to run: NOT_RUN and exit 1 if it did not.
                        Repeatable.
  --gate-control        Plant each gate's own fault: the gate must FAIL at the
                        planted place, exit 1.
"""


def test_help_is_pinned(pytester, every_plugin):
    result = pytester.runpytest_subprocess("--help")
    text = result.stdout.str()
    assert " ".join(HELP.split()) in " ".join(text.split())


def test_markers_are_listed(pytester, every_plugin):
    text = pytester.runpytest_subprocess("--markers").stdout.str()
    for name in ("rerun", "batch", "logprob", "layerwise", "weights", "cost", "ep1", "ep2", "ep8"):
        assert f"@pytest.mark.gate_{name}(" in text


@pytest.mark.parametrize(("mark", "text"), [
    ("gate_logprob(teir='1e-6')", "gate_logprob has no argument 'teir'*Did you mean 'tier'?*"),
    ("gate_logprob(tier='1e-3')", "*gate_logprob(tier='1e-3'): tier is one of 'exact', '1e-6'*"),
    ("gate_logprob('exact')", "*takes keyword arguments only*found 'exact'*"),
    ("gate_logprob(cost_max=2)", "*gate_logprob has no argument 'cost_max'*"),
    ("gate_cost(cost_max=0)", "*cost_max is a ratio above 0*"),
    ("gate_cost(cost_max='2')", "*cost_max is a ratio above 0*"),
    ("gate_ep8(gpus=0)", "*gpus is a whole number of at least 1*"),
    ("gate_ep8(gpus=True)", "*gpus is a whole number of at least 1*"),
    ("gate_ep8(device='gpu')", "*device is one of 'cpu', 'cuda'*"),
    ("gate_ep8(profile='')", "*profile is the name of a profile*"),
    ("gate_lgprob", "*there is no gate marker 'gate_lgprob'. Did you mean gate_logprob?*"),
])
def test_bad_marker_arguments(pytester, mark, text):
    result = run(pytester, gate("raise SystemError('it ran')", mark))
    assert result.ret == 4
    result.stderr.fnmatch_lines([f"ERROR: test_it.py::test_it: {text}" if not text.startswith("*") else f"ERROR: {text}"])


def test_bad_marker_is_refused_even_when_deselected(pytester):
    body = gate("pass", "gate_ep8(gpus=-1)") + gate("gate.record(said('PASS'))", "gate_batch", "test_good")
    assert run(pytester, body, "-m", "gate_batch").ret == 4


def test_somebody_elses_registered_marker_is_left_alone(pytester):
    pytester.makeini("[pytest]\nmarkers = gate_keeper: ours\n")
    assert run(pytester, "\n@pytest.mark.gate_keeper(3)\ndef test_it(): pass\n").ret == 0


@pytest.mark.parametrize(("args", "text"), [
    (["--gate-device", "tpu"], "*invalid choice: 'tpu'*"),
    (["--gate-tier", "1e-3"], "*invalid choice: '1e-3'*"),
    (["--gate-cost-max", "nan"], "*a ratio above 0 is expected*'nan'*"),
    (["--gate-cost-max", "-1"], "*a ratio above 0 is expected*"),
    (["--gate-require", "logprop"], "*there is no gate 'logprop'; did you mean 'logprob'?*"),
    (["--gate-report", "test_it.py"], "*exists and is not a folder*"),
    (["--gate-profile", "nonsense"], "*--gate-profile: there is no profile 'nonsense'*"),
])
def test_bad_options(pytester, args, text):
    result = run(pytester, gate("gate.record(said('PASS'))"), *args)
    assert result.ret == 4
    result.stderr.fnmatch_lines([text])


def test_strict_markers(pytester):
    assert run(pytester, gate("gate.record(said('PASS'))"), "--strict-markers").ret == 0
