"""Progress of a run on a terminal, or as plain lines where there is none."""
from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)


class TerminalProgress:
    """A spinner with the current phase and its time; finished phases stay as lines. Implements
    :class:`vime.rl.progress.Progress`. Goes to standard error, so that standard output stays for the result."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._started = self._phase_started = time.monotonic()
        self._text = ""
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self.console, transient=True) if self.console.is_terminal else None
        self._task = None if self._bar is None else self._bar.add_task("", total=None, visible=False)

    def __enter__(self) -> TerminalProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end_phase(done=kind is None)
        if self._bar is not None:
            self._bar.stop()

    def phase(self, text: str, total: int | None = None) -> None:
        self._end_phase()
        self._text, self._phase_started = text, time.monotonic()
        if self._bar is not None and self._task is not None:
            self._bar.reset(self._task, description=text, total=total, visible=True)
        else:
            self._line(f"{text} ...")

    def advance(self, count: int = 1) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, count)

    def note(self, text: str) -> None:
        self._end_phase()
        self._line(text)

    def _end_phase(self, done: bool = True) -> None:
        if self._text and self._bar is not None and self._task is not None:
            self._bar.update(self._task, visible=False)
            if done:
                self._line(f"{self._text}  [dim]{time.monotonic() - self._phase_started:.1f} s[/dim]")
        self._text = ""

    def _line(self, text: str) -> None:
        self.console.print(f"[dim]{time.monotonic() - self._started:6.1f}s[/dim]  {text}", highlight=False, soft_wrap=not self.console.is_terminal)
        if not self.console.is_terminal:
            sys.stderr.flush()
