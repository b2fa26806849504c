"""One process group for the whole suite, and vime off before and after each test."""
from __future__ import annotations

import pytest

import vime
from vime.megatron import cpu, hooks, parallel

cpu.apply()


@pytest.fixture(scope="session", autouse=True)
def megatron(record_testsuite_property):
    import megatron.core

    record_testsuite_property("megatron_core", megatron.core.__version__)
    with parallel.single_process(seed=1):
        yield


@pytest.fixture(autouse=True)
def vime_off():
    assert not vime.is_enabled()
    hooks.reset_counters()
    yield
    vime.disable()
