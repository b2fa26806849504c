from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def only_our_plugin(monkeypatch):
    """Load the plugin by name and no other: a start of pytest costs a third. Tests of the entry point undo it."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "gates.plugin,pytest_timeout")


@pytest.fixture
def every_plugin(monkeypatch, only_our_plugin):
    """Plugins as a user has them: by entry point."""
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    monkeypatch.delenv("PYTEST_PLUGINS")
