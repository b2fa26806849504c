"""``vime gate``: the packaged gates in a pytest process of their own."""
from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Sequence

from alignment.verdict import Verdict
from vime.errors import BadInput


class GateUnusable(BadInput):
    """The gates could not be started as asked."""


def run(names: Sequence[str], as_json: bool, **options: object) -> Verdict:
    """Run them; pytest's output goes to the terminal, to standard error with ``as_json``.

    ``options`` are those of :func:`gates.runner.run`. Raises :class:`GateUnusable`.
    """
    if importlib.util.find_spec("pytest") is None:
        raise GateUnusable("the gates run under pytest, which is not installed; do: pip install pytest")
    from gates.runner import GateUsageError, run

    try:
        return run(names, output=sys.stderr if as_json else None, **options)  # type: ignore[arg-type]
    except GateUsageError as error:
        raise GateUnusable(str(error).replace("--gate-", "--")) from None  # pytest's names of our options


def show(verdict: Verdict) -> None:
    """One screen; gates that ran in several dtypes are told apart by theirs."""
    from alignment import report

    names = [child.name for child in verdict.children]
    children = [dataclasses.replace(child, name=f"{child.name} {child.info['dtype']}") if names.count(child.name) > 1 and "dtype" in child.info
                else child for child in verdict.children]
    report.terminal(dataclasses.replace(verdict, children=children))


def dry_run(names: Sequence[str], profile: str | None, gpu_gib: float) -> Verdict:
    """What stands in the way of these gates on GPUs. Raises :class:`GateUnusable` for an unknown gate or profile."""
    from alignment.verdict import combine
    from gates import dryrun
    from gates.markers import gate_name
    from gates.profiles import UnknownProfile

    if not 0 < gpu_gib < float("inf"):
        raise GateUnusable(f"--gpu-gib {gpu_gib:g}: the memory of one GPU in GiB is expected, e.g. 139")
    try:
        found = [dryrun.run(gate_name(name), profile, gpu_gib) for name in names or ["ep8"]]
    except (UnknownProfile, ValueError) as error:
        raise GateUnusable(str(error)) from None
    return found[0] if len(found) == 1 else combine("dry run", found)
