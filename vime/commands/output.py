"""How a command says its result: a screen for a person, or one JSON document, and an exit code."""
from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from alignment.verdict import Verdict


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        os.chmod(aside, 0o644)
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise


def finish(verdict: Verdict, as_json: bool, *, show: Callable[[Verdict], None] | None = None, **extra: Any) -> NoReturn:
    """Print the verdict and end with its exit code. ``show`` prints it for a person, ``extra`` are further JSON fields."""
    from alignment import report

    if as_json:
        sys.stdout.write(report.to_json(verdict, **extra) + "\n")
    else:
        (show or report.terminal)(verdict)
    raise SystemExit(verdict.exit_code)
