"""The largest memory that this process and all its children held together."""
from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from types import TracebackType

import psutil

_EVERY_S = 1.0


def proportional_bytes(pid: int) -> int:
    """Resident memory of a process, pages that it shares counted in parts; 0 if it is gone."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return 0


class MemoryWatch:
    """A context manager; ``peak`` is in bytes."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._stop.wait(_EVERY_S):
            with contextlib.suppress(psutil.Error):
                pids = [me.pid, *(child.pid for child in me.children(recursive=True))]
                self.peak = max(self.peak, sum(map(proportional_bytes, pids)))

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
