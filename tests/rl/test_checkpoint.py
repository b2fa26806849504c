"""Checkpoints without an engine: the state of the ranks there and back, damaged folders, other runs."""
from __future__ import annotations

import hashlib
import json
import random
import shutil
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gates.synthetic import ensure
from tests.rl.test_trainer import config_of, trajectories
from tests.rl.tiny import write_checkpoint
from vime.rl import checkpoint, recipe, state
from vime.rl.pool import TrainerPool
from vime.rl.ranks import TrainerFailed

IDENTITY = {"topology": {"ranks": 1}, "recipe": {"lr": 0.1}, "versions": {"torch": "x"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def step(pool):
    batch = trajectories()
    for t, lp in zip(batch, pool.logprobs(batch), strict=True):
        t.old_logprobs = lp
    stats = pool.train_step(batch)
    return [s.grad_norm_bits for s in stats], pool.named_weights_digest(), pool.ranks.call("state_digests")


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"dtype": "bfloat16", "actor_num_gpus": 2, "balance_data": True},
                                     {"dtype": "bfloat16", "optimizer": "sgd", "lr": 0.1, "accumulate_allreduce_grads_in_fp32": False}],
                         ids=["fp32", "bf16-two-ranks-balanced", "bf16-stateless"])
def test_a_fresh_pool_goes_on_as_the_old_one(model, tmp_path, changes):
    config = config_of(model, **changes)
    with TrainerPool(config) as pool:
        step(pool)
        folder = checkpoint.save(tmp_path, 1, pool, IDENTITY, 1)
        expected = step(pool)
    found = checkpoint.find(tmp_path)
    assert (found.folder, found.steps, found.notes) == (folder, 1, [])
    with TrainerPool(config) as pool:
        pool.ranks.call("load_state", str(folder), found.state["digests"])
        pool.ranks.call("restore_rng", found.state["rng"])
        assert step(pool) == expected
    assert not list(folder.rglob("*.pt")) and not list(folder.rglob("*.pkl"))


def test_experts_over_ranks_go_on_as_they_were(tmp_path):
    """Each rank keeps its own experts and their moments; the folder of one is not taken for that of the other."""
    config = config_of(ensure("qwen3-moe-tiny", tmp_path / "profiles"), dtype="bfloat16", actor_num_gpus=2, expert_model_parallel_size=2)
    identity = {**IDENTITY, "topology": recipe.topology(config)}
    with TrainerPool(config) as pool:
        step(pool)
        folder = checkpoint.save(tmp_path / "ck", 1, pool, identity, 1)
        expected = step(pool)
    found = checkpoint.find(tmp_path / "ck")
    mine, theirs = found.state["digests"]
    experts = {n for n in mine if ".local_experts." in n and n.startswith("model.")}
    assert len(experts) > 20 and all(mine[n] != theirs[n] for n in experts)  # named alike, and others
    assert all(mine[n] == theirs[n] for n in mine if n.startswith("model.") and n not in experts)
    with TrainerPool(config) as pool:
        pool.ranks.call("load_state", str(folder), found.state["digests"])
        pool.ranks.call("restore_rng", found.state["rng"])
        assert step(pool) == expected
    for change in ({"expert_model_parallel_size": 1}, {"actor_num_gpus": 4}):
        other = {**identity, "topology": recipe.topology(config.replace(**change))}
        with pytest.raises(checkpoint.CheckpointRefused, match=r"is of another topology: (expert_parallel is 2 there, 1|ranks is 2 there, 4) here"):
            checkpoint.require(found, other, 5)
    folder.joinpath("rank-00000").rename(folder / "aside")
    folder.joinpath("rank-00001").rename(folder / "rank-00000")
    folder.joinpath("aside").rename(folder / "rank-00001")
    with pytest.raises(checkpoint.CheckpointRefused, match="of rank 0 has other bits than were written"):
        checkpoint.find(tmp_path / "ck")


def test_a_state_that_is_not_what_was_written_is_refused(model, tmp_path):
    config = config_of(model)
    with TrainerPool(config) as pool:
        step(pool)
        folder = checkpoint.save(tmp_path / "ck", 1, pool, IDENTITY, 1)
    digests = json.loads((folder / "state.json").read_text().split("\n")[1])["digests"]
    for name in ("optimizer.state.0.exp_avg", "optimizer.json"):
        changed = [{**digests[0], name: "xxh3:00"}]
        with TrainerPool(config) as pool, pytest.raises(TrainerFailed, match=rf"{name} differs; the run cannot be continued"):
            pool.ranks.call("load_state", str(folder), changed)
    other = write_checkpoint(tmp_path / "other", layers=1)
    with TrainerPool(config_of(other)) as pool, pytest.raises(TrainerFailed, match=r"is of another model: model.decoder.layers.1"):
        pool.ranks.call("load_state", str(folder), digests)
    damage(tmp_path, folder)


def reseal(folder, **changes):
    """Change the state of a checkpoint by hand, its checksum included."""
    body = json.loads((folder / "state.json").read_text().split("\n")[1])
    text = json.dumps({k: v for k, v in {**body, **changes}.items() if v is not ...})
    (folder / "state.json").write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest()}) + "\n" + text + "\n")


def damage(tmp_path, whole):
    """Every way in which a newer checkpoint can be damaged leads to the one before, by name."""
    root = whole.parent
    newer = root / "step-000002"

    def fresh():
        shutil.rmtree(newer, ignore_errors=True)
        shutil.copytree(whole, newer)
        reseal(newer, steps=2)
        return newer / "rank-00000" / "model.safetensors"

    data = fresh().read_bytes()
    digests = json.loads((whole / "state.json").read_text().split("\n")[1])["digests"][0]
    settings = (whole / "rank-00000" / "optimizer.json").read_text()
    edited = settings.replace('"lr"], {"v": ', '"lr"], {"v": 1', 1)
    assert edited != settings
    cases = {
        "cut": lambda file: file.write_bytes(data[:-100]),
        "other bits": lambda file: file.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]),
        "gone": lambda file: file.unlink(),
        "optimizer gone": lambda file: (file.parent / "optimizer.json").unlink(),
        "optimizer edited": lambda file: (file.parent / "optimizer.json").write_text(edited),
        "optimizer of an earlier version": lambda file: reseal(newer, steps=2, digests=[{n: d for n, d in digests.items() if n != "optimizer.json"}]),
        "state cut": lambda file: (newer / "state.json").write_text((newer / "state.json").read_text()[:-40]),
        "state changed": lambda file: (newer / "state.json").write_text((newer / "state.json").read_text().replace('"steps": 2', '"steps": 9')),
        "state gone": lambda file: (newer / "state.json").unlink(),
    }
    fresh()
    assert checkpoint.find(root).folder == newer
    for name, damaged in cases.items():
        damaged(fresh())
        found = checkpoint.find(root)
        assert found.folder == whole, name
        assert len(found.notes) == 1 and found.notes[0].startswith("step-000002 is not whole: "), name
    shutil.rmtree(whole)
    with pytest.raises(checkpoint.CheckpointRefused, match=r"no checkpoint in .* is whole: step-000002 is not whole"):
        checkpoint.find(root)
    assert checkpoint.find(tmp_path / "nowhere") is None


@pytest.mark.parametrize(("change", "said"), [
    ({"topology": {"ranks": 2}}, r"is of another topology: ranks is 1 there, 2 here; go on with the topology that wrote it"),
    ({"recipe": {"lr": 0.2}}, r"is of another recipe: lr is 0.1 there, 0.2 here"),
    ({"recipe": {"lr": 0.1, "model": "m"}}, r"another recipe: model is None there, 'm' here")])
def test_a_checkpoint_of_another_run_is_refused(tmp_path, change, said):
    found = checkpoint.Found(tmp_path, {"steps": 2, **IDENTITY}, [])
    assert checkpoint.require(found, IDENTITY, 5) == []
    with pytest.raises(checkpoint.CheckpointRefused, match=said):
        checkpoint.require(found, {**IDENTITY, **change}, 5)
    with pytest.raises(checkpoint.CheckpointRefused, match=r"is after 2 steps, and --num-rollout is 1"):
        checkpoint.require(found, IDENTITY, 1)
    (note,) = checkpoint.require(found, {**IDENTITY, "versions": {"torch": "y"}}, 5)
    assert "across versions (torch x there, y here)" in note


class FakePool:
    """Ranks without tensors: what is left are the files of the controller."""

    ranks = types.SimpleNamespace(call=lambda method, *args: [{"rng": {}, "digests": {}}])


@pytest.mark.parametrize("changes", [
    *({f: v} for f in ("steps", "weight_version") for v in (..., None, "x", -1, True)), {"steps": 3}, {"digests": ...}, {"digests": None},
    {"digests": [5]}, {"digests": []}, {"rng": ...}, {"rng": []}, {"recipe": [1]}, {"topology": "x"}, {"schema": 2}])
def test_a_state_of_another_form_is_passed_over(tmp_path, changes):
    for steps in (1, 2):
        checkpoint.save(tmp_path, steps, FakePool, IDENTITY, 1)
    assert checkpoint.find(tmp_path).steps == 2
    reseal(tmp_path / "step-000002", **changes)
    found = checkpoint.find(tmp_path)
    assert found.steps == 1 and found.notes[0].startswith("step-000002 is not whole: "), found.notes


@pytest.mark.parametrize("text", ["[1]", "5", "[" * 100_000 + "]" * 100_000])
def test_a_state_that_is_no_object_is_passed_over(tmp_path, text):
    for steps in (1, 2):
        checkpoint.save(tmp_path, steps, FakePool, IDENTITY, 1)
    (tmp_path / "step-000002" / "state.json").write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest()}) + f"\n{text}\n")
    assert checkpoint.find(tmp_path).steps == 1


def test_a_copy_under_a_later_name_is_not_newer(tmp_path):
    for steps in (999_999, 1_000_000):  # and more digits are more steps
        checkpoint.save(tmp_path, steps, FakePool, IDENTITY, 1)
    shutil.copytree(tmp_path / "step-999999", tmp_path / "step-1000009")
    found = checkpoint.find(tmp_path)
    assert found.steps == 1_000_000 and "under the name of another" in found.notes[0]


def test_killed_before_the_rename_the_one_before_is_used(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, FakePool, IDENTITY, 1)

    class Killed(BaseException):
        pass

    def killed(*args):
        raise Killed

    monkeypatch.setattr(checkpoint.os, "rename", killed)
    with pytest.raises(Killed):
        checkpoint.save(tmp_path, 2, FakePool, IDENTITY, 2)
    monkeypatch.undo()
    found = checkpoint.find(tmp_path)
    assert found.steps == 1 and found.notes == [".step-000002.part was not finished (the run was killed while writing it)"]
    checkpoint.save(tmp_path, 2, FakePool, IDENTITY, 2)
    found = checkpoint.find(tmp_path)
    assert (found.steps, found.notes) == (2, []) and found.state["weight_version"] == 2


def test_a_full_disk_leaves_the_one_before(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, FakePool, IDENTITY, 1)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(checkpoint.CheckpointNotWritten, match=r"no checkpoint of step 2 in .*No space left on device. The one before is untouched"):
        checkpoint.save(tmp_path, 2, FakePool, IDENTITY, 2)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_another_run_is_not_written_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for load, save in (("", "ck"), ("ck", "ck"), ("", "")):
        checkpoint.require_free(load, save)
    folder = checkpoint.save("ck", 2, FakePool, IDENTITY, 1)
    (tmp_path / "ck" / ".step-000003.part").mkdir()
    for load in ("", "other"):
        with pytest.raises(checkpoint.CheckpointExists, match=r"--save ck holds checkpoints of another run \(the newest is step-000002\); "
                                                              r"choose another --save, or go on with it \(--load ck\)"):
            checkpoint.require_free(load, "ck")
    (tmp_path / "link").symlink_to("ck")
    for load in ("ck", "./ck/", "link", str(tmp_path / "ck")):
        checkpoint.require_free(load, "ck")
    before = (folder / "state.json").read_bytes()
    with pytest.raises(checkpoint.CheckpointNotWritten, match=r"step-000002 is there and whole, so another run wrote it"):
        checkpoint.save("ck", 2, FakePool, {**IDENTITY, "recipe": {"lr": 0.2}}, 5)
    assert (folder / "state.json").read_bytes() == before


def test_a_damaged_newest_one_is_replaced_when_its_steps_are_done_again(tmp_path):
    for steps in (1, 2):
        checkpoint.save(tmp_path, steps, FakePool, IDENTITY, steps)
    (tmp_path / "step-000002" / "state.json").write_text("{")
    checkpoint.require_free(str(tmp_path), str(tmp_path))
    assert checkpoint.find(tmp_path).steps == 1
    checkpoint.save(tmp_path, 2, FakePool, IDENTITY, 7)
    found = checkpoint.find(tmp_path)
    assert (found.steps, found.notes, found.state["weight_version"]) == (2, [], 7)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000002"]


_LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-2**40, 2**40), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=4),
                    st.integers(0, 5).map(lambda n: torch.arange(n, dtype=torch.float32)))
_TREES = st.recursive(_LEAVES, lambda x: st.one_of(st.lists(x, max_size=3), st.tuples(x, x),
                                                   st.dictionaries(st.one_of(st.integers(0, 9), st.text(max_size=3)), x, max_size=3)),
                      max_leaves=12)


@settings(max_examples=150, deadline=None)
@given(_TREES)
def test_a_tree_comes_back_through_json_as_it_was(tree):
    try:
        skeleton, tensors = state.flatten(tree)
    except state.StateError as error:  # keys that read alike: refused, so that neither overwrites the other
        assert "both called" in str(error)
        return
    back = state.unflatten(json.loads(json.dumps(skeleton)), tensors)

    def same(a, b):
        if isinstance(a, torch.Tensor):
            return torch.equal(a, b)
        if isinstance(a, dict):
            return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
        if isinstance(a, list | tuple):
            return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
        return type(a) is type(b) and a == b

    assert same(tree, back)


def test_what_cannot_be_kept_is_refused_by_its_path():
    with pytest.raises(state.StateError, match=r"state.0.hook is a function"):
        state.flatten({"state": {0: {"hook": test_what_cannot_be_kept_is_refused_by_its_path}}})


def test_every_generator_goes_on_where_it_was():
    before = state.rng_state()
    first = random.random(), np.random.rand(), torch.rand(1).item(), random.gauss(0, 1), np.random.randn()
    moved = state.rng_digests()
    state.set_rng_state(json.loads(json.dumps(before)))
    assert (random.random(), np.random.rand(), torch.rand(1).item(), random.gauss(0, 1), np.random.randn()) == first
    assert state.rng_digests() == moved
    with pytest.raises(state.StateError, match="has the random states"):
        state.set_rng_state({**before, "cuda": "00"})


def test_a_rank_that_cannot_write_leaves_nothing_of_that_checkpoint(tmp_path):
    class Full:
        """A pool whose rank reports a full disk after it has begun."""

        ranks = property(lambda self: self)

        def call(self, method, folder):
            (tmp_path / folder / "rank-00000").mkdir()
            raise TrainerFailed("trainer rank 0 of 1 failed in save_state: No space left on device", "CannotWrite")

    with pytest.raises(TrainerFailed, match="No space left"):
        checkpoint.save(tmp_path / "root", 1, Full(), IDENTITY, 1)
    assert list((tmp_path / "root").iterdir()) == []
