"""Steps that overlap: nothing is in flight when the last request is gone, whichever way it went, nor while records are taken.

The engine is a stand-in with the queue of vLLM's asynchronous scheduling, in which a step is taken in one call later.
"""
from __future__ import annotations

import collections
from types import SimpleNamespace
from typing import Any

import pytest

from vime.vllm.engine import Engine
from vime.vllm.loop import Loop
from vime.vllm.protocol import EngineError, RecordOptions, Request


class Overlapping:
    """vLLM's engine: each call schedules a step for all requests and, with two under way, takes the older one in."""

    def __init__(self, lengths: dict[str, int], overlap: bool) -> None:
        self.left, self.fails = dict(lengths), False
        self.core = SimpleNamespace(batch_queue=collections.deque(maxlen=2) if overlap else None, step=self.serial,
                                    step_with_batch_queue=self.queued)
        self.core.step_fn = self.queued if overlap else self.serial
        self.engine_core = SimpleNamespace(engine_core=self.core)

    def step(self) -> list[Any]:
        if self.fails:
            raise RuntimeError("planted")
        return self.core.step_fn()

    def queued(self) -> list[Any]:
        if self.left:
            self.core.batch_queue.appendleft(list(self.left))
            if len(self.core.batch_queue) < 2:
                return []
        return self.take(self.core.batch_queue.pop())

    def serial(self) -> list[Any]:
        return self.take(list(self.left))

    def take(self, requests: list[str]) -> list[Any]:
        out = []
        for name in requests:
            if name in self.left:  # else it has ended, and this step computed a token past its end
                self.left[name] -= 1
                if not self.left[name]:
                    del self.left[name]
                    out.append(SimpleNamespace(request_id=name, finished=True))
        return out

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.left.pop(name, None)


def engine(overlap: bool = True, **lengths: int) -> Any:
    made = object.__new__(Engine)
    made.engine, made.state, made.reason = Overlapping(lengths, overlap), "ready", ""
    made._requests = {name: (Request(request_id=name, prompt_token_ids=(1,), max_tokens=n), True) for name, n in lengths.items()}
    made.recorder = SimpleNamespace(start=lambda options: None, stop=lambda: None, forgotten=0)
    made.recorder.forget_requests = lambda: setattr(made.recorder, "forgotten", made.recorder.forgotten + 1)
    made._finish = lambda output: made._requests.pop(output.request_id)[0].request_id
    return made


@pytest.mark.parametrize("overlap", [True, False])
def test_the_last_request_leaves_nothing_in_flight(overlap):
    one, done, deepest = engine(overlap, a=2, b=5), [], 0
    while one.busy:
        done += one.step()
        queue = one._core.batch_queue or ()
        deepest = max(deepest, len(queue))
        assert one.busy or not queue
    assert done == ["a", "b"] and deepest == overlap and one.recorder.forgotten == 1


def test_an_abort_of_the_last_request_does_and_of_another_does_not():
    one = engine(a=9, b=9)
    one.step()
    one.abort(["a", "unknown"])
    assert len(one._core.batch_queue) == 1 and one.busy, "b goes on as it was"
    one.abort(["b"])
    assert not one._core.batch_queue and not one.busy and one.state == "ready"


def test_a_step_that_fails_after_an_abort_is_final_and_everyone_hears_of_it():
    one, heard = engine(a=9), []
    one.step()
    one.engine.fails = True
    loop = Loop(one)
    loop._streams = {"a": lambda item: heard.append(("a", item)), "other": lambda item: heard.append(("other", item))}
    loop.drop_requests(["a"])
    ((name, error),) = heard
    assert name == "other" and one.state == "failed" and isinstance(error, EngineError) and "RuntimeError: planted" in str(error)
    with pytest.raises(EngineError, match="the engine is failed"):
        one._require_ready("generate")


def test_records_are_taken_one_step_at_a_time():
    one = engine()
    one.record(RecordOptions(enabled=True))
    assert one._core.step_fn == one._core.step
    one.record(RecordOptions(enabled=False))
    assert one._core.step_fn == one._core.step_with_batch_queue
    plain = engine(overlap=False)
    plain.record(RecordOptions(enabled=False))
    assert plain._core.step_fn == plain._core.step
