"""How a command says its result: a screen for a person, or one JSON document, and an exit code."""
from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from alignment.verdict import Verdict


def finish(verdict: Verdict, as_json: bool, *, show: Callable[[Verdict], None] | None = None, **extra: Any) -> NoReturn:
    """Print the verdict and end with its exit code. ``show`` prints it for a person, ``extra`` are further JSON fields."""
    from alignment import report

    if as_json:
        sys.stdout.write(report.to_json(verdict, **extra) + "\n")
    else:
        (show or report.terminal)(verdict)
    raise SystemExit(verdict.exit_code)
