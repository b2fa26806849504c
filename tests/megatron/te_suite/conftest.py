"""One process group for the suite, vime off before and after each test, and TransformerEngine's stand-in allowed on a CPU."""
from __future__ import annotations

import pytest

import vime
from vime.megatron import cpu, hooks, model, parallel

cpu.apply()


@pytest.fixture(scope="session", autouse=True)
def megatron(record_testsuite_property):
    import megatron.core
    import transformer_engine

    assert "te_standin" in transformer_engine.__file__
    record_testsuite_property("megatron_core", megatron.core.__version__)
    with parallel.single_process(seed=1):
        yield


@pytest.fixture(autouse=True)
def vime_off(monkeypatch):
    assert not vime.is_enabled()
    monkeypatch.setattr(model, "_check_transformer_impl", lambda *args: None)
    hooks.reset_counters()
    yield
    vime.disable()
