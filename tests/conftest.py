"""Fixtures for tests outside ``gates/`` that are gates themselves, and one seed for every test.

A test that fails must fail again, so numbers are drawn from a fixed seed and hypothesis derives its examples from the
test. With ``VIME_FUZZ`` in the environment both are drawn anew, to look for what the fixed ones do not show.
"""
import os
import random
import sys

import numpy as np
import pytest
from hypothesis import settings

from gates.expert_fixture import expert_harness, expert_lab

__all__ = ["expert_harness", "expert_lab"]

FUZZ = bool(os.environ.get("VIME_FUZZ"))
settings.register_profile("repeatable", derandomize=True)
if not FUZZ:
    settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _one_seed():
    if not FUZZ:
        random.seed(0)
        np.random.seed(0)
        if "torch" in sys.modules:
            sys.modules["torch"].manual_seed(0)
