"""Seeds, advantages, packing, the loss: the pieces of a step that need no framework."""
from __future__ import annotations

import itertools
import math
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.rl.advantage import grpo_advantages, varied_groups
from vime.rl.config import ConfigError, TrainConfig
from vime.rl.loss import policy_loss
from vime.rl.packing import SequenceTooLong, plan_microbatches, split_among
from vime.rl.seeds import kept_hash, sample_seed

REWARDS = st.lists(st.lists(st.floats(-5, 5), min_size=2, max_size=6), min_size=1, max_size=4)


def test_the_hash_is_kept():
    """These numbers are part of every recorded run: a change of the hash changes every sample."""
    assert kept_hash("a", 1) == 5246347778848157771
    assert sample_seed(1234, "e0-made-0-0", 0) == 7173396832095386721


@pytest.mark.parametrize("needed", [False, True])
def test_what_an_engine_holds_is_nothing_only_where_it_is_packed_and_no_check_was_asked(needed):
    """A poisoned engine's refusal is no such case: training would go on against weights that nobody knows."""
    from vime.rl.sync import _held
    from vime.vllm.protocol import EngineError, EnginePoisoned

    def client(error):
        def weights_digest():
            raise error

        return types.SimpleNamespace(weights_digest=weights_digest)

    with pytest.raises(EnginePoisoned):
        _held(client(EnginePoisoned("a stale form")), needed)
    if needed:
        with pytest.raises(EngineError):
            _held(client(EngineError("packed")), needed)
    else:
        assert _held(client(EngineError("packed")), needed) == {}


def test_seeds_are_the_same_in_another_process():
    code = "from vime.rl.seeds import sample_seed; print([sample_seed(1, f'p{i}', j) for i in range(9) for j in range(9)])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"})
    seeds = [sample_seed(1, f"p{i}", j) for i in range(9) for j in range(9)]
    assert eval(out.stdout) == seeds
    assert len(set(seeds)) == 81 and all(0 <= s < 2**63 for s in seeds)


@given(st.lists(st.integers(0, 9) | st.text("ab1", max_size=3), max_size=4), st.lists(st.integers(0, 9) | st.text("ab1", max_size=3), max_size=4))
def test_different_parts_have_different_hashes(a, b):
    assert (kept_hash(*a) == kept_hash(*b)) == (a == b)


@given(REWARDS)
def test_advantages_are_centred_scaled_and_keep_the_order(rewards):
    for group, advantages in zip(rewards, grpo_advantages(rewards), strict=True):
        assert abs(math.fsum(advantages)) < 1e-6 * len(group)
        assert all(abs(a) <= math.sqrt(len(group)) + 1e-9 for a in advantages)
        for (r1, a1) in zip(group, advantages, strict=True):
            for (r2, a2) in zip(group, advantages, strict=True):
                assert not (r1 > r2 and a1 < a2)


@given(REWARDS, st.randoms(use_true_random=False))
def test_a_groups_advantages_do_not_depend_on_its_order_or_its_neighbours(rewards, random):
    alone = [grpo_advantages([group])[0] for group in rewards]
    assert grpo_advantages(rewards) == alone
    for group in rewards:
        order = list(range(len(group)))
        random.shuffle(order)
        (straight,), (shuffled,) = grpo_advantages([group]), grpo_advantages([[group[i] for i in order]])
        assert [straight[i] for i in order] == shuffled


def test_equal_rewards_teach_nothing():
    assert grpo_advantages([[0.1, 0.1, 0.1], [0.0, 1.0]])[0] == [0.0, 0.0, 0.0]
    assert varied_groups([[0.1, 0.1, 0.1], [0.0, 1.0]]) == 1


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(40, 100))
def test_microbatches_hold_everything_once_within_the_budget(lengths, budget):
    plan = plan_microbatches(lengths, budget)
    assert [i for batch in plan for i in batch] == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in batch) <= budget for batch in plan)
    for batch, later in itertools.pairwise(plan):  # no batch is left that the next sequence would have fitted into
        assert sum(lengths[i] for i in batch) + lengths[later[0]] > budget


def test_a_sequence_that_never_fits_is_told():
    with pytest.raises(SequenceTooLong, match=r"sequence 1 has 11 tokens, more than the 10 .*--max-tokens-per-gpu"):
        plan_microbatches([3, 11], 10)


@given(st.integers(0, 50), st.integers(1, 9))
def test_shares_are_runs_that_differ_by_at_most_one(count, parts):
    shares = split_among(count, parts)
    assert len(shares) == parts and [i for s in shares for i in s] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def ppo(logprob, old, advantage, total, low, high):
    """The same equation in float64, element by element."""
    out = 0.0
    for lp, o, a in zip(logprob, old, advantage, strict=True):
        ratio = math.exp(lp - o)
        out -= min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
    return out / total


def test_loss_and_its_gradient_agree_with_the_equation():
    rng = np.random.default_rng(0)
    logprob, old = rng.normal(-2, 0.5, 64), rng.normal(-2, 0.5, 64)
    advantage = rng.normal(0, 1, 64)
    x = torch.tensor(logprob, dtype=torch.float32, requires_grad=True)
    loss = policy_loss(x, torch.tensor(old, dtype=torch.float32), torch.tensor(advantage, dtype=torch.float32), 100, 0.2, 0.28)
    assert float(loss.detach()) == pytest.approx(ppo(logprob, old, advantage, 100, 0.2, 0.28), rel=1e-5)
    loss.backward()
    step = 1e-6
    for i in range(0, 64, 7):
        up, down = logprob.copy(), logprob.copy()
        up[i] += step
        down[i] -= step
        slope = (ppo(up, old, advantage, 100, 0.2, 0.28) - ppo(down, old, advantage, 100, 0.2, 0.28)) / (2 * step)
        assert float(x.grad[i]) == pytest.approx(slope, rel=1e-3, abs=1e-9)


def test_on_policy_the_gradient_is_minus_the_advantage():
    x = torch.full((5,), -1.5, requires_grad=True)
    advantage = torch.tensor([1.0, -2.0, 0.0, 0.5, 3.0])
    policy_loss(x, x.detach(), advantage, 5, 0.2, 0.28).backward()
    assert torch.equal(x.grad, -advantage / 5)


def test_an_update_goes_to_every_rank_of_an_engine(tmp_path):
    """All addresses in one update; an engine of one process has one address."""
    from vime.rl.sync import update_weights

    sent = []

    class Pool:
        def send_weights(self, endpoints, version):
            sent.append(([endpoint.url for endpoint in endpoints], version))
            return {"version": version}

        def named_weights_digest(self):
            return {"a": "1"}

    class One:
        def weights_digest(self):
            return {"tensors": [{"name": "a", "digest": "1"}]}

    class Ranks(One):
        addresses = (("http://r0", None), ("http://r1", None))

    config = TrainConfig(hf_checkpoint=str(tmp_path))
    for client, urls in ((One(), ["http://one"]), (Ranks(), ["http://r0", "http://r1"])):
        sent.clear()
        done = update_weights(config, Pool(), client, ("http://one", None), 3, {})
        assert sent == [(urls, 3)] and done.trainer == done.engine


def test_the_engine_sleeps_while_the_trainer_is_alone(tmp_path):
    from vime.rl.session import Session

    calls = []
    client = types.SimpleNamespace(sleep=lambda: calls.append("sleep"), wake=lambda: calls.append("wake"))
    for asked in (True, False):
        session = Session(types.SimpleNamespace(offload_rollout=asked), tmp_path)
        session.client = client
        with pytest.raises(KeyError), session.trainer_alone():
            with session.trainer_alone():  # inside another: it stays asleep
                calls.append("step")
            calls.append("more")
            raise KeyError
        assert calls == (["sleep", "step", "more", "wake"] if asked else ["step", "more"])
        calls.clear()
    for changes in ({"device": "cpu"}, {"device": "cuda", "engine_url": "http://somewhere"}):
        with pytest.raises(ConfigError, match=r"--offload-rollout is True; expected no --offload-rollout"):
            TrainConfig("m", offload_rollout=True, **changes)
    assert TrainConfig("m", offload_rollout=True, device="cuda").offload_rollout


def test_memory_counts_what_the_optimizer_keeps():
    from vime.rl.memory import needed_bytes, parameters

    hf = {"hidden_size": 512, "num_hidden_layers": 8, "vocab_size": 32000, "num_attention_heads": 8, "num_key_value_heads": 2,
          "intermediate_size": 2048, "tie_word_embeddings": True}

    def per_weight(**changes):  # bytes beside what every run takes, over the weights alone
        return (needed_bytes(TrainConfig("m", **changes), hf)["trainer"] - fixed) / parameters(hf)

    fixed = needed_bytes(TrainConfig("m", optimizer="sgd", accumulate_allreduce_grads_in_fp32=False), hf)["trainer"] - 4 * parameters(hf)
    assert per_weight(optimizer="sgd", accumulate_allreduce_grads_in_fp32=False) == 4  # weight and gradient
    assert per_weight(optimizer="sgd") == 6
    assert per_weight() == 18  # and fp32 master and two moments
