"""An engine of two ranks with the experts spread over them: the bits of one rank, updates, and ranks that fall out of step."""
from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gates.synthetic import write
from gates.synthetic_experts import SPARSE
from tests.vllm.models import write_tiny
from tests.vllm.plain import Plain
from tests.vllm.test_latent_engine import alone, launch, requests, same
from vime.vllm.protocol import EngineDied, EngineError, EngineStartError, Request
from vime.vllm.ranks import EngineRanks
from vime.weights.checkpoint import HfCheckpoint
from vime.weights.manifest import manifest_of
from vime.weights.transports import Endpoint, fanout

NAME = "glm5.2-6layer-tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(SPARSE[NAME], tmp_path_factory.mktemp("made") / NAME)


@pytest.fixture(scope="module")
def ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRanks]:
    with launch(folder, tmp_path_factory.mktemp("log"), "bfloat16", data_parallel_size=2) as engine:
        yield engine


def state(folder: Path) -> dict[str, torch.Tensor]:
    return dict(HfCheckpoint(folder).items())


def send(ranks: EngineRanks, tensors: dict[str, torch.Tensor], version: int, to: slice = slice(None), **fields: Any) -> list[dict[str, Any]]:
    endpoints = [Endpoint(url=url, token=token, timeout_s=60, **fields) for url, token in ranks.client.addresses[to]]
    return [report for one in fanout.rounds(endpoints) for report in fanout.send(one, iter(tensors.items()), version)]


def test_the_bits_of_one_rank(ranks, folder) -> None:
    """Whichever rank owns a request, alone or together, in chunks, from the cache: the bits of a plain pass."""
    client, plain = ranks.client, Plain(folder, torch.bfloat16)
    wanted = alone(client)  # one request at a time: the other rank only serves its experts
    for s in wanted:
        assert s.logprobs == plain.logprobs(s.prompt_token_ids, s.token_ids)
    for chunk in (None, 7):
        client.set_chunk(chunk)
        client.reset_prefix_cache()
        for order in (requests(), requests()[::-1], requests()[1:]):
            same(client.generate(order), wanted)
    client.set_chunk(None)
    assert client.stats()["cached_tokens"] > 0


def test_records_name_every_position_once(ranks, folder) -> None:
    client = ranks.client
    client.reset_prefix_cache()
    client.record(True, embedding=False, routing=True)
    try:
        samples = client.generate(requests()[:2])  # one each: two of one rank would share a cached beginning
        records = client.fetch_records()
    finally:
        client.record(False)
    wanted = {(s.request_id, p) for s in samples for p in range(len(s.prompt_token_ids) + len(s.token_ids) - 1)}
    assert sorted(wanted) == sorted((name, position) for name, position, _ in records.rows)
    assert records.tensors["layers.4.routing"].shape == (len(records.rows), 4) and records.tensors["layers.5"].shape[0] == len(records.rows)


def test_each_rank_holds_its_experts_and_all_hold_all(ranks, folder) -> None:
    held = [{t["name"] for t in c.weights_digest()["tensors"]} for c in ranks.client.clients]
    names = set(state(folder))
    both = held[0] & held[1]
    assert held[0] | held[1] == names and not any(".experts." in n for n in both)
    assert {n for n in held[0] - both} == {n for n in names if ".experts." in n and int(n.split(".experts.")[1].split(".")[0]) < 8}


def test_an_update_goes_to_every_rank(ranks, folder, tmp_path) -> None:
    client, original = ranks.client, state(folder)
    before = alone(client)
    changed = "model.layers.4.mlp.experts.13.down_proj.weight"  # on the second rank
    new = {**original, changed: original[changed].flip(0)}
    reports = send(ranks, new, 1)
    assert sum(r["elements_compared"] for r in reports) > reports[0]["elements"]
    assert client.weights_digest()["digest"] == manifest_of(new.items(), 1).digest()
    assert [s.logprobs for s in alone(client)] != [s.logprobs for s in before]
    send(ranks, original, 2, slice(1))
    with pytest.raises(EngineError, match=r"the ranks of this engine hold weight versions \[2, 1\]"):
        client.generate(requests())
    with pytest.raises(EngineError, match=r"hold weight versions \[2, 1\]"):
        client.weights_digest()
    send(ranks, original, 2, slice(1, None))
    same(alone(client), before)
    for version, tensors in ((3, new), (4, original)):  # written once for both
        reports = send(ranks, tensors, version, transport="disk", disk_dir=str(tmp_path))
        assert sum(r["elements_compared"] for r in reports) > reports[0]["elements"] and list(tmp_path.iterdir()) == []
        assert client.weights_digest()["digest"] == manifest_of(tensors.items(), version).digest()
    same(alone(client), before)


@pytest.mark.parametrize(("size", "message"), [
    (3, "16 experts over data_parallel_size 3 .*expected a divisor of the experts"), (2, "this is llama on cpu")])
def test_ranks_that_do_not_fit_are_refused(size, message, folder, tmp_path) -> None:
    model = folder if size == 3 else write_tiny(tmp_path / "dense")
    with pytest.raises(EngineStartError, match=message):
        launch(model, tmp_path, "float32", data_parallel_size=size)


def test_a_rank_that_hangs_ends_all(folder, tmp_path) -> None:
    with launch(folder, tmp_path, "bfloat16", data_parallel_size=2) as ranks:
        ranks.client.stall_s = 5.0
        os.kill(ranks.engines[1].pid, signal.SIGSTOP)
        with pytest.raises(EngineDied, match=r"the 2 ranks of the engine computed nothing for 5 s .*rank 1 is stopped.*all were ended"):
            ranks.client.generate(requests()[:2])
        assert not any(engine.process.wait(10) is None for engine in ranks.engines)


def test_a_dead_rank_ends_the_others(ranks) -> None:
    """Last: the engine is gone after it."""
    os.kill(ranks.engines[1].pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises((EngineError, EngineDied), match=r"rank 0 of 2 lost another rank|is gone"):
        ranks.client.generate([Request(request_id="late", prompt_token_ids=[1] * 9, max_tokens=4)])
    while ranks.engines[0].alive() and time.monotonic() - started < 60:
        time.sleep(0.1)
    assert not ranks.engines[0].alive() and "lost another rank" in ranks.engines[0].explain()
