"""The whole loop on tiny models: real Megatron, real vLLM, separate processes, weight updates; and what ends it."""
from __future__ import annotations

import math
import os
import signal

import pytest

from alignment.verdict import Status
from tests.rl.tiny import write_checkpoint
from vime.contract import ContractMismatch
from vime.rl.config import TrainConfig
from vime.rl.data import generate
from vime.rl.loop import Loop, load_problems
from vime.rl.ranks import TrainerDied, TrainerFailed
from vime.rl.rollout import requests_of_step
from vime.rl.session import Session
from vime.rl.sync import update_weights
from vime.rl.text import Text
from vime.vllm.protocol import EngineDied, EnginePoisoned

SMALL = {"num_rollout": 3, "rollout_batch_size": 2, "n_samples_per_prompt": 3, "rollout_max_response_len": 9, "lr": 1e-3,
         "reward": "gate", "max_num_batched_tokens": 64, "max_tokens_per_gpu": 384, "kv_cache_gib": 0.125, "timeout_s": 900.0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def run(config, tmp_path, record_layers_at=()):
    with Session(config, tmp_path / "logs") as session:
        return list(Loop(config, session, load_problems(config), record_layers_at=record_layers_at).run())


@pytest.mark.parametrize(("dtype", "changes"), [
    ("float32", {}),
    ("bfloat16", {"recompute": True}),
    ("bfloat16", {"actor_num_gpus": 2, "update_weight_transport": "disk"}),
], ids=["fp32", "bf16-recompute", "bf16-two-ranks-disk"])
def test_zero_differences_through_three_updates(checkpoint, tmp_path, dtype, changes):
    if changes.get("update_weight_transport") == "disk":
        changes = {**changes, "update_weight_disk_dir": str(tmp_path / "weights"), "update_weight_disk_keep_files": True}
    steps = run(TrainConfig(str(checkpoint), dtype=dtype, **{**SMALL, **changes}), tmp_path, record_layers_at=(0, 3))
    assert [s.trained for s in steps] == [True, True, True, False]
    for s in steps:
        assert [v.status for v in s.verdicts] == [Status.PASS] * len(s.verdicts), "\n".join(v.summary() for v in s.verdicts)
        assert s.metrics["differing"] == 0 and s.metrics["tokens"] == 54
        assert s.metrics["train_rollout_logprob_abs_diff"] == 0.0
    assert [s.metrics["tensors_changed"] > 0 for s in steps[:3]] == [True] * 3
    assert all(s.metrics["parameters_without_gradient"] == [] for s in steps[:3])
    assert sum(s.metrics["cached_prompt_tokens"] for s in steps) > 0
    layers = [v for s in steps for v in s.verdicts if v.name.startswith("layers")]
    assert [str(v.coverage["layers"]) for v in layers] == ["3/3", "3/3"]
    if changes.get("update_weight_disk_keep_files"):
        assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == [f"version-{v:06d}" for v in (1, 2, 3)]


def test_with_vime_off_the_same_input_differs_and_is_no_pass(checkpoint, tmp_path):
    config = TrainConfig(str(checkpoint), dtype="bfloat16", ops=(), **{**SMALL, "num_rollout": 0, "rollout_max_response_len": 24})
    (step,) = run(config, tmp_path)
    assert step.metrics["differing"] > 0
    assert step.verdicts[0].status is Status.FAIL
    assert step.verdicts[0].first_bad.request is not None and step.verdicts[0].first_bad.position is not None


def test_a_planted_bit_is_found_in_its_layer(checkpoint, tmp_path):
    config = TrainConfig(str(checkpoint), dtype="float32", **{**SMALL, "num_rollout": 0})
    with Session(config, tmp_path / "logs") as session:
        loop = Loop(config, session, generate(8), record_layers_at=(0,))
        session.pool.ranks.call("flip_bit", "decoder.layers.1.mlp.linear_fc2.weight", 5, 22)
        step = loop.turn(0, train=False)
    logprobs, layers = step.verdicts
    assert logprobs.status is Status.FAIL
    assert layers.status is Status.FAIL and layers.first_bad.layer == 1
    assert layers.first_bad.tensor == "layers.1" and layers.first_bad.request is not None


def test_other_operations_on_one_side_are_named_before_the_first_rollout(checkpoint, tmp_path):
    from vime.rl.pool import TrainerPool
    from vime.vllm.launch import launch_engine

    ops = ("linear", "norm", "rope", "activation", "attention", "embedding", "logprob", "sampling")
    config = TrainConfig(str(checkpoint), dtype="float32", ops=tuple(op for op in ops if op != "norm"), **SMALL)
    named = r"ops.norm: trainer has 'stock', engine has 'cpu/norm/f32"
    with (TrainerPool(config, tmp_path) as pool, pytest.raises(ContractMismatch, match=named),
          launch_engine(checkpoint, ops=ops, kv_cache_bytes=2**27, max_model_len=256) as engine):
        engine.client.handshake(pool.contract())


def test_a_running_engine_with_other_weights_is_taken_over(checkpoint, tmp_path):
    from vime.vllm.launch import launch_engine

    other = write_checkpoint(tmp_path / "other", seed=5)
    with launch_engine(other, dtype="bfloat16", kv_cache_bytes=2**27, max_model_len=256) as engine:
        config = TrainConfig(str(checkpoint), dtype="bfloat16", engine_url=engine.url, engine_token=engine.token,
                             **{**SMALL, "num_rollout": 1})
        for first in (1, 2):  # the second session starts from the trainer's checkpoint again
            steps = run(config, tmp_path)
            assert [s.verdicts[0].status for s in steps] == [Status.PASS] * 2
            assert steps[0].batch[0].weight_version == 2 * first - 1
        assert engine.alive()


def test_an_engine_that_dies_mid_rollout_ends_the_run_with_its_word(checkpoint, tmp_path):
    config = TrainConfig(str(checkpoint), dtype="float32", **{**SMALL, "rollout_max_response_len": 200, "n_samples_per_prompt": 8})

    class Killer:
        def phase(self, text, total=None):
            pass

        def note(self, text):
            pass

        def advance(self, count=1):
            os.kill(session.engine.pid, signal.SIGKILL)

    with pytest.raises(EngineDied, match=r"is gone(.|\n)*killed by signal 9"), Session(config, tmp_path / "logs") as session:
        pids = session.pool.pids()
        loop = Loop(config, session, generate(8), progress=Killer())
        loop.turn(0, train=True)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_trainer_that_dies_ends_the_run_and_the_engine(checkpoint, tmp_path):
    config = TrainConfig(str(checkpoint), dtype="float32", **SMALL)
    with pytest.raises(TrainerDied, match="trainer rank 0 of 1 was ended by SIGKILL"), Session(config, tmp_path / "logs") as session:
        engine = session.engine
        os.kill(session.pool.pids()[0], signal.SIGKILL)
        Loop(config, session, generate(8))
    assert not engine.alive()


def test_weights_that_are_not_finite_are_refused_and_the_engine_generates_no_more(checkpoint, tmp_path):
    config = TrainConfig(str(checkpoint), dtype="float32", **SMALL)
    with pytest.raises(EnginePoisoned), Session(config, tmp_path / "logs") as session:
        requests = requests_of_step(config, Text(checkpoint), [("p", generate(1)[0])], 0)
        assert len(session.client.generate(requests)) == 3
        session.pool.ranks.call("set_value", "embedding.word_embeddings.weight", 7, math.nan)
        with pytest.raises(TrainerFailed, match=r"embed_tokens.weight: 1 of \d+ values are NaN or infinite"):
            update_weights(config, session.pool, session.client, session.engine_address, 1, {})
        session.client.generate(requests)


def test_ranks_that_drifted_apart_send_nothing_that_is_loaded(checkpoint, tmp_path):
    """Rank 0 alone sends, so only the gather's own check can know that rank 1 trains another model."""
    config = TrainConfig(str(checkpoint), dtype="float32", **{**SMALL, "actor_num_gpus": 2})
    with pytest.raises(EnginePoisoned, match="the sender gave up: GatherError"), Session(config, tmp_path / "logs") as session:
        requests = requests_of_step(config, Text(checkpoint), [("p", generate(1)[0])], 0)
        first = update_weights(config, session.pool, session.client, session.engine_address, 1, {})
        assert first.trainer == first.engine and len(session.client.generate(requests)) == 3
        name = "decoder.layers.1.mlp.linear_fc1.weight"
        session.pool.ranks.call_each("flip_bit", [((name, rank), {}) for rank in range(2)])
        with pytest.raises(TrainerFailed, match=rf"{name}: rank 1 .* gathered other bits than rank 0"):
            update_weights(config, session.pool, session.client, session.engine_address, 2, {})
        session.client.generate(requests)
