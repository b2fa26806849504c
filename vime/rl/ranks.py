"""Rank processes driven from one controller.

:class:`Ranks` starts one launcher process that imports the frameworks once and forks the ranks (one import of some
seconds instead of one a rank), and talks to each rank over a socket of its own. Three things must never happen: a
rank dies and the others wait in a collective for ever, a rank hangs and nobody says which, the controller dies and
ranks stay behind. So every wait watches all ranks, has a limit, ends all ranks together and names the first that
failed; and every rank holds a line to the controller whose end of file ends it.
"""
from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from vime.errors import VimeError
from vime.rl import pipes

#: Ranks that only wait for a failed one in a collective get this long to answer before all are ended.
_GRACE_S = 3.0
#: How often the processor time of waiting ranks is looked at, and how much of it counts as work, over all of them.
_LOOK_S, _WORK_S = 5.0, 0.05


class TrainerDied(VimeError):
    """A rank process ended or stopped answering. The message names it; all ranks have been ended."""


class TrainerFailed(VimeError):
    """A rank raised. ``kind`` is the class name of its error; the message names the rank; all ranks have been ended."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


def _processor_s(pid: int) -> float:
    """Processor time of a process's first thread so far, which computes (others poll sockets); 0.0 where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def _in_collective(log: Path) -> bool:
    """Whether the last stack in a rank's log is that of a wait for other ranks. A stopped process writes no stack."""
    try:
        _, found, stack = log.read_text(errors="replace").rpartition("Current thread ")
    except OSError:
        return False
    return bool(found) and "distributed_c10d.py" in stack


class Ranks:
    """``world_size`` forked processes that each make a worker and answer commands. A context manager.

    Args:
        world_size: at least 1.
        worker: ``"module:callable"``; ``callable(rank, world_size, spec)`` returns the object whose public methods are the commands.
        spec: handed to every worker; pickled.
        preload: modules that are imported once, before the ranks are forked.
        env: variables that are set before the first import.
        log_dir: output of the ranks goes to ``rank<N>.log`` in it; without, to a temporary folder.
        timeout_s: longest wait for an answer, a worker's start included, in seconds.

    Raises:
        ValueError: ``world_size`` below 1.
    """

    def __init__(self, world_size: int, worker: str, spec: Any, *, preload: Sequence[str] = (),
                 env: Mapping[str, str] | None = None, log_dir: str | Path | None = None, timeout_s: float = 600.0) -> None:
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; expected at least 1")
        self.world_size, self.timeout_s = world_size, timeout_s
        self._owned_logs = None if log_dir else tempfile.TemporaryDirectory(prefix="vime-ranks-")
        self.log_dir = Path(log_dir or self._owned_logs.name)  # type: ignore[union-attr]
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._connections: list[Connection] = []
        self._pids: dict[int, int] = {}
        self._closed = False
        theirs: list[socket.socket] = []
        for _ in range(world_size):
            mine, their = socket.socketpair()
            self._connections.append(Connection(mine.detach()))
            theirs.append(their)
        status_mine, status_their = socket.socketpair()
        self._status = Connection(status_mine.detach())
        fds = [s.fileno() for s in theirs]
        plan = {"worker": worker, "world_size": world_size, "preload": list(preload), "log_dir": str(self.log_dir),
                "fds": fds, "status_fd": status_their.fileno()}
        try:
            with open(self.log_dir / "launcher.log", "wb") as log:
                self._launcher = subprocess.Popen(
                    [sys.executable, "-m", "vime.rl.launcher", json.dumps(plan)], stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT, pass_fds=[*fds, status_their.fileno()],
                    env={**os.environ, **(env or {})}, start_new_session=True)
        finally:
            for s in [*theirs, status_their]:
                s.close()
        self._send_all(("start", spec))
        self._started = False

    def wait_ready(self) -> None:
        """Wait until every rank has built its worker. Raises as :meth:`call` does."""
        if not self._started:
            self._collect("start", self.timeout_s)
            self._started = True

    def pids(self) -> list[int]:
        """Process ids in rank order."""
        self.wait_ready()
        return [self._pids[rank] for rank in range(self.world_size)]

    def call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Run ``method`` on every rank with the same arguments; results in rank order.

        Raises:
            TrainerFailed: a rank raised. TrainerDied: a rank ended or hangs, or all have been ended before.
        """
        return self.call_each(method, [(args, kwargs)] * self.world_size, timeout_s=timeout_s)

    def call_each(self, method: str, arguments: Sequence[tuple[tuple, dict]], timeout_s: float | None = None,
                  stall_s: float | None = None) -> list[Any]:
        """Run ``method`` on every rank, rank ``r`` with ``arguments[r]``; results in rank order. Raises as :meth:`call`.

        ``stall_s``: for a command in which some rank always computes: if none of those that have not answered uses the
        processor for so long, they hang. Each wait on the other ranks uses none, so this also sees a stopped one.
        """
        if self._closed:
            raise TrainerDied("the trainer's rank processes have been ended; start a new pool")
        self.wait_ready()
        for rank, (args, kwargs) in enumerate(arguments):
            try:
                pipes.send(self._connections[rank], ("call", method, args, kwargs))
            except OSError:
                self._fail_dead(rank, method)
        return self._collect(method, timeout_s or self.timeout_s, stall_s)

    def _send_all(self, message: Any) -> None:
        for rank in range(self.world_size):
            with contextlib.suppress(OSError):  # a launcher that failed at once is reported by the wait that follows
                pipes.send(self._connections[rank], message)

    def _collect(self, command: str, limit_s: float, stall_s: float | None = None) -> list[Any]:
        results: dict[int, Any] = {}
        end = time.monotonic() + limit_s
        worked, since = 0.0, time.monotonic()
        while len(results) < self.world_size:
            pending = {self._connections[r]: r for r in range(self.world_size) if r not in results}
            left = max(0.0, end - time.monotonic())
            ready = wait(list(pending), timeout=left if stall_s is None else min(left, _LOOK_S))
            if not ready:
                now = time.monotonic()
                if now >= end:
                    self._fail_hung(sorted(pending.values()), command, limit_s)
                used = sum(_processor_s(self._pids.get(rank, 0)) for rank in pending.values())
                if abs(used - worked) > _WORK_S:
                    worked, since = used, now
                elif stall_s is not None and now - since >= stall_s:
                    self._fail_hung(sorted(pending.values()), command, now - since)
                continue
            worked, since = 0.0, time.monotonic()
            for connection in ready:
                rank = pending[connection]  # type: ignore[index]
                try:
                    kind, *payload = pipes.receive(connection)  # type: ignore[arg-type]
                except (EOFError, OSError):
                    self._fail_dead(rank, command)
                if kind == "error":
                    self._fail_raised(rank, command, *payload)
                if kind == "pid":
                    self._pids[rank] = payload[0]
                else:
                    results[rank] = payload[0]
        return [results[r] for r in range(self.world_size)]

    def _fail_raised(self, rank: int, command: str, kind: str, text: str, for_people: bool, trace: str) -> None:
        if self._status.poll(0.3):  # it raised because another rank died: that one is the news
            self._fail_dead(rank, command)
        self.close(force=True)
        detail = text if for_people else f"{kind}: {text}\n{trace}"
        raise TrainerFailed(f"trainer rank {rank} of {self.world_size} failed in {command}: {detail}", kind)

    def _fail_dead(self, rank: int, command: str) -> None:
        deaths = self._deaths()
        if deaths:  # the first that died, which may not be the one whose socket was read first
            rank, how = deaths[0]
        else:
            how = "ended without a word"
        tail = self._log_tail(rank)
        self.close(force=True)
        hint = " (signal 9 is what the system sends when memory runs out)" if "SIGKILL" in how else ""
        raise TrainerDied(f"trainer rank {rank} of {self.world_size} {how}{hint} during {command}; all ranks were ended.{tail}")

    def _fail_hung(self, ranks: list[int], command: str, limit_s: float) -> None:
        for rank in ranks:  # each writes its stack into its log
            if rank in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(0.5)
        waiting = [rank for rank in ranks if _in_collective(self.log_dir / f"rank{rank}.log")]
        guilty = [rank for rank in ranks if rank not in waiting] or ranks
        tail = self._log_tail(guilty[0])
        self.close(force=True)
        names = ", ".join(map(str, guilty))
        others = f" while rank {', '.join(map(str, waiting))} waited in a collective" if waiting and guilty != ranks else ""
        raise TrainerDied(f"trainer rank {names} of {self.world_size} did not answer {command} within {limit_s:.0f} s{others}; "
                          f"all ranks were ended.{tail}")

    def _deaths(self) -> list[tuple[int, str]]:
        out: list[tuple[int, str]] = []
        with contextlib.suppress(EOFError, OSError):
            while self._status.poll(_GRACE_S if not out else 0.0):
                out.append(pipes.receive(self._status))
        return out

    def _log_tail(self, rank: int, lines: int = 12) -> str:
        for name in (f"rank{rank}.log", "launcher.log"):
            path = self.log_dir / name
            text = path.read_text(errors="replace").strip() if path.is_file() else ""
            if text:
                return f"\nLast lines of {name}:\n" + "\n".join("  " + line for line in text.splitlines()[-lines:])
        return ""

    def close(self, force: bool = False) -> None:
        """End all ranks; with ``force`` at once. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not force:
            self._send_all(("stop",))
        for connection in [*self._connections, self._status]:  # end of file ends a rank that is idle
            if force:
                connection.close()
        try:
            self._launcher.wait(timeout=0.2 if force else 10.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._launcher.pid, signal.SIGKILL)
            self._launcher.wait()
        for connection in [*self._connections, self._status]:
            connection.close()
        if self._owned_logs is not None:
            self._owned_logs.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.close(force=kind is not None)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close(force=True)
