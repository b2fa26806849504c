"""The server's loop over an engine that does what the test says: commands, delivery, a step that fails."""
from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import httpx
import pytest
from starlette.testclient import TestClient

from vime.vllm import server
from vime.vllm.config import EngineConfig
from vime.vllm.engine import Engine
from vime.vllm.loop import Loop
from vime.vllm.protocol import EngineError, Request, Sample
from vime.vllm.server import build_app


class FakeEngine(Engine):
    """Finishes one request a step, or raises."""

    ranks = 1

    def __init__(self) -> None:
        self.state, self.reason, self.version = "ready", "", 0
        self.waiting: list[Request] = []
        self.fail = False
        self.aborted: list[str] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def add(self, requests: list[Request]) -> None:
        if any(r.max_tokens < 1 for r in requests):
            raise EngineError("request 'x': max_tokens is 0")
        self.waiting += requests

    def step(self) -> list[Sample]:
        if self.fail:
            self.waiting.clear()
            raise EngineError("a step of the engine failed and it must be restarted: RuntimeError: planted")
        r = self.waiting.pop(0)
        return [Sample(request_id=r.request_id, prompt_token_ids=r.prompt_token_ids, token_ids=[1], logprobs=[-0.1],
                       finish_reason="length", weight_version=0, num_cached_tokens=0)]

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    def stats(self) -> dict:
        raise ValueError("planted bug")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def http(engine: FakeEngine) -> Iterator[httpx.Client]:
    loop = Loop(engine)
    thread = threading.Thread(target=loop.run)
    thread.start()
    with TestClient(build_app(loop, None)) as client:
        yield client
    loop.stop()
    thread.join(5)
    assert not thread.is_alive()


def body(*names: str, max_tokens: int = 1) -> list[dict]:
    return [{"request_id": n, "prompt_token_ids": [1], "max_tokens": max_tokens} for n in names]


def test_samples_are_delivered(http: httpx.Client) -> None:
    lines = [line for line in http.post("/generate", json=body("a", "b")).text.splitlines() if "sample" in line]
    assert len(lines) == 2


def test_a_failing_step_reaches_the_caller_and_the_loop_lives(http: httpx.Client, engine: FakeEngine) -> None:
    engine.fail = True
    assert "RuntimeError: planted" in http.post("/generate", json=body("a")).text
    engine.fail = False
    assert '"sample"' in http.post("/generate", json=body("b")).text


def test_the_end_of_a_failed_stream_leaves_a_retry_under_the_same_ids_alone(engine: FakeEngine) -> None:
    loop, heard = Loop(engine), []
    asked = [Request(request_id="a", prompt_token_ids=[1], max_tokens=1)]
    first, second = (lambda item, n=n: heard.append((n, item)) for n in (1, 2))
    engine.fail = True
    loop.start_requests(asked, first)
    loop._step()
    engine.fail = False
    loop.start_requests(asked, second)  # the caller has read the error line; the first stream ends only now
    loop.drop_requests(["a"], first)
    assert not engine.aborted and set(loop._streams) == {"a"}
    loop._step()
    assert [n for n, _ in heard] == [1, 2] and isinstance(heard[0][1], EngineError) and heard[1][1].request_id == "a"
    loop.start_requests(asked, second)
    loop.drop_requests(["a"], second)
    assert engine.aborted == ["a"] and not loop._streams


def test_a_refusal_is_an_answer_with_the_name_of_the_error(http: httpx.Client) -> None:
    answer = http.post("/generate", json=body("x", max_tokens=0))
    assert answer.status_code == 409 and answer.json() == {"error": "EngineError", "message": "request 'x': max_tokens is 0"}
    answer = http.post("/generate", content=b"{")
    assert answer.status_code == 409 and "not a list of requests" in answer.json()["message"]


def test_a_bug_is_an_answer_too(http: httpx.Client) -> None:
    answer = http.get("/stats")
    assert answer.status_code == 500 and answer.json()["message"] == "ValueError: planted bug"


def test_a_port_in_use_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert server.serve(EngineConfig(model="m"), "127.0.0.1", port, None) == 1
    err = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1, port {port}: " in err and "take another --port" in err and "Traceback" not in err


def test_too_little_memory_for_the_engine_is_one_message(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(_: EngineConfig) -> None:
        raise MemoryError

    monkeypatch.setattr(server, "Engine", engine)
    assert server.serve(EngineConfig(model="m"), "127.0.0.1", 0, None) == 1
    err = capsys.readouterr().err
    assert "not enough memory to build the engine" in err and "Traceback" not in err
