"""The round trip into a running vLLM: received, loaded and answers; each can fail on its own."""
from __future__ import annotations

import copy
import dataclasses

import pytest

from alignment.verdict import Status
from tests.vllm.models import write_tiny
from tests.weights.tiny import load, to_fp8, write
from vime.vllm.protocol import EngineError
from vime.weights import serve
from vime.weights.faults import FaultError
from vime.weights.roundtrip import RoundTrip, roundtrip
from vime.weights.topology import Sizes
from vime.weights.truth import Truth

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def trip(tmp_path_factory):
    """A dense model with square projections, cut over two ranks; one engine for all of this file."""
    folder = write_tiny(tmp_path_factory.mktemp("hf"), "qwen3", hidden_size=128, vocab_size=320)
    with RoundTrip(folder, Sizes(tp=2)) as made:
        yield made


def served(verdict):
    return next(c for c in verdict.children if c.name == "served")


def test_both_checkpoints_served_answer_the_same(trip):
    verdict = trip.run(serve=True)
    assert verdict.status is Status.PASS, verdict.summary()
    tensors = len(trip.source)
    assert verdict.stats["stages"]["received"] == verdict.stats["stages"]["loaded"] == {"equal": tensors, "wrong": 0}
    assert served(verdict).green and served(verdict).coverage["tokens"].compared >= 64


@pytest.mark.parametrize(("text", "cause"), [
    ("converted:transpose", "transposed"), ("full:head-major", "head_major"), ("full:even-split", "even_split"),
    ("file:layer-offset", "other_tensor"), ("received:stale", "stale"), ("received:transpose", "transposed"), ("received:gate-up", "other_tensor")])
def test_the_answers_change_with_a_fault_and_the_ledger_names_it(trip, text, cause):
    verdict = trip.run(text, serve=True)
    assert verdict.status is Status.FAIL
    assert (verdict.first_bad.stage, verdict.first_bad.tensor) == (text.partition(":")[0], verdict.info["planted"]["tensor"])
    assert verdict.causes[0].kind == cause, verdict.summary()
    assert served(verdict).status is Status.FAIL, served(verdict).summary()
    for stage in ("received", "loaded"):
        assert verdict.stats["stages"][stage]["wrong"] > 0


def test_what_the_engine_refuses_is_named_and_nothing_is_green(trip):
    verdict = trip.run("received:dropped", serve=True)
    assert verdict.status is Status.FAIL and verdict.first_bad.tensor == verdict.info["planted"]["tensor"]
    assert verdict.stats["stages"]["received"]["wrong"] == 1
    assert served(verdict).status is Status.NOT_RUN and ": missing" in served(verdict).reason
    assert trip.run(serve=True).status is Status.PASS


def test_an_engine_that_does_not_listen_proves_nothing(trip):
    answers = {"a": {"token_ids": [1, 2], "prompt_token_ids": [3], "logprobs": [-1.0, -2.0]}}
    other = copy.deepcopy(answers)
    assert serve.judge_answers(answers, other, answers).status is Status.NOT_RUN
    other["a"]["logprobs"][1] = -2.0000001
    assert serve.judge_answers(answers, other, answers).green
    assert serve.judge_answers(answers, answers, other).status is Status.NOT_RUN
    assert serve.judge_answers(answers, {}, other).status is Status.FAIL
    other["a"]["token_ids"][0] = 4
    assert serve.judge_answers(answers, {}, other).status is not Status.PASS


def test_a_tensor_that_was_lost_in_loading_is_named_at_that_stage(trip):
    """The engine reads every update back itself; were it not to, the ledger would see it."""
    digests = {n: f"bytes:{serve.digest_of(t)}" for n, t in trip.source.items()}
    name = "model.layers.1.self_attn.o_proj.weight"
    loaded = {**digests, name: f"bytes:{serve.digest_of(trip.source[name].t().contiguous())}"}
    cells = list(serve.cells(serve.Served(digests, loaded, None), trip.truth))
    bad = [c for c in cells if not c.good]
    assert [(c.stage, c.name) for c in bad] == [("loaded", name)] and bad[0].layer == 1
    assert serve.origin(bad[0], trip.truth).kind == "transposed"
    stale = dataclasses.replace(bad[0], found=digests["model.layers.2.self_attn.o_proj.weight"])
    assert serve.origin(stale, trip.truth).name == "model.layers.2.self_attn.o_proj.weight"


def test_explaining_every_tensor_reads_the_source_once(trip):
    class Counting(dict):
        reads = 0

        def __getitem__(self, name):
            self.reads += 1
            return super().__getitem__(name)

        def items(self):
            return ((name, self[name]) for name in self)

    source = Counting(trip.source.items())
    truth = Truth(source, trip.plan, trip.topology)
    names, source.reads = list(source), 0
    digests = {name: f"bytes:{serve.digest_of(tensor)}" for name, tensor in trip.source.items()}
    rotated = {name: digests[names[i - 1]] for i, name in enumerate(names)}  # each got the tensor before it
    bad = [c for c in serve.cells(serve.Served(rotated, rotated, None), truth) if not c.good]
    origins = [serve.origin(cell, truth) for cell in bad]
    assert len(bad) == 2 * len(names) and source.reads == len(names)
    assert all(digests[found.name] == cell.found for cell, found in zip(bad, origins, strict=True))


def test_wrong_use_is_refused_before_an_engine_starts(trip, checkpoint, tmp_path):
    with pytest.raises(FaultError, match="lies inside the engine's process; plant it at received"):
        trip.run("loaded:stale", serve=True)
    state, cfg = to_fp8(*load(checkpoint("deepseek_v3")))
    folder = write(tmp_path / "fp8", state, cfg)
    with pytest.raises(EngineError, match="holds tensors in F8_E4M3; --serve covers checkpoints in float32 and bfloat16"):
        roundtrip(folder, serve=True)
