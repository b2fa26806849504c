"""Weights into a running engine on GPUs: device memory that both processes map, NCCL between two GPUs, sleep and wake.

    pytest -q tests/cuda/test_weights.py        # one GPU: IPC, sleep and wake; two GPUs: NCCL as well. About a minute.

The engine is stock vLLM with a tiny model: what is shown is the way of the weights, in its own layout, not its numerics.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from alignment.digest import device_digest
from tests.vllm.models import hf_state, write_tiny
from vime.vllm.launch import launch_engine
from vime.vllm.protocol import EngineError, EnginePoisoned, Request, UpdateFailed
from vime.weights import lanes
from vime.weights.manifest import manifest_of
from vime.weights.transports import Endpoint, open_sender, stream

State = dict[str, torch.Tensor]
BUCKET = 1 << 17  # so that one buffer is written again and again


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_tiny(tmp_path_factory.mktemp("hf"), "llama", hidden_size=256, head_dim=128)


@pytest.fixture(scope="module")
def states(folder: Any) -> tuple[State, State]:
    """The checkpoint's weights and others, bf16 on this process's GPU; one of them is no contiguous tensor."""
    first = {name: tensor.to("cuda", torch.bfloat16) for name, tensor in hf_state(folder).items()}
    generator = torch.Generator("cuda").manual_seed(7)
    second = {n: (t.float() + 0.05 * torch.randn(t.shape, generator=generator, device="cuda")).bfloat16() for n, t in first.items()}
    name = "model.layers.1.self_attn.o_proj.weight"
    second[name] = second[name].t().contiguous().t()
    assert not second[name].is_contiguous() and second[name].shape == first[name].shape
    return first, second


@pytest.fixture(autouse=True)
def many_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream.buckets, "__defaults__", (BUCKET,))


def launch(folder: Any, log: Any, **options: Any) -> Any:
    return launch_engine(folder, device="cuda", dtype="bfloat16", ops=(), log_path=log / "engine.log", sleep_mode=True,
                         gpu_memory_utilization=0.1, kv_cache_bytes=64 << 20, max_model_len=256, max_num_batched_tokens=256, **options)


@pytest.fixture(scope="module")
def engine(folder: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with launch(folder, tmp_path_factory.mktemp("log")) as running:
        yield running


class Versions:
    number = 0

    @classmethod
    def next(cls) -> int:
        cls.number += 1
        return cls.number


def send(engine: Any, tensors: Any, transport: str = "ipc", timeout_s: float = 60.0, **fields: Any) -> dict[str, Any]:
    endpoint = Endpoint(url=engine.url, token=engine.token, transport=transport, timeout_s=timeout_s, **fields)
    with open_sender(endpoint) as sender:
        return sender.send(tensors.items() if isinstance(tensors, dict) else tensors, Versions.next())


def answers(engine: Any) -> list[tuple[list[int], list[float]]]:
    prompts = [[(7 + 31 * i + 17 * j) % 320 for j in range(9 + 20 * i)] for i in range(3)]
    samples = engine.client.generate([Request(request_id=f"r{i}", prompt_token_ids=p, max_tokens=12, temperature=0.0)
                                      for i, p in enumerate(prompts)])
    return [(s.token_ids, s.logprobs) for s in samples]


def holds(engine: Any, state: State) -> bool:
    found = {t["name"]: t["digest"] for t in engine.client.weights_digest()["tensors"]}
    return found == {info.name: info.digest for info in manifest_of(state.items(), 0).tensors}


def test_device_memory_that_both_map_brings_every_element_three_times(engine, states) -> None:
    first, second = states
    before = answers(engine)
    assert len(list(stream.buckets(first.items()))) > 8
    seen = []
    for state in (second, first, second):
        report = send(engine, state)
        assert report["elements_compared"] == report["elements"] == sum(t.numel() for t in state.values())
        assert report["digest"] == manifest_of(state.items(), 0).digest() and holds(engine, state)
        seen.append(answers(engine))
    assert seen[1] == before != seen[0] == seen[2]


def test_digests_of_the_ledger_are_those_of_their_definition() -> None:
    """The kernel in one pass against torch's operations, here and on the host, for any stride and offset."""
    x = torch.randn(1 << 20, 6, device="cuda").bfloat16()
    for part in (x, x.t(), x[:, 1:], x.reshape(-1)[1:], x[:1, :3], x[:0], x.float(), x.to(torch.float8_e4m3fn)[1:]):
        assert lanes.device_digest(part) == device_digest(part) == device_digest(part.cpu())


def test_a_failed_update_leaves_the_engine_refusing_and_the_next_one_heals(engine, states) -> None:
    first, _ = states
    broken = {**first, "model.norm.weight": first["model.norm.weight"].clone().fill_(float("nan"))}
    with pytest.raises(UpdateFailed, match=r"model\.norm\.weight: 256 of 256 values are NaN"):
        send(engine, broken)
    with pytest.raises(EnginePoisoned):
        answers(engine)

    def stops():
        yield from list(first.items())[:5]
        raise RuntimeError("the trainer gave up")

    with pytest.raises((UpdateFailed, RuntimeError), match="the trainer gave up"):
        send(engine, stops())
    with pytest.raises(EnginePoisoned):
        answers(engine)
    send(engine, first)
    assert holds(engine, first) and answers(engine)


def test_weights_are_the_same_after_sleep_and_wake_and_updates_go_on(engine, states) -> None:
    for state in states:
        send(engine, state)
        before = answers(engine)
        engine.client.sleep()
        with pytest.raises(EngineError, match="asleep"):
            answers(engine)
        with pytest.raises(EngineError, match="asleep"):
            send(engine, state)
        engine.client.wake()
        assert holds(engine, state) and answers(engine) == before


def test_no_device_memory_is_left_behind(engine, states) -> None:
    send(engine, states[0])
    torch.cuda.empty_cache()
    free, held = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
    for number in range(8):
        send(engine, states[number % 2])
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == held
    assert free - torch.cuda.mem_get_info()[0] < 128 << 20  # each update has a buffer of 64 MiB


def test_nccl_brings_every_element_to_another_gpu(folder, states, tmp_path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs two GPUs: not shown here")
    first, second = states
    with launch(folder, tmp_path, env={"CUDA_VISIBLE_DEVICES": "1"}) as other:
        before = answers(other)
        for state in (second, first):
            report = send(other, state, "process_group", backend="nccl")
            assert report["elements_compared"] == sum(t.numel() for t in state.values()) and holds(other, state)
        assert answers(other) == before
        with pytest.raises(UpdateFailed, match="runs on"):
            send(other, first)  # IPC across two GPUs

        def stops():
            yield from list(first.items())[:5]
            raise RuntimeError("the trainer gave up")

        with pytest.raises((UpdateFailed, RuntimeError), match="the trainer gave up"):
            send(other, stops(), "process_group", backend="nccl")
        with pytest.raises(EnginePoisoned):
            answers(other)
        send(other, second, "process_group", backend="nccl")
        assert holds(other, second) and answers(other) != before


def test_an_fp8_engine_sleeps_and_wakes_with_what_it_keeps(tmp_path: Any) -> None:
    """What is kept quantised lies in the memory that vLLM gives up and restores; the same answers with it and without, and after an update."""
    from gates.profiles import find
    from vime.vllm.plugin import ROUTED

    found = {}
    for kept in (True, False):
        with launch_engine(str(find("dense-tiny").checkpoint()), device="cuda", dtype="bfloat16", ops=ROUTED, fp8="blockwise", sleep_mode=True,
                           log_path=tmp_path / f"{kept}.log", gpu_memory_utilization=0.1, kv_cache_bytes=64 << 20, max_model_len=256,
                           max_num_batched_tokens=256, keep_fp8_weights=kept) as running:
            assert bool(running.client.info()["fp8_kept"]) is kept
            before = answers(running)
            held = running.client.weights_digest()["digest"]
            running.client.sleep()
            with pytest.raises(EngineError, match="asleep"):
                running.client.weights_digest()
            running.client.wake()
            assert answers(running) == before and running.client.weights_digest()["digest"] == held
            found[kept] = before
    assert found[True] == found[False]
