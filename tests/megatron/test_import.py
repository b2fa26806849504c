"""``import vime`` is quick, and hooks change nothing that a GPU run would meet."""
from __future__ import annotations

import subprocess
import sys


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_vime_brings_no_framework():
    code = """
import sys, vime, vime.megatron, vime.determinism, vime.contract
assert not vime.is_enabled() and not vime.is_enabled("norm") and vime.active_ops() == ()
vime.disable()
print(sorted({"torch", "numpy", "megatron", "vllm", "transformers"} & set(sys.modules)))
"""
    assert run(code) == "[]"


def test_enabling_does_not_touch_cuda():
    """Only vime.megatron.cpu answers for CUDA, and only when it is asked to."""
    code = """
import torch
before = {n: getattr(torch.cuda, n) for n in ("current_device", "Stream", "Event", "synchronize")}, torch.Tensor.cuda, torch.Tensor.type
import vime
vime.enable(); vime.disable()
import vime.megatron.forward, vime.megatron.optim, vime.megatron.model
after = {n: getattr(torch.cuda, n) for n in ("current_device", "Stream", "Event", "synchronize")}, torch.Tensor.cuda, torch.Tensor.type
from vime.megatron import cpu
print(before == after and not cpu.applied())
"""
    assert run(code) == "True"


def test_without_megatron_it_says_so():
    code = """
import sys
sys.modules["megatron"] = None
import vime
try:
    vime.enable()
except vime.megatron.Refused as error:
    print(error)
print(vime.is_enabled())
"""
    out = run(code)
    assert "megatron-core can't be imported" in out and "to install it run" in out and out.endswith("False")
