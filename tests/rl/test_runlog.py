"""What the ledger writes: one changed bit changes the digest of its quantity and of no other, and is named by its part."""
from __future__ import annotations

import copy
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment import runlog, runs
from alignment.runlog import QUANTITIES
from vime.rl.batch import Trajectory
from vime.rl.runlog import RunLog

FACTS = {"topology": {"ranks": 1}, "recipe": {"lr": 1}, "versions": {"v": 1}, "hardware": {"cpu": "x"}, "conditions": {}, "resumed_from": None}


def material():
    """One step of two prompts and two samples each, as the loop hands it to the ledger."""
    batch = [Trajectory(f"s0/p{p}/{s}", f"p{p}", s, [1 + p, 2, 3, 4 + s, 5], 3, np.array([-1.5, -0.25], np.float32), 0, seed=7 + 2 * p + s,
                        reward=0.5 * s, advantage=s - 0.5) for p in range(2) for s in range(2)]
    stats = types.SimpleNamespace(loss=0.125, grad_norm=2.0, grad_norm_bits="4000000000000000", gradients={"w": "xxh3:1", "v": "xxh3:2"},
                                  composition=[["s0/p0/0", "s0/p0/1"], ["s0/p1/0", "s0/p1/1"]], digest_s=0.0)
    update = types.SimpleNamespace(trainer={"w": "a", "v": "b"}, engine={"w": "a", "v": "b"})
    states = [{"optimizer": {"m": "xxh3:3", "": "xxh3:4"}, "rng": {"torch": "xxh3:5", "python": "xxh3:6"}}]
    return types.SimpleNamespace(prompts=[("p0", None), ("p1", None)], batch=batch, logprobs=[t.rollout_logprobs.copy() for t in batch],
                                 stats=[stats], update=update, states=states)


def write(folder, m):
    log = RunLog(str(folder))
    log.start(FACTS)
    log.begin_step()
    log.rollout(m.prompts, m.batch)
    log.scored(m.batch, m.logprobs)
    log.trained(m.stats, m.update, m.states)
    log.end_step(0, True, {"reward": 0.5, "loss": float("nan")}, {"engine": ["k"]}, 1)
    log.end(1, "PASS", "")
    log.close()
    return folder


def next_float(array, at):
    array[at] = np.nextafter(array[at], np.float32(0))


CHANGES = {
    "seeds": lambda m: setattr(m.batch[1], "seed", 99), "sampled_tokens": lambda m: m.batch[2].token_ids.__setitem__(4, 6),
    "rollout_logprobs": lambda m: next_float(m.batch[3].rollout_logprobs, 1), "train_logprobs": lambda m: next_float(m.logprobs[0], 0),
    "rewards": lambda m: setattr(m.batch[1], "reward", np.nextafter(0.5, 0)), "advantages": lambda m: setattr(m.batch[0], "advantage", -0.50001),
    "batch_composition": lambda m: m.stats[0].composition[1].reverse(), "loss": lambda m: setattr(m.stats[0], "loss", np.nextafter(0.125, 0)),
    "gradients": lambda m: m.stats[0].gradients.__setitem__("v", "xxh3:9"), "grad_norm": lambda m: setattr(m.stats[0], "grad_norm_bits", "4000000000000001"),
    "optimizer": lambda m: m.states[0]["optimizer"].__setitem__("m", "xxh3:9"),
    "engine_weights": lambda m: m.update.engine.__setitem__("v", "c"), "rng": lambda m: m.states[0]["rng"].__setitem__("python", "xxh3:9"),
    "prompts": lambda m: m.prompts.reverse(),
    "weights": lambda m: (m.update.trainer.__setitem__("w", "c"), m.update.engine.__setitem__("w", "c")),
}
#: The part that is named, where the quantity has parts.
PARTS = {"seeds": "s0/p0/1", "sampled_tokens": "s0/p1/0", "rollout_logprobs": "s0/p1/1", "train_logprobs": "s0/p0/0", "rewards": "s0/p0/1",
         "advantages": "s0/p0/0", "batch_composition": "rank 0, microbatch 1", "gradients": "v", "optimizer": "m", "weights": "w",
         "engine_weights": "v", "rng": "python"}


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_one_change_is_found_in_its_quantity_and_part_and_in_no_other(tmp_path, quantity):
    changed = copy.deepcopy(material())
    CHANGES[quantity](changed)
    verdict = runs.compare(write(tmp_path / "a", material()), write(tmp_path / "b", changed))
    expected = {"weights": ["weights", "engine_weights"]}.get(quantity, [quantity])
    step = next(c for c in verdict.children if c.name == "step 0")
    assert step.info["differing"] == expected
    place = verdict.first_bad
    assert place.stage == quantity
    if quantity in PARTS:
        assert PARTS[quantity] in (place.request, place.tensor, place.module)


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(4)))
def test_the_order_in_which_samples_are_held_is_no_quantity_but_that_of_the_batch(tmp_path_factory, order):
    m = material()
    m.batch, m.logprobs = [m.batch[i] for i in order], [m.logprobs[i] for i in order]
    folder = tmp_path_factory.mktemp("order")
    a, b = (runlog.read(write(folder / name, x)).steps[0]["digests"] for name, x in (("a", material()), ("b", m)))
    assert a == b


def test_a_line_holds_every_quantity_and_what_it_cost(tmp_path):
    read = runlog.read(write(tmp_path, material()))
    assert read.problems == [] and set(read.steps[0]["digests"]) == set(QUANTITIES)
    assert 0 < read.steps[0]["cost"]["ledger_s"] <= read.steps[0]["cost"]["step_s"] and 0 < read.end["cost"]["share"] <= 1
    assert read.steps[0]["metrics"]["loss"] == "nan"  # strict JSON has no NaN


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("", material())
    assert list(tmp_path.iterdir()) == []
