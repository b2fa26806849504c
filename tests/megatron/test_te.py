"""Runs ``te_suite/``: Megatron-core 0.19.2's TransformerEngine spec over a stand-in, in a process of its own.

The stand-in (``te_standin/``) says how modules are built and called; that TransformerEngine 2.11.0 is so is tested on a GPU,
by ``tests/cuda/test_te.py``.
"""
from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.megatron.test_versions import ROOT, _alternative

HERE = Path(__file__).parent


@pytest.mark.timeout(300)
def test_te_suite(tmp_path):
    report = tmp_path / "report.xml"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE / "te_standin"), _alternative(), str(ROOT)]), "VIME_MEGATRON_SUITE": "1",
           "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    env.setdefault("OMP_NUM_THREADS", "2")
    run = subprocess.run([sys.executable, "-m", "pytest", str(HERE / "te_suite"), "-q", "-W", "ignore", "-p", "no:cacheprovider",
                          f"--junitxml={report}"], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    tail = "\n".join((run.stdout + run.stderr).splitlines()[-60:])
    assert run.returncode == 0, tail
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    assert int(suite.get("tests")) >= 20 and suite.get("skipped") == "0", tail
