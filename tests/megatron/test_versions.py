"""Runs ``suite/`` against each supported megatron-core, in a process of its own.

The installed one is always tested. A second one is an unpacked wheel, found through ``VIME_MCORE_ALT`` (tox provides
it); to test the installed one alone, say so with ``VIME_MCORE_ALT=none``.
"""
from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

SUITE = Path(__file__).parent / "suite"
ROOT = Path(__file__).parents[2]


def _alternative() -> str:
    folder = os.environ.get("VIME_MCORE_ALT", "")
    if folder == "none":
        pytest.skip("VIME_MCORE_ALT=none: only the installed megatron-core is tested, as asked")
    if not (Path(folder) / "megatron" / "core" / "__init__.py").is_file() or not folder:
        pytest.fail(f"VIME_MCORE_ALT is {folder!r}; expected a folder with an unpacked megatron-core 0.19.2 wheel (or 'none')")
    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["installed", "alternative"])
def test_suite(which, tmp_path, record_property):
    paths = [str(ROOT)] if which == "installed" else [_alternative(), str(ROOT)]
    report = tmp_path / "report.xml"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "VIME_MEGATRON_SUITE": "1", "PYTHONHASHSEED": "0",
           "CUDA_VISIBLE_DEVICES": ""}
    env.setdefault("OMP_NUM_THREADS", "2")
    run = subprocess.run([sys.executable, "-m", "pytest", str(SUITE), "-q", "-W", "ignore", "-p", "no:cacheprovider", f"--junitxml={report}"],
                         env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    tail = "\n".join((run.stdout + run.stderr).splitlines()[-60:])
    assert run.returncode == 0, f"the suite failed with {which} megatron-core:\n{tail}"
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    version = next(p.get("value") for p in suite.iter("property") if p.get("name") == "megatron_core")
    record_property("megatron_core", version)
    assert version.split("+")[0] == "0.19.2" or which == "installed"
    assert int(suite.get("tests")) >= 40, tail
    oracle = [case for case in suite.iter("testcase") if case.get("classname", "").endswith("test_megatron_dsa")]
    assert len(oracle) == (12 if version.startswith("0.19") else 3), "Megatron's own DSA was not compared with"
    assert suite.get("skipped") == "0", f"a skip is not a pass:\n{tail}"
