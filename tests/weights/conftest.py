"""Tiny checkpoints are made once a session."""
from __future__ import annotations

import pytest

from tests.weights.tiny import CASES, make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """``checkpoint(case)`` -> folder of that tiny checkpoint. Read only."""
    made = {}

    def get(case):
        if case not in made:
            made[case] = make_checkpoint(case, tmp_path_factory.mktemp(case))
        return made[case]

    return get


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", list(CASES))
