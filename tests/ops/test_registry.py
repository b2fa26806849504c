"""The registry: one implementation or an error, everything counted."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from vime import ops
from vime.contract import OPS
from vime.ops import registry


def test_every_operation_has_an_id_per_dtype(dtype):
    for op in OPS:
        if op == "moe":
            continue
        assert registry.implementation(op, "cpu", dtype).startswith(f"cpu/{op}/")
    assert registry.implementation("linear", "cpu", torch.float32) != registry.implementation("linear", "cpu", torch.bfloat16)


def test_unsupported_names_op_device_dtype_shape_and_way_out():
    with pytest.raises(registry.UnsupportedOp, match=r"norm on cpu in float16 for shape \(2, 4\).*switch the operation off"):
        ops.rms_norm(torch.zeros(2, 4, dtype=torch.float16), torch.zeros(4, dtype=torch.float16), 1e-5)
    with pytest.raises(registry.UnsupportedOp, match="linear on meta in float32"):
        ops.linear(torch.zeros(2, 4, device="meta"), torch.zeros(3, 4, device="meta"))


def test_calls_are_counted(dtype):
    registry.reset_counters()
    x = torch.randn(2, 8).to(dtype)
    ops.linear(x, x)
    ops.linear(x, x)
    ops.silu_and_mul(x)
    assert registry.counters() == {registry.implementation("linear", "cpu", dtype): 2, registry.implementation("activation", "cpu", dtype): 1}
    registry.reset_counters()
    assert registry.counters() == {}


def test_a_failed_call_is_not_counted():
    registry.reset_counters()
    with pytest.raises(ValueError):
        ops.linear(torch.zeros(2, 8), torch.zeros(3, 7))
    with pytest.raises(IndexError):
        ops.embedding(torch.tensor([5]), torch.zeros(3, 7))
    assert registry.counters() == {}


def test_a_second_implementation_is_refused():
    with pytest.raises(ValueError, match="refusing cpu/linear/other"):
        registry.register("linear", "cpu", torch.float32, "cpu/linear/other", {})


def test_mismatched_dtypes_and_shapes_are_named():
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"x is torch\.float32, weight torch\.bfloat16"):
        ops.linear(x, torch.zeros(3, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"expected \[8\]"):
        ops.rms_norm(x, torch.zeros(7), 1e-5)
    with pytest.raises(ValueError, match="must be even"):
        ops.silu_and_mul(torch.zeros(2, 7))
    with pytest.raises(ValueError, match="2R <= D"):
        ops.apply_rope(torch.zeros(2, 3, 8), torch.zeros(2, 5), torch.zeros(2, 5))


def _child(code, **env):
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1", **env}, capture_output=True, text=True, timeout=300)


def test_without_a_compiler_the_error_says_so(tmp_path):
    done = _child("import torch\nfrom vime import ops\nops.silu_and_mul(torch.zeros(2, 4))", CXX="no-such-compiler", VIME_CACHE_DIR=str(tmp_path))
    assert done.returncode != 0 and "a C++ compiler (g++ 11 or newer; or set CXX), not found here" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_an_unknown_instruction_set_is_named():
    done = _child("from vime.ops.cpu import build\nbuild.level()", VIME_CPU_ISA="sse9")
    assert "VIME_CPU_ISA is 'sse9'; known: amx" in done.stderr


def test_narrower_instructions_give_the_same_fp32_bits():
    """Equal implementation ids promise equal bits: two processors of different width must agree on them."""
    code = """
import hashlib, torch
from vime import ops
from vime.ops import registry
from vime.ops.prove_types import bits
torch.manual_seed(0)
def show(name, *tensors):
    print(name, hashlib.sha256(b"".join(bits(t.detach()).numpy().tobytes() for t in tensors)).hexdigest()[:16])
for dtype in (torch.float32, torch.bfloat16):
    x, w, r = torch.randn(37, 200).to(dtype), torch.randn(61, 200).to(dtype), torch.randn(37, 200).to(dtype)
    q, k, v = (torch.randn(200, n, 80).to(dtype).requires_grad_() for n in (6, 2, 2))
    show(registry.implementation("linear", "cpu", dtype), ops.linear(x, w))
    show(registry.implementation("norm", "cpu", dtype), *ops.add_rms_norm(x, r, w[0], 1e-5))
    show(registry.implementation("activation", "cpu", dtype), ops.silu_and_mul(x * 5))
    cos, sin = ops.rope_cos_sin(torch.arange(200), 64, 1e4)
    show(registry.implementation("rope", "cpu", dtype), ops.apply_rope(q, cos, sin))
    show(registry.implementation("logprob", "cpu", dtype), ops.log_softmax(x, 0.7))
    show(registry.implementation("sampling", "cpu", dtype), ops.sample(x, torch.arange(37), torch.arange(37), torch.ones(37)))
    o = ops.attention_varlen(q, k, v, torch.tensor([0, 70, 200], dtype=torch.int32), 0.1)
    show(registry.implementation("attention", "cpu", dtype), o, *torch.autograd.grad(o, (q, k, v), torch.ones_like(o)))
"""
    from vime.ops.cpu import build
    here = build.level()
    narrower = "avx2" if here in ("amx", "avx512-bf16", "avx512") else "portable"
    ours, theirs = _child(code), _child(code, VIME_CPU_ISA=narrower)
    assert ours.returncode == 0, ours.stderr
    assert theirs.returncode == 0, theirs.stderr
    a, b = (dict(line.split() for line in run.stdout.splitlines()) for run in (ours, theirs))
    shared = a.keys() & b.keys()
    # Only the bf16 GEMM and the bf16 attention built on it multiply by other instructions elsewhere, and say so by id.
    alone = a.keys() - b.keys()
    assert len(a) == len(b) == 14 and all(k.startswith(("cpu/linear/", "cpu/attention/")) and "f32" not in k for k in alone), alone
    assert {k for k in shared if a[k] != b[k]} == set()
