"""Experts over real ranks: the spread shows in no bit, an idle rank takes part, a dead one is named."""
from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

from gates.synthetic import ensure
from vime.rl.batch import Trajectory
from vime.rl.config import ConfigError, TrainConfig
from vime.rl.pool import TrainerPool
from vime.rl.ranks import TrainerDied, TrainerFailed
from vime.rl.seeds import kept_hash

RANKS = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return ensure("qwen3-moe-tiny", tmp_path_factory.mktemp("profiles"))


def trajectories(copies=1):
    """Three sequences for four ranks: one rank has none at all. Six, in microbatches of 20 tokens: some have two, some one."""
    out = []
    for i, (prompt, response) in enumerate(((5, 7), (13, 4), (11, 9)) * copies):
        ids = [kept_hash("ids", i, j) % 510 for j in range(prompt + response)]
        out.append(Trajectory(f"r{i}", f"p{i}", 0, ids, prompt, np.zeros(response, np.float32), 0, advantage=(-1.0) ** i))
    return out


def config_of(checkpoint, **changes):
    return TrainConfig(str(checkpoint), **{"dtype": "bfloat16", "lr": 1e-3, "timeout_s": 300.0, "actor_num_gpus": RANKS,
                                           "recompute": True, **changes})


def digests(pool, copies=1):
    """Log-probabilities, reduced gradients, gradient norm and new weights of one step from the checkpoint."""
    batch = trajectories(copies)
    found = {f"logprobs {t.request_id}": lp.tobytes() for t, lp in zip(batch, pool.logprobs(batch), strict=True)}
    for t in batch:
        t.old_logprobs = np.frombuffer(found[f"logprobs {t.request_id}"], np.float32)
    stats = pool.train_step(batch)
    assert sum(s.ratio_off for s in stats) == 0 and len({s.grad_norm_bits for s in stats}) == 1
    found["norm"] = stats[0].grad_norm_bits
    for part in pool.ranks.call("gradient_digests"):
        for name, digest in part.items():
            assert found.setdefault(f"gradient {name}", digest) == digest
    return found | {f"weight {name}": digest for name, digest in pool.named_weights_digest().items()}


@pytest.mark.timeout(600)
def test_the_spread_shows_in_no_bit_and_a_lost_rank_is_named(checkpoint):
    with TrainerPool(config_of(checkpoint)) as pool:
        alone = digests(pool)
        assert {name.split()[0] for name in alone} == {"logprobs", "gradient", "norm", "weight"} and len(alone) > 300
        for spread in (2, 4):
            pool.ranks.call("respread", spread)
            found = digests(pool)
            assert {name for name in alone.keys() | found.keys() if alone.get(name) != found.get(name)} == set()
        recorded = pool.record_layers(trajectories())
        assert [len(r.token_T) for r in recorded] == [12, 17, 20, 0]
        # the comparison can fail, where it was planted: one expert on another rank
        pool.ranks.call("respread", 4)
        pool.ranks.call("plant", "one expert swapped between ranks", 2)
        faulty = digests(pool)
        assert any(faulty[name] != alone[name] for name in alone if name.startswith("logprobs"))
        # a rank that stops while the others wait for its rows: named, and not those that wait
        os.kill(pool.pids()[1], signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(TrainerDied, match=r"trainer rank 1 of 4 did not answer logprobs within \d+ s while rank 0, 2, 3 waited"):
            pool.ranks.call_each("logprobs", [((trajectories(),), {})] * RANKS, stall_s=12.0)  # the pool itself waits for 45
        assert time.monotonic() - started < 30
    # bf16 gradients and a stateless update; at EP 4 a step of one microbatch keeps no partial sums, one of two does
    with TrainerPool(config_of(checkpoint, expert_model_parallel_size=RANKS, optimizer="sgd", lr=0.5, max_tokens_per_gpu=20,
                               accumulate_allreduce_grads_in_fp32=False)) as pool:
        start = pool.named_weights_digest()
        found = {}
        for spread in (4, 1, 2, 4):
            for copies in (1, 2):
                pool.ranks.call("respread", spread)
                found[spread, copies] = digests(pool, copies)
                truth = found[4, copies]
                assert {name for name in truth if truth[name] != found[spread, copies].get(name)} == set(), (spread, copies)
        changed = sum(found[4, 1][f"weight {name}"] != digest for name, digest in start.items())
        assert changed > 0.9 * len(start)
        assert alone["norm"] != found[4, 1]["norm"]  # rounding to bf16 shows
        # a rank that dies while the others wait for its rows
        os.kill(pool.pids()[2], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(TrainerDied, match="trainer rank 2 of 4 was ended by SIGKILL"):
            pool.logprobs(trajectories())
        assert time.monotonic() - started < 60


def test_experts_that_do_not_divide_are_told_by_the_rank(checkpoint):
    with pytest.raises(ConfigError, match=r"--expert-model-parallel-size is 3; expected a divisor of --actor-num-gpus \(4\)"):
        config_of(checkpoint, expert_model_parallel_size=3)
    with pytest.raises(TrainerFailed, match="16 experts can't be spread evenly over 3 ranks"), \
            TrainerPool(config_of(checkpoint, actor_num_gpus=3, expert_model_parallel_size=3)) as pool:
        pool.wait_ready()
