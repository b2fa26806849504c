"""On a GPU: a start proves what is missing and the next one reads it, in processes of their own. Under 40 s."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import json, sys, time
import torch
from vime import ops
begun = time.perf_counter()
said = ops.proven(torch.device("cuda", 0), torch.bfloat16, [(960, 576), (576, 576), (3072, 576), (576, 1536)], [(49152, 576)], [(9, 3, 64)], True)
torch.cuda.synchronize()
print(json.dumps({"seconds": time.perf_counter() - begun, "said": said}))
"""


def start(cache: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "VIME_PROOFS"}
    return subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=env | {"VIME_CACHE_DIR": str(cache)} | variables)


def answer(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_start_reads(tmp_path: Path) -> None:
    first = answer(start(tmp_path))
    second = answer(start(tmp_path))
    assert second["said"] == first["said"] and first["said"]["proof.linear.960x576"] in ("cublas", "triton")
    assert all(first["said"][f"proof.{name}"] not in ("", "not loaded", "missing") for name in ("cublas", "cublaslt", "fa3", "triton"))
    print(f"a start that proves takes {first['seconds']:.1f} s, one that reads {second['seconds']:.1f} s")
    assert second["seconds"] < min(10, first["seconds"])
    assert answer(start(tmp_path, VIME_PROOFS="require"))["said"] == first["said"]


@pytest.mark.parametrize(("variables", "text"), [({"VIME_PROOFS": "require"}, "is not proven on this machine"),
                                                 ({"NVIDIA_TF32_OVERRIDE": "1"}, "leads to kernels that were never proven here")])
def test_what_is_refused_at_the_start(tmp_path: Path, variables: dict[str, str], text: str) -> None:
    done = start(tmp_path, **variables)
    assert done.returncode != 0 and text in done.stderr


def test_a_changed_library_is_named(tmp_path: Path) -> None:
    answer(start(tmp_path))
    (path,) = (tmp_path / "proofs").glob("cuda-*.json")
    data = json.loads(path.read_text())
    data["environment"]["cublas"] = "12.0.0"
    path.unlink()
    path.with_name("cuda-0123456789abcdef.json").write_text(json.dumps(data))
    done = start(tmp_path)
    assert done.returncode == 0 and "cublas was 12.0.0 and is" in done.stderr and "proven anew" in done.stderr
