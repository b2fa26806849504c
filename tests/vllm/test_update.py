"""Online updates: exactly what was sent is what the engine holds and uses, or it refuses to generate."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.vllm.models import hf_state, prompts
from vime.vllm.launch import EngineProcess
from vime.vllm.protocol import EngineError, EnginePoisoned, Request, Sample, UpdateFailed
from vime.weights.manifest import manifest_of
from vime.weights.transports import Endpoint, open_sender


def generate(engine: EngineProcess) -> list[Sample]:
    requests = [Request(request_id=f"u{i}", prompt_token_ids=p, max_tokens=5, seed=i) for i, p in enumerate(prompts(3, seed=9))]
    return engine.client.generate(requests)


def logprobs(engine: EngineProcess) -> list[list[float]]:
    return [s.logprobs for s in generate(engine)]


def endpoint(engine: EngineProcess, **changes: object) -> Endpoint:
    return Endpoint(url=engine.url, token=engine.token, timeout_s=60, **changes)


@pytest.fixture
def state(llama_engine: EngineProcess, llama_dir: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The checkpoint's tensors; afterwards the engine holds them again."""
    original = hf_state(llama_dir)
    yield dict(original)
    with open_sender(endpoint(llama_engine)) as sender:
        sender.send(original.items(), 0)


@pytest.mark.parametrize("transport", ["process_group", "disk"])
def test_updates_take_and_every_element_is_read_back(llama_engine, state, transport, tmp_path) -> None:
    before = logprobs(llama_engine)
    with open_sender(endpoint(llama_engine, transport=transport, disk_dir=str(tmp_path / "w"))) as sender:
        seen = [before]
        for version in (1, 2, 3):
            state = {n: t * 1.01 for n, t in state.items()}
            report = sender.send(iter(state.items()), version)
            assert report["elements_compared"] == report["elements"] == sum(t.numel() for t in state.values())
            assert report["digest"] == manifest_of(state.items(), version).digest()
            assert llama_engine.client.weights_digest()["digest"] == report["digest"]
            samples = generate(llama_engine)
            assert {s.weight_version for s in samples} == {version}
            assert samples[0].num_cached_tokens == 0  # the cache of the old weights is gone
            seen.append([s.logprobs for s in samples])
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])


def test_the_same_weights_again_change_nothing(llama_engine, state) -> None:
    before = logprobs(llama_engine)
    with open_sender(endpoint(llama_engine)) as sender:
        sender.send(state.items(), 1)
    assert logprobs(llama_engine) == before


@pytest.mark.parametrize("name", [
    "model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "model.layers.2.mlp.up_proj.weight",
    "model.layers.0.input_layernorm.weight", "model.norm.weight", "lm_head.weight"])
def test_one_changed_tensor_changes_the_logits(llama_engine, state, name) -> None:
    before = logprobs(llama_engine)
    with open_sender(endpoint(llama_engine)) as sender:
        sender.send({**state, name: state[name] * 1.5}.items(), 1)
    assert logprobs(llama_engine) != before


def test_disk_files_are_kept_only_on_request(llama_engine, state, tmp_path) -> None:
    for keep in (False, True):
        with open_sender(endpoint(llama_engine, transport="disk", disk_dir=str(tmp_path), keep_files=keep)) as sender:
            sender.send(state.items(), 7)
        assert (tmp_path / "version-000007" / "manifest.json").exists() is keep
    assert not list(tmp_path.glob("*.part"))


NAN, INF = float("nan"), float("inf")
NORM = "model.norm.weight"
FAULTS = {
    "missing": (lambda s: {n: t for n, t in s.items() if n != NORM}, rf"{NORM}: missing"),
    "unknown": (lambda s: {**s, "model.extra": s[NORM]}, r"model\.extra: not a tensor of this model"),
    "dtype": (lambda s: {**s, NORM: s[NORM].bfloat16()}, rf"{NORM}: dtype bfloat16, expected float32"),
    "shape": (lambda s: {**s, NORM: s[NORM][:-1]}, rf"{NORM}: shape \[63\], expected \[64\]"),
    "nan": (lambda s: {**s, NORM: s[NORM].index_fill(0, torch.tensor([5]), NAN)}, rf"{NORM}: 1 of 64 values are NaN"),
    "inf": (lambda s: {**s, NORM: s[NORM].index_fill(0, torch.tensor([5]), INF)}, rf"{NORM}: 1 of 64 values are NaN or infinite"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_update_poisons_and_a_good_one_heals(llama_engine, state, fault) -> None:
    spoil, message = FAULTS[fault]
    before = logprobs(llama_engine)
    with open_sender(endpoint(llama_engine)) as sender:
        with pytest.raises(UpdateFailed, match=message):
            sender.send(spoil(state).items(), 1)
        with pytest.raises(EnginePoisoned, match=message):
            generate(llama_engine)
        assert llama_engine.client.health()["state"] == "poisoned"
        sender.send(state.items(), 2)
    assert logprobs(llama_engine) == before


def test_a_sender_that_breaks_off_poisons(llama_engine, state) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(state.items())[:3]
        raise ValueError("gather failed")

    with open_sender(endpoint(llama_engine)) as sender, pytest.raises(ValueError, match="gather failed"):
        sender.send(broken(), 1)
    with pytest.raises(EnginePoisoned, match="the sender gave up: ValueError: gather failed"):
        generate(llama_engine)


def test_a_sender_that_never_comes_poisons(llama_engine, state) -> None:
    client = llama_engine.client
    client.begin_update(1, {"kind": "process_group", "backend": "gloo", "host": "127.0.0.1", "port": 9, "timeout_s": 1})
    with pytest.raises(UpdateFailed, match=r"lost the sender at 127\.0\.0\.1:9"):
        client.finish_update(1)
    with pytest.raises(EnginePoisoned):
        generate(llama_engine)


def test_wrong_calls_are_refused_by_name(llama_engine, state) -> None:
    with pytest.raises(EngineError, match="no update to version 5 was begun"):
        llama_engine.client.finish_update(5)
    with pytest.raises(UpdateFailed, match="unknown weight transport 'pigeon'"):
        open_sender(endpoint(llama_engine, transport="pigeon"))


def test_on_a_cpu_it_neither_sleeps_nor_wakes_and_goes_on(llama_engine, state) -> None:
    before = logprobs(llama_engine)
    with pytest.raises(EngineError, match="vLLM has no sleep mode on CPU; leave the engine awake"):
        llama_engine.client.sleep()
    with pytest.raises(EngineError, match="cannot wake: the engine is ready, not asleep"):
        llama_engine.client.wake()
    assert logprobs(llama_engine) == before


def test_tied_head_and_padded_vocabulary(qwen2_engine, qwen2_dir) -> None:
    """A tied head may come or not, but not with values of its own; padding rows stay zero."""
    original = hf_state(qwen2_dir)
    embedding = original["model.embed_tokens.weight"]
    before = logprobs(qwen2_engine)
    with open_sender(endpoint(qwen2_engine)) as sender:
        changed = {**original, "model.embed_tokens.weight": embedding * 1.1}
        sender.send(changed.items(), 1)
        assert logprobs(qwen2_engine) != before
        with pytest.raises(UpdateFailed, match=r"lm_head\.weight is tied"):
            sender.send({**original, "lm_head.weight": embedding + 1}.items(), 2)
        sender.send({**original, "lm_head.weight": embedding.clone()}.items(), 3)
    assert logprobs(qwen2_engine) == before


def test_bf16_engine_takes_bf16_only(qwen3_engine, qwen3_dir) -> None:
    original = {n: t.bfloat16() for n, t in hf_state(qwen3_dir).items()}
    before = logprobs(qwen3_engine)
    with open_sender(endpoint(qwen3_engine)) as sender:
        with pytest.raises(UpdateFailed, match="dtype float32, expected bfloat16"):
            sender.send({n: t.float() for n, t in original.items()}.items(), 1)
        sender.send(original.items(), 2)
    assert logprobs(qwen3_engine) == before
