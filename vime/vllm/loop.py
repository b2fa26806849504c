"""The engine's own thread: commands that others hand over, and steps while requests are running."""
from __future__ import annotations

import concurrent.futures
import queue
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from vime.vllm.engine import Engine
from vime.vllm.lockstep import together
from vime.vllm.protocol import EngineError, Request, Sample

#: Pause between two rounds of ranks that have nothing to do.
IDLE_S = 0.002


class Loop:
    """The main thread's loop: commands, and steps while requests are running."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: queue.Queue[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = queue.Queue()
        self._streams: dict[str, Callable[[Sample | Exception], None]] = {}
        self._stop = False

    def submit(self, function: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        """Run ``function`` in the main thread, between steps."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._inbox.put((function, future))
        return future

    def start_requests(self, requests: list[Request], deliver: Callable[[Sample | Exception], None]) -> None:
        """Called in the main thread: add requests whose samples go to ``deliver``."""
        self.engine.add(requests)
        self._streams.update(dict.fromkeys((r.request_id for r in requests), deliver))

    def drop_requests(self, request_ids: list[str], deliver: Callable[[Sample | Exception], None] | None = None) -> None:
        """Called in the main thread: forget requests. With ``deliver``, those only whose samples go there: after an error a caller
        may have asked again under the same ids, and that is another request."""
        mine = [r for r in request_ids if deliver is None or self._streams.get(r) is deliver]
        if not mine:
            return
        for request_id in mine:
            self._streams.pop(request_id, None)
        try:
            self.engine.abort(mine)
        except Exception as error:  # the others hear of it; nobody waits for this call
            traceback.print_exc()
            self._fail(error)

    def stop(self) -> None:
        self._stop = True

    def run(self) -> None:
        if self.engine.ranks > 1:
            self._run_together()
        while not self._stop:
            self._commands(wait=not self.engine.busy)
            if self.engine.busy and not self._stop:
                self._step()

    def _run_together(self) -> None:
        """As :meth:`run`, but every round is one with all ranks; a rank that is lost ends this one."""
        while not self._stop:
            self._commands(wait=False)
            try:
                busy = not self._stop and together(self.engine)
            except EngineError as error:
                print(error, file=sys.stderr)
                self._fail(error)
                self._stop = self.engine.state == "failed"
                continue
            if busy:
                self._step()
            else:
                time.sleep(IDLE_S)

    def _fail(self, error: Exception) -> None:
        for deliver in set(self._streams.values()):
            deliver(error)
        self._streams.clear()

    def _commands(self, wait: bool) -> None:
        try:
            while not self._stop:
                function, future = self._inbox.get(timeout=0.5) if wait else self._inbox.get_nowait()
                wait = False
                if not future.set_running_or_notify_cancel():
                    continue  # who asked for it has gone; from here on it can't be cancelled
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)
        except queue.Empty:
            return

    def _step(self) -> None:
        try:
            for sample in self.engine.step():
                self._streams.pop(sample.request_id)(sample)
        except Exception as error:
            traceback.print_exc()
            self._fail(error)
