"""What a run tells while it runs. The loop only knows this interface; a terminal, a log or nothing may be behind it."""
from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called from the controller's thread."""

    def phase(self, text: str, total: int | None = None) -> None:
        """Something begins that has ``total`` parts (None: unknown); it ends when the next phase begins."""

    def advance(self, count: int = 1) -> None:
        """Parts of the current phase are done."""

    def note(self, text: str) -> None:
        """A line that stays."""


class Silent:
    """Says nothing."""

    def phase(self, text: str, total: int | None = None) -> None:
        del text, total

    def advance(self, count: int = 1) -> None:
        del count

    def note(self, text: str) -> None:
        del text
