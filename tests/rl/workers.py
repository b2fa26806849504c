"""Workers for the tests of rank processes: small, importable by name, no framework."""
from __future__ import annotations

import os
import signal
import time
from typing import Any

from vime.errors import VimeError


class NoSuchThing(VimeError):
    """A stand-in for an error with a message for a person."""


class Worker:
    def __init__(self, rank: int, world_size: int, spec: Any) -> None:
        if spec == "refuse" and rank == 1:
            raise NoSuchThing("found a spec that refuses")
        self.rank, self.world_size, self.spec = rank, world_size, spec

    def whoami(self, extra: int = 0) -> tuple[int, int, Any, int]:
        return self.rank, self.world_size, self.spec, extra

    def env(self, name: str) -> str | None:
        return os.environ.get(name)

    def pid(self) -> int:
        return os.getpid()

    def die(self, which: int) -> None:
        if self.rank == which:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def leave(self, which: int) -> None:
        if self.rank == which:
            os._exit(7)
        time.sleep(60)

    def hang(self, which: int) -> None:
        if self.rank == which:
            time.sleep(60)

    def fail(self, which: int) -> None:
        if self.rank == which:
            raise NoSuchThing("found nothing, expected something")
        time.sleep(60)

    def crash(self, which: int) -> None:
        if self.rank == which:
            raise ZeroDivisionError("a fault of ours")
