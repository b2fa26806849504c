"""The one kind of error that a comparison raises about what it was given.

A comparison answers with a verdict. It raises only where no question was asked that it could answer: a file that
is not what it says, a mask of another length, an unknown tier. Each message says what was found, what was expected
and what to do.
"""
from __future__ import annotations

from typing import Any


class InputError(ValueError):
    """What was handed in cannot be read as asked. ``str()`` is: found; expected; what to do."""

    def __init__(self, found: str, expected: str = "", todo: str = "") -> None:
        self.found, self.expected, self.todo = found, expected, todo
        parts = [found]
        if expected:
            parts.append(f"expected {expected}")
        if todo:
            parts.append(todo)
        super().__init__("; ".join(parts))


class KeyCollision(InputError):
    """Two things have one key. Neither may overwrite the other, so the set that holds them is INVALID.

    ``place`` is an :class:`alignment.verdict.Place` where it is known."""

    place: Any = None
