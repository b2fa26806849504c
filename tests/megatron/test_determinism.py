"""Each case in a fresh process: a hash seed counts from the start only, and flags are process-wide."""
from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

_DROP = ("PYTHONHASHSEED", "NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUBLAS_WORKSPACE_CONFIG")


def python(code: str, *flags: str, **env: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if k not in _DROP}
    return subprocess.run([sys.executable, *flags, "-c", code], env={**clean, "OMP_NUM_THREADS": "1", **env},
                          capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("env", "expected"), [
    ({}, False), ({"PYTHONHASHSEED": "random"}, False), ({"PYTHONHASHSEED": "0"}, True), ({"PYTHONHASHSEED": "41"}, True)])
def test_hash_seed_counts_from_the_start(env, expected):
    out = python("from vime.determinism import hash_seed_fixed as f; print(f())", **env)
    assert out.stdout.strip() == str(expected), out.stderr


@pytest.mark.parametrize("start", [{}, {"PYTHONHASHSEED": "random"}, {"PYTHONHASHSEED": "41"}])
def test_a_hash_seed_set_later_does_not_count(start):
    code = "import os; os.environ['PYTHONHASHSEED'] = '7'\nfrom vime.determinism import hash_seed_fixed as f; print(f())"
    assert python(code, **start).stdout.strip() == "False"


def test_it_sets_everything_and_records_it():
    code = """
import json, os, random, numpy, torch
from vime.determinism import set_deterministic
def draw():
    set_deterministic(17)
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
record = set_deterministic(17)
assert record.to_dict() == json.loads(json.dumps(record.to_dict()))
print(json.dumps(dict(record=record.to_dict(), env={k: os.environ.get(k) for k in ("NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG",
      "NVTE_ALLOW_NONDETERMINISTIC_ALGO")}, flag=torch.are_deterministic_algorithms_enabled(), same=draw() == draw())))
"""
    run = python(code, PYTHONHASHSEED="0", CUBLAS_WORKSPACE_CONFIG=":4096:8")
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert answer["env"] == {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    assert answer["flag"] and answer["same"] and answer["record"]["refused"] == []
    assert answer["record"]["found"]["NCCL_ALGO"] is None
    assert answer["record"]["found"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in answer["record"]["set"] and answer["record"]["set"]["seed.numpy"] == 17


@pytest.mark.parametrize(("env", "text"), [
    ({}, "PYTHONHASHSEED was not set when the process started"),
    ({"PYTHONHASHSEED": "0", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}, "NVTE_ALLOW_NONDETERMINISTIC_ALGO is '1'"),
    ({"PYTHONHASHSEED": "0", "NCCL_ALGO": "NVLS"}, "NCCL_ALGO is 'NVLS'; deterministic is Ring"),
    ({"PYTHONHASHSEED": "0", "CUBLAS_WORKSPACE_CONFIG": ":0:0"}, "CUBLAS_WORKSPACE_CONFIG is ':0:0'"),
])
def test_it_refuses_by_name_and_changes_nothing(env, text):
    code = """
import torch
from vime.determinism import NotDeterministic, set_deterministic
try:
    set_deterministic(1)
except NotDeterministic as error:
    print(error, torch.are_deterministic_algorithms_enabled())
print(len(set_deterministic(1, strict=False).refused))
"""
    out = python(code, **env).stdout
    assert text in out and "False" in out and out.strip().endswith("1")


@pytest.mark.parametrize("name", ["flash_attn_3", "flash_attn_interface"])
def test_flash_attention_3_is_refused(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("raise ImportError('must not be imported to be found')\n")
    code = "from vime.determinism import set_deterministic; set_deterministic(1)"
    run = python(code, PYTHONHASHSEED="0", PYTHONPATH=os.pathsep.join([str(tmp_path), os.getcwd()]))
    assert run.returncode != 0 and f"FlashAttention 3 is installed ({name})" in run.stderr


def test_a_seed_out_of_range_is_named():
    from vime.determinism import set_deterministic

    with pytest.raises(ValueError, match="seed is -1"):
        set_deterministic(-1)
