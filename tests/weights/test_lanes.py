"""The digest kernel of the ledger runs on a CPU as well: interpreted against its definition, and compiled for Hopper without a GPU.

That the compiled kernel gives the same text on a GPU is asserted by ``tests/cuda/test_weights.py``.
"""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from alignment.digest import device_digest as plain
from alignment.digest import digest
from vime.weights import lanes

CASES = Path(__file__).with_name("lanes_cases.py")


def test_kernel_interpreted() -> None:
    """A process of its own: the interpreter has to be chosen before Triton is imported."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", str(CASES)],
                          env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed.group(1)) >= 30 and "skipped" not in done.stdout, done.stdout[-1000:]


@pytest.mark.parametrize("words", ["i32", "i64"])
@pytest.mark.parametrize("first", ["i32", "i64"])
def test_kernel_compiles_for_hopper(words: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vime.weights.lanes_triton import lanes as kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {"data_ptr": "*i32", "out_ptr": "*i64", "words": words, "first": first, "BLOCK": "constexpr"}
    code = triton.compile(ASTSource(kernel, signature, {"BLOCK": lanes._BLOCK}), target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
    assert ".target sm_90" in code and "atom" in code


def test_elsewhere_it_is_the_definition() -> None:
    value = torch.arange(300, dtype=torch.float32).reshape(20, 15)
    assert lanes.device_digest(value) == plain(value)


@pytest.mark.parametrize("few", [True, False])
def test_threads_change_neither_names_nor_digests(few, monkeypatch):
    """Sizes from nothing to several pieces, two names of one tensor; in the order of the names given."""
    generator = torch.Generator().manual_seed(1)
    tensors = {f"t{n}": torch.randn(n, generator=generator) for n in (0, 1, 3_000_000, 17, 1_500_000, 5)}
    tensors["again"] = tensors["t17"]
    monkeypatch.setattr(lanes, "_THREADS_FROM", 1 << 60 if few else 0)
    found = lanes.digests(tensors)
    assert list(found) == list(tensors) and found == {name: digest(tensor) for name, tensor in tensors.items()}
