"""The plugin does nothing unless asked, does each operation alone, and what is not aligned is named."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vime.vllm import plugin

SCRIPT = Path(__file__).with_name("each_op.py")


def test_settings_are_checked_by_name(monkeypatch) -> None:
    assert json.loads(plugin.settings(["norm", "linear"])) == {"ops": ["linear", "norm"]}
    with pytest.raises(plugin.PluginError, match=r"unknown operation 'softmax'; known: embedding, linear"):
        plugin.settings(["softmax"])
    monkeypatch.setenv(plugin.ENV, "yes")
    with pytest.raises(plugin.PluginError, match="VIME_PLUGIN is 'yes'; expected JSON"):
        plugin.requested()


def test_unset_touches_nothing() -> None:
    """Without VIME_PLUGIN the entry point does not even import vLLM."""
    code = ("import sys; from vime.vllm import plugin; plugin.register(); plugin.register(); assert plugin.installed() is None; "
            "assert not [m for m in sys.modules if m == 'vllm' or m == 'torch' or m.startswith('vime.ops')]; print('untouched')")
    env = {k: v for k, v in os.environ.items() if k != plugin.ENV}
    assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout == "untouched\n"


def test_the_entry_point_is_declared() -> None:
    from importlib.metadata import entry_points

    found = {e.value for e in entry_points(group="vllm.general_plugins")}
    assert "vime.vllm.plugin:register" in found


@pytest.fixture(scope="module")
def each_op(llama_dir: Path) -> dict:
    """One engine per operation, switched on alone, plus one with the plugin unset; forked from one import of vLLM."""
    env = {k: v for k, v in os.environ.items() if k != plugin.ENV} | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run([sys.executable, str(SCRIPT), str(llama_dir)], env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("op", [op for op in plugin.ROUTED if op != "moe"])  # no place in a dense model
def test_each_operation_alone(each_op: dict, op: str) -> None:
    """Its kernel runs, no other does, the contract says so, and every other operation is named as not aligned."""
    found = each_op[op]
    assert "error" not in found, found
    assert found["places"] == {op: found["places"][op]} and found["places"][op] >= 1
    kernels = {name.split("/")[1] for name, n in found["kernels"].items() if n}
    assert kernels == {op}
    assert {name for name, impl in found["contract"]["ops"].items() if impl != "stock"} == {op}
    for other in plugin.ROUTED:
        pair = {"logprob", "sampling"}  # one function of vLLM's runner serves both
        if other not in (op, "moe") and {op, other} != pair:
            assert f"{other}: " in found["refused"][other]


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "partial"])
def test_rotary_classes_rotate_as_vllm_defines(each_op: dict, kind: str) -> None:
    found = each_op["rope kinds"]
    assert "error" not in found, found
    assert found[kind]["class"].startswith("Vime") and found[kind]["difference"] < 1e-4


def test_plugin_unset_is_stock_vllm(each_op: dict) -> None:
    stock = each_op["stock"]
    assert "error" not in stock, stock
    assert stock["kernels"] == {} and stock["installed"] is None
    assert stock["vime_methods"] == []
