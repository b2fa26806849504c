"""The trainer's ranks on tiny models: log-probabilities, one step, data parallel, recompute."""
from __future__ import annotations

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.rl.tiny import EOS, write_checkpoint
from vime.rl.batch import Trajectory
from vime.rl.config import TrainConfig
from vime.rl.pool import TrainerPool
from vime.rl.ranks import TrainerFailed
from vime.rl.seeds import kept_hash


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def trajectories(lengths=((5, 7), (3, 4), (11, 2), (8, 9))):
    out = []
    for i, (prompt, response) in enumerate(lengths):
        ids = [kept_hash("ids", i, j) % EOS for j in range(prompt + response)]
        out.append(Trajectory(f"r{i}", f"p{i}", 0, ids, prompt, np.zeros(response, np.float32), 0, advantage=(-1.0) ** i))
    return out


def config_of(checkpoint, **changes):
    return TrainConfig(str(checkpoint), **{"dtype": "float32", "lr": 1e-3, "timeout_s": 900.0, **changes})


def reference(checkpoint, batch):
    """Log-probabilities by unpatched transformers in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64, attn_implementation="eager")
    out = []
    for t in batch:
        with torch.no_grad():
            lp = model(torch.tensor([t.token_ids])).logits[0].log_softmax(-1)
        out.append(lp[range(t.prompt_len - 1, len(t.token_ids) - 1), t.response_ids].numpy())
    return out


@pytest.mark.parametrize("ops", [(), None], ids=["stock", "aligned"])
def test_logprobs_agree_with_transformers(checkpoint, ops):
    batch = trajectories()
    with TrainerPool(config_of(checkpoint, ops=ops)) as pool:
        mine = pool.logprobs(batch)
    for a, b in zip(mine, reference(checkpoint, batch), strict=True):
        assert a.dtype == np.float32 and a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_changes_every_weight_and_replays_its_logprobs(checkpoint, dtype):
    batch = trajectories()
    with TrainerPool(config_of(checkpoint, dtype=dtype)) as pool:
        before = pool.logprobs(batch)
        for t, lp in zip(batch, before, strict=True):
            t.old_logprobs = lp
        (stats,) = pool.train_step(batch)
        after = pool.logprobs(batch)
    assert stats.ratio_off == 0
    assert stats.tokens == 22
    assert stats.without_gradient == []
    assert stats.grad_norm > 0
    assert any(not np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_packing_ranks_and_recompute_do_not_change_logprobs(checkpoint):
    batch = trajectories()
    seen = []
    for changes in ({}, {"max_tokens_per_gpu": 20}, {"recompute": True}, {"actor_num_gpus": 2}):
        with TrainerPool(config_of(checkpoint, dtype="bfloat16", **changes)) as pool:
            before = pool.logprobs(batch)
            for t, lp in zip(batch, before, strict=True):
                t.old_logprobs = lp
            stats = pool.train_step(batch)
            assert sum(s.ratio_off for s in stats) == 0
            seen.append([np.concatenate(before).tobytes(), np.concatenate(pool.logprobs(batch)).tobytes()])
    assert all(one[0] == seen[0][0] for one in seen)
    assert seen[2][1] == seen[0][1], "recompute changed the update"


def test_a_gradient_that_is_not_finite_changes_nothing_and_names_the_parameter(checkpoint):
    batch = trajectories()
    with TrainerPool(config_of(checkpoint)) as pool, pytest.raises(TrainerFailed, match=r"is not finite .*nothing was updated") as error:
        for t, lp in zip(batch, pool.logprobs(batch), strict=True):
            t.old_logprobs = lp
        pool.ranks.call("set_value", "decoder.layers.0.mlp.linear_fc2.weight", 0, 3e38)
        pool.train_step(batch)
    assert error.value.kind == "TrainingDiverged"


def test_damaged_weights_are_refused_on_loading(tmp_path):
    folder = write_checkpoint(tmp_path / "damaged")
    state = load_file(folder / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TrainerFailed, match=r"failed in start: .*not finite") as error, TrainerPool(config_of(folder)) as pool:
        pool.wait_ready()
    assert "Traceback" not in str(error.value)
