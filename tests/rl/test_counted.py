"""Trainer and engine on a checkpoint without tensors: the engine starts empty and gets them by the online update."""
from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gates.harness import Harness
from gates.judging import same_logprobs, same_weights
from gates.profiles import find
from gates.synthetic import config_of, count
from vime.rl import session
from vime.vllm.protocol import EngineError
from vime.weights import counted
from vime.weights.checkpoint import HfCheckpoint
from vime.weights.manifest import digest_of

NAME = "glm5.2-6layer-tiny"


def test_an_engine_without_a_checkpoint_is_filled_by_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = count(config_of(NAME), tmp_path / "counted")
    harness = Harness(dataclasses.replace(find(NAME), checkpoint=lambda: folder), "cpu", "bfloat16")
    refused: list[str] = []

    def fill(config, pool, client, address) -> bool:
        with pytest.raises(EngineError) as error:
            client.generate(harness.requests(1))
        refused.append(str(error.value))
        return real(config, pool, client, address)

    real = session.fill
    monkeypatch.setattr(session, "fill", fill)
    with harness:
        assert "the engine is empty" in refused[0] and "full update" in refused[0]
        assert harness.session.client.health()["state"] == "ready" and harness.session.client.health()["weight_version"] == 0
        assert not real(harness.config, harness.session.pool, harness.session.client, ("", None)), "an engine with weights keeps them"
        held = {name: digest_of(tensor) for name, tensor in HfCheckpoint(folder).items()}
        assert same_weights(held, harness.engine_digests(), "engine").green
        assert same_weights(held, harness.trainer_digests(), "trainer").green
        samples = harness.generate(harness.requests(3, 2))
        assert same_logprobs(samples, harness.logprobs(samples), "log-probabilities").green
        assert len({token for s in samples for token in s.token_ids}) > 10
        harness.train(samples, 2)
        assert harness.update().changed > 0
    assert counted.is_counted(folder) and not list(folder.glob("*.safetensors"))
