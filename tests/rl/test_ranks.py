"""Rank processes: commands reach the right rank, and a rank that fails is named while all are ended."""
from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.test_cli import HIDE
from vime.rl.ranks import Ranks, TrainerDied, TrainerFailed

WORKER = "tests.rl.workers:Worker"


@pytest.fixture(autouse=True)
def workers_are_importable(monkeypatch):
    """In the launcher too, from whatever folder pytest was started."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.fixture
def ranks():
    with Ranks(3, WORKER, {"a": 1}, timeout_s=30) as pool:
        yield pool


def gone(pid: int, within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_results_come_in_rank_order_with_own_arguments(ranks):
    assert ranks.call("whoami", extra=5) == [(r, 3, {"a": 1}, 5) for r in range(3)]
    each = [((10 * r,), {}) for r in range(3)]
    assert ranks.call_each("whoami", each) == [(r, 3, {"a": 1}, 10 * r) for r in range(3)]


def test_environment_is_set_before_start():
    with Ranks(1, WORKER, None, env={"VIME_TEST_ENV": "x"}) as pool:
        assert pool.call("env", "VIME_TEST_ENV") == ["x"]
    assert "VIME_TEST_ENV" not in os.environ


@pytest.mark.parametrize(("method", "how"), [("die", "SIGKILL"), ("leave", "exited with code 7")])
def test_a_dead_rank_is_named_and_all_end(ranks, method, how):
    pids = ranks.call("pid")
    with pytest.raises(TrainerDied, match=f"trainer rank 1 of 3 .*{how}.*during {method}; all ranks were ended"):
        ranks.call(method, 1)
    assert all(gone(pid) for pid in pids)
    with pytest.raises(TrainerDied, match="start a new pool"):
        ranks.call("pid")


def test_a_hung_rank_is_named_with_its_stack(ranks):
    pids = ranks.call("pid")
    with pytest.raises(TrainerDied, match=r"trainer rank 2 of 3 did not answer hang within 1 s(.|\n)*in hang"):
        ranks.call("hang", 2, timeout_s=1.0)
    assert all(gone(pid) for pid in pids)


def test_an_error_with_a_message_keeps_it_without_a_traceback(ranks):
    pids = ranks.call("pid")
    with pytest.raises(TrainerFailed, match=r"trainer rank 2 of 3 failed in fail: found nothing, expected something$") as error:
        ranks.call("fail", 2)
    assert error.value.kind == "NoSuchThing"
    assert all(gone(pid) for pid in pids)


def test_a_fault_of_ours_keeps_its_traceback(ranks):
    with pytest.raises(TrainerFailed, match=r"ZeroDivisionError: a fault of ours(.|\n)*Traceback"):
        ranks.call("crash", 0)


def test_a_worker_that_refuses_to_start_is_named():
    with pytest.raises(TrainerFailed, match="rank 1 of 2 failed in start: found a spec that refuses"):
        Ranks(2, WORKER, "refuse").wait_ready()


def test_a_worker_that_cannot_be_imported_is_told():
    with pytest.raises(TrainerDied, match="No module named"):
        Ranks(1, "tests.rl.no_such_module:Worker", None).wait_ready()


def test_ranks_end_with_their_controller():
    code = (
        "import os, sys\nfrom vime.rl.ranks import Ranks\n"
        f"pool = Ranks(2, {WORKER!r}, None)\nprint(*pool.call('pid'), flush=True)\nos._exit(0)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert all(gone(int(pid)) for pid in out.stdout.split())


@pytest.mark.parametrize(("hidden", "preload"), [("megatron", ["megatron.core"]), ("transformers", ["json", "transformers"])])
def test_a_package_that_a_rank_lacks_is_one_message(tmp_path, hidden, preload):
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]), "HIDDEN": hidden}
    started = time.monotonic()
    with pytest.raises(TrainerFailed, match="is not installed in this Python; run") as caught, Ranks(
            2, WORKER, None, preload=preload, env=env, timeout_s=60) as pool:
        pool.call("pid")
    assert "Traceback" not in str(caught.value) and time.monotonic() - started < 30
