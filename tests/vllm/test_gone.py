"""A caller that goes away at any moment leaves no request running and the engine's loop alive."""
from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm.test_loop import FakeEngine, body
from vime.vllm.loop import Loop
from vime.vllm.server import build_app


class SlowEngine(FakeEngine):
    """Never finishes a request by itself; ``add`` waits until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.adding, self.may_add = threading.Event(), threading.Event()
        self.may_add.set()

    def add(self, requests: Any) -> None:
        self.adding.set()
        assert self.may_add.wait(10)
        super().add(requests)

    def step(self) -> list:
        time.sleep(0.005)
        return []

    def abort(self, request_ids: list[str]) -> None:
        super().abort(request_ids)
        self.waiting = [r for r in self.waiting if r.request_id not in request_ids]


@contextlib.contextmanager
def running(loop: Loop) -> Iterator[None]:
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield
        loop.submit(lambda: None).result(10)  # it still answers
    finally:
        loop.stop()
        thread.join(5)
    assert not thread.is_alive()


async def ask(app: Any, spec: str, gone: bool) -> None:
    """POST /generate by a server of that ASGI ``spec_version``; ``gone``: the caller closed right after asking."""
    sent = [{"type": "http.request", "body": json.dumps(body("a", "b")).encode(), "more_body": False}]

    async def receive() -> dict:
        if sent:
            return sent.pop()
        if not gone:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        if gone:
            if spec == "2.3":  # the server says nothing, and the answer is cancelled at its next wait
                await asyncio.Event().wait()
            raise OSError("closed")

    await app({"type": "http", "asgi": {"version": "3.0", "spec_version": spec}, "http_version": "1.1", "method": "POST", "path": "/generate",
               "raw_path": b"/generate", "root_path": "", "scheme": "http", "query_string": b"", "headers": [], "client": ("x", 1),
               "server": ("x", 1)}, receive, send)


@pytest.mark.parametrize("spec", ["2.3", "2.4"])
def test_before_the_first_byte(spec: str) -> None:
    engine = SlowEngine()
    loop = Loop(engine)
    with running(loop):
        with contextlib.suppress(Exception):  # what the server hears of it is the server's business
            asyncio.run(ask(build_app(loop, None), spec, gone=True))
        loop.submit(lambda: None).result(10)
        assert engine.aborted == ["a", "b"] and not engine.waiting and not loop._streams


def cancelled_when(app: Any, moment: threading.Event | None, then: Any) -> None:
    async def main() -> None:
        task = asyncio.create_task(ask(app, "2.4", gone=False))
        if moment is None:
            await asyncio.sleep(0.1)
        else:
            await asyncio.to_thread(moment.wait, 10)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        then()

    asyncio.run(main())


def test_before_its_turn_it_is_never_begun() -> None:
    engine = SlowEngine()
    loop = Loop(engine)
    cancelled_when(build_app(loop, None), None, lambda: None)  # nobody works yet
    with running(loop):
        loop.submit(lambda: None).result(10)
        assert not engine.waiting and not engine.aborted and not engine.adding.is_set()


def test_while_it_is_begun_it_is_taken_back() -> None:
    engine = SlowEngine()
    engine.may_add.clear()
    loop = Loop(engine)
    with running(loop):
        cancelled_when(build_app(loop, None), engine.adding, engine.may_add.set)
        loop.submit(lambda: None).result(10)
        assert engine.aborted == ["a", "b"] and not engine.waiting and not loop._streams


def test_in_the_middle_of_the_stream() -> None:
    engine = SlowEngine()
    loop = Loop(engine)
    with running(loop):
        cancelled_when(build_app(loop, None), engine.adding, lambda: None)
        loop.submit(lambda: None).result(10)
        assert engine.aborted == ["a", "b"] and not engine.waiting and not loop._streams
