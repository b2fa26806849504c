"""The device rule: a broken node never turns green."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gates.devices import Machine, decide, probe
from tests.gates.kit import gate, report, run

pytest_plugins = ["pytester"]

EP8 = gate("gate.record(said('PASS')); gate.describe(ran_on=gate.device)", "gate_ep8")


@pytest.mark.parametrize(("gpus", "driver", "forced", "device"), [
    (8, "d", None, "cuda"), (16, "d", None, "cuda"), (0, None, None, "cpu"),
    (1, "d", None, None), (7, "d", None, None), (7, None, None, None), (0, "d", None, None),
    (0, None, "cpu", "cpu"), (1, "d", "cpu", "cpu"), (8, "d", "cpu", "cpu"), (0, "d", "cpu", "cpu"),
    (0, None, "cuda", None), (7, "d", "cuda", None), (8, "d", "cuda", "cuda"),
])
def test_rule_for_eight(gpus, driver, forced, device):
    assert decide(8, Machine(gpus, driver), forced=forced).device == device


@given(gpus=st.integers(0, 16), needed=st.integers(1, 16), driver=st.sampled_from([None, "libcuda.so.1"]),
       forced=st.sampled_from([None, "cpu", "cuda"]), only=st.sampled_from([None, "cpu", "cuda"]))
def test_never_on_a_device_that_is_not_there(gpus, needed, driver, forced, only):
    decision = decide(needed, Machine(gpus, driver), forced=forced, only=only)
    assert decision.reason
    if decision.device == "cuda":
        assert gpus >= needed and "cpu" not in (forced, only)
    if decision.device == "cpu":
        assert "cuda" not in (forced, only)
        assert "cpu" in (forced, only) or (gpus == 0 and driver is None)


@pytest.mark.parametrize(("gpus", "driver", "args", "rc", "text"), [
    (0, None, [], 0, "ep8 *PASS*"),
    (8, "d", [], 0, "ep8 *PASS*"),
    (7, "d", [], 1, "*7 GPU(s) visible, 8 needed*"),
    (0, "libcuda.so.1", [], 1, "*an NVIDIA driver is here (libcuda.so.1) and no GPU is visible*"),
    (0, None, ["--gate-device", "cuda"], 1, "*--gate-device cuda is forced, needs 8 GPU(s) and sees 0*"),
    (3, "d", ["--gate-device", "cpu"], 0, "ep8 *PASS*"),
])
def test_through_pytest(pytester, gpus, driver, args, rc, text):
    result = run(pytester, EP8, "-m", "gate_ep8", "--gate-report", "out", *args, gpus=gpus, driver=driver)
    assert result.ret == rc
    result.stdout.fnmatch_lines([text])
    assert report(pytester.path / "out")["verdict"] == ("PASS" if rc == 0 else "NOT_RUN")


def test_no_fixture_is_built_where_the_device_is_missing(pytester):
    body = """
@pytest.fixture(scope="session", autouse=True)
def engine():
    open("started", "w").close()
""" + gate("gate.record(said('PASS'))", "gate_ep2")
    assert run(pytester, body, gpus=1, driver="d").ret == 1
    assert not (pytester.path / "started").exists()


def test_contradicting_markers(pytester):
    body = "\n@pytest.mark.gate_ep1(device='cpu')" + gate("gate.record(said('PASS'))", "gate_batch(device='cuda')")
    result = run(pytester, body)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*its markers name different devices: cpu, cuda*"])


def test_probe_of_this_machine():
    assert probe().gpus >= 0


@pytest.mark.parametrize(("args", "verdict", "ran"), [
    ([], "PASS", "everywhere on cuda, part on cpu, "),
    (["--gate-device", "cuda"], "PASS", "everywhere on cuda, "),
    (["--gate-device", "cpu"], "PASS", "everywhere on cpu, part on cpu, "),
])
def test_a_part_for_another_device_is_not_asked_for_where_one_is_forced(pytester, args, verdict, ran):
    body = "".join(gate(f"gate.record(said('PASS')); open('ran', 'a').write('{name} on ' + gate.device + ', ')", mark, f"test_{name}")
                   for name, mark in (("everywhere", "gate_ep2"), ("part", "gate_ep2(device='cpu')")))
    result = run(pytester, body, "-m", "gate_ep2", "--gate-report", "out", *args, gpus=2, driver="d")
    assert (result.ret, report(pytester.path / "out")["verdict"]) == (0, verdict)
    assert (pytester.path / "ran").read_text() == ran


def test_a_gate_that_is_for_another_device_as_a_whole_is_not_run(pytester):
    result = run(pytester, gate("gate.record(said('PASS'))", "gate_ep2(device='cpu')"), "-m", "gate_ep2", "--gate-device", "cuda", gpus=2, driver="d")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*--gate-device cuda is forced, and this gate runs on cpu only*"])
