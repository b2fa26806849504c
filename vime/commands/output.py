"""How a command says its result: a screen for a person, or one JSON document, and an exit code. And whether the places that it
will write to can be written to, before anything is started."""
from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from vime.errors import BadInput

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


class OutputUnusable(BadInput):
    """A file or folder that is to be written cannot be."""


def require_file(path: Path, flag: str) -> None:
    """Raise :class:`OutputUnusable` unless ``path`` can become a file, or be replaced as one. Makes nothing."""
    if path.is_dir():
        raise OutputUnusable(f"{flag} {path} is a folder; expected the name of a file: give one in it, like {path / 'report.json'}")
    _require_room_for(path.parent, f"{flag} {path}")


def require_folder(path: Path, flag: str) -> None:
    """Raise :class:`OutputUnusable` unless ``path`` is a folder that can be written to, or can be made. Makes nothing."""
    _require_room_for(path, f"{flag} {path}")


def _require_room_for(folder: Path, what: str) -> None:
    """``folder``, or the nearest one above it that is there, takes new files."""
    there = folder.absolute()
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        raise OutputUnusable(f"{what} cannot be written: {there} is there and no folder; expected a folder, or a name that is free: give another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise OutputUnusable(f"{what} cannot be written: this user may not write to {there}; give another place, or change who may")
