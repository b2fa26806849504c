"""Tiny checkpoints are made once a session."""
from __future__ import annotations

import pytest

from tests.weights.tiny import CASES, load, make_checkpoint, to_fp8, write


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """``checkpoint(case)`` -> folder of that tiny checkpoint. Read only."""
    made = {}

    def get(case):
        if case not in made:
            made[case] = make_checkpoint(case, tmp_path_factory.mktemp(case))
        return made[case]

    return get


@pytest.fixture(scope="session")
def fp8_checkpoint(checkpoint, tmp_path_factory):
    """A tiny DeepSeek-V3 in block FP8, cut so that TP 2 splits whole blocks."""
    case = make_checkpoint("deepseek_v3", tmp_path_factory.mktemp("wide"), moe_intermediate_size=32, qk_nope_head_dim=8,
                           v_head_dim=8, q_lora_rank=24)
    state, cfg = to_fp8(*load(case))
    return write(tmp_path_factory.mktemp("fp8") / "hf", state, cfg)


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", list(CASES))
