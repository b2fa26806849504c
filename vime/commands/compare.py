"""``vime compare``: two recordings on disk, judged by :mod:`alignment.compare`."""
from __future__ import annotations

from pathlib import Path
from typing import Any

from alignment.verdict import Verdict
from vime.errors import BadInput


def run(
    run_a: Path, run_b: Path, tier: str = "exact", kind: str = "auto", rules: Path | None = None, rules_b: Path | None = None
) -> Verdict:
    """The verdict on two recordings. Raises BadInput for wrong usage: a path that is not there, an unknown tier or
    kind, a mapping file that cannot be used. What is wrong with a recording itself is part of the verdict."""
    from alignment.compare import compare_runs
    from alignment.errors import InputError

    try:
        return compare_runs(run_a, run_b, tier, kind=kind, rules_a=_rules(rules), rules_b=_rules(rules_b or rules))
    except (InputError, FileNotFoundError) as e:
        raise BadInput(str(e)) from e


def _rules(path: Path | None) -> Any:
    from alignment.dumps import read_json
    from alignment.errors import InputError

    if path is None:
        return None
    found = read_json(path)
    if found is None:  # which would be no mapping at all
        raise InputError(f"{path.name} holds null", "an object of rules")
    return found
