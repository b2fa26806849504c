"""The plain script of examples/megatron_core trains under vime, repeatably, and differs from stock by rounding only."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "megatron_core" / "train.py"


def run(*args: str) -> dict:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-W", "ignore", str(SCRIPT), "--json", *args], env=env, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_it_trains_repeatably():
    first, second = run("--dtype", "bfloat16"), run("--dtype", "bfloat16")
    assert first == second
    assert first["losses"][-1] < first["losses"][0] - 0.5


def test_it_differs_from_stock_by_rounding_only():
    aligned, stock = run(), run("--stock")
    assert set(aligned["ran"]) == {"embedding", "linear", "norm", "rope", "activation", "attention", "logprob"}
    assert stock["ran"] == {}
    assert aligned["losses"] != stock["losses"]
    assert max(abs(a - b) for a, b in zip(aligned["losses"], stock["losses"], strict=True)) < 1e-3


def test_vime_takes_three_lines():
    marked = [line for line in SCRIPT.read_text().splitlines() if line.rstrip().split("  #")[-1].strip()[:3] in ("(1)", "(2)", "(3)")]
    assert len(marked) == 3
