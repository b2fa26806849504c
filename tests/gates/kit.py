"""What the plugin's tests share: a real pytest in a subprocess, on a machine that the test describes."""
from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

HEADER = """
import os, signal, time
import pytest
from alignment.verdict import Cause, Coverage, Place, Verdict

def said(status, compared=3, expected=3, **kwargs):
    return Verdict("x", status, coverage={"tokens": Coverage(compared, expected)}, **kwargs)
"""


def machine(pytester: pytest.Pytester, gpus: int = 0, driver: str | None = None) -> None:
    """Let the plugin see this machine. Also saves each run the import of torch."""
    pytester.makeconftest(f"""
        import gates.collect
        from gates.devices import Machine
        gates.collect.probe = lambda: Machine({gpus}, {driver!r})
    """)


def run(pytester: pytest.Pytester, body: str, *args: str, gpus: int = 0, driver: str | None = None) -> pytest.RunResult:
    """Run ``body`` (after :data:`HEADER`) in a fresh pytest process."""
    machine(pytester, gpus, driver)
    pytester.makepyfile(test_it=HEADER + body)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *args)


def gate(body: str, mark: str = "gate_logprob", name: str = "test_it") -> str:
    """Source of one gate test."""
    return f"\n@pytest.mark.{mark}\ndef {name}(gate):\n    {body}\n"


def report(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def properties(xml: Path) -> list[dict[str, str]]:
    """The user properties of each test case in a JUnit file."""
    return [{p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}
            for case in ET.parse(xml).iter("testcase")]
