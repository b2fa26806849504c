"""The pytest plugin (entry point ``pytest11``): hooks only, the rest is in its neighbours.

It is loaded into every pytest run of an environment that has vime installed, so it must cost nothing and say nothing
until a gate is selected: no torch, no engine, no change of exit code.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Generator
from typing import Any

import pytest

from gates import markers, options
from gates.collect import SESSION, Session
from gates.fixtures import gate

__all__ = ["gate"]

_MARKS: pytest.StashKey[dict[str, list[markers.GateMark]]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add(parser)


def pytest_configure(config: pytest.Config) -> None:
    for line in markers.marker_lines():
        config.addinivalue_line("markers", line)
    chosen = options.Options.read(config)
    if chosen.parallel and (chosen.asked or chosen.required or chosen.report):
        raise pytest.UsageError(chosen.parallel)
    config.stash[SESSION] = Session(chosen)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        collector.config.stash[SESSION].skipped_module(report.nodeid, collector.path, reason.removeprefix("Skipped: "))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marks = config.stash[_MARKS] = config.stash[SESSION].check(items)
    if dropped := config.stash[SESSION].of_another_device(items, marks):
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


def pytest_collection_finish(session: pytest.Session) -> None:
    config = session.config
    gates = config.stash[SESSION]
    narrowed = any(config.getoption(o, None) for o in ("markexpr", "keyword", "lf"))
    gates.select(session.items, config.stash.get(_MARKS, {}), complete=not narrowed)
    _write(config)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    gates = item.config.stash[SESSION]
    run = gates.runs.get(item.nodeid)
    if run is not None:
        gates.setup(run)
        _write(item.config)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    run = item.config.stash[SESSION].runs.get(item.nodeid)
    if run is None:
        return (yield)
    run.calling = True
    try:
        return (yield)
    finally:
        run.calling = False


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Processes of the gates on experts end once the next test has no use for them."""
    if (fixture := sys.modules.get("gates.expert_fixture")) is not None:
        fixture.close_after(item, nextitem)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    gates = item.config.stash[SESSION]
    run = gates.runs.get(item.nodeid)
    if run is not None:
        gates.judge(run, report, call)
        item.user_properties[:] = [p for p in item.user_properties if not str(p[0]).startswith("gate.")]
        item.user_properties.extend(_properties(run.verdict()))
        report.user_properties = list(item.user_properties)
        if report.when == "teardown":
            _write(item.config)
    return report


def _properties(verdict: Any) -> list[tuple[str, object]]:
    """What JUnit carries for one gate."""
    from gates.table import HEAD, row

    cells = zip((h.replace(" ", "_") for h in HEAD), row(verdict), strict=True)
    return [(f"gate.{k}", v) for k, v in cells] + [("gate.tier", verdict.tier), ("gate.reason", verdict.reason),
                                                   ("gate.cause", verdict.cause or "-")]


def pytest_report_teststatus(report: Any) -> tuple[str, str, Any] | None:
    """Print the verdict's own word: NOT_RUN is not FAILED, and neither is green."""
    status = getattr(report, "gate_status", None)
    if status in (None, "PASS") or not report.failed:
        return None
    category = "failed" if report.when == "call" else "error"
    return category, status[0], (status, {"red": True})


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    gates = session.config.stash.get(SESSION, None)
    if gates is None or not gates.active or session.config.getoption("collectonly"):
        return
    _write(session.config, complete=True)
    ends = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if session.exitstatus in ends and not gates.verdict().green:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    gates = config.stash.get(SESSION, None)
    if gates is None or not gates.active or config.getoption("collectonly"):
        return
    from gates import table

    whole = gates.verdict()
    terminalreporter.section("gates")
    for line in table.lines(gates.verdicts(), width=max(terminalreporter._tw.fullwidth, 120)):
        terminalreporter.write_line(line)
    mutation = whole.info.get("mutation")
    score = f"; {mutation['caught']} of {mutation['planted']} planted faults caught" if mutation else ""
    terminalreporter.write_line(f"{whole.status}: {sum(v.green for v in gates.verdicts())} of "
                                f"{len(gates.verdicts())} gate(s) PASS{score}", green=whole.green, red=not whole.green)
    if gates.options.report and not os.environ.get("VIME_GATES_TEMPORARY"):
        terminalreporter.write_line(f"report: {gates.options.report}")
        from gates.writing import no_commit

        if note := no_commit(gates.options.report):
            terminalreporter.write_line(note)


def _write(config: pytest.Config, complete: bool = False) -> None:
    gates = config.stash[SESSION]
    if gates.active and gates.options.report and not config.getoption("collectonly"):
        from gates.writing import write

        write(gates, complete=complete)
