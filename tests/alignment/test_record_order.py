"""The first bad place of a run of several ranks does not depend on the order in which their files are read."""
from __future__ import annotations

import pytest
import torch

from alignment import RecordWriter, Status
from alignment.compare import compare_runs
from alignment.places import by_layer


def run(path, owners, bad=(), kind="layer", step=0):
    """``owners``: the layers of each pipeline rank, in the order in which it computes them."""
    for r, layers in enumerate(owners):
        with RecordWriter(path, rank={"pp": r}, world=len(owners)) as w:
            for n in layers:
                value = torch.arange(12.0).reshape(3, 4) * (n + 1) + (n in bad)
                extra = {"request": "r", "tokens": [1, 2, 3]} if kind == "layer" else {}
                w.add(kind, f"model.layers.{n}.mlp.weight" if kind == "weight" else f"layers.{n}.output", value, step=step, **extra)
    return path


OWNERS = {"12 stages": [[n] for n in range(12)], "interleaved": [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]}


@pytest.mark.parametrize("kind", ["layer", "weight"])
@pytest.mark.parametrize("owners", OWNERS.values(), ids=OWNERS)
def test_the_first_layer_is_first(tmp_path, owners, kind):
    a, b = run(tmp_path / "a", owners, kind=kind), run(tmp_path / "b", owners, bad=(2, 9, 10), kind=kind)
    one = run(tmp_path / "one", [list(range(12))], kind=kind)
    for pair in ((a, b), (b, a), (one, b), (b, one)):
        v = compare_runs(*pair)
        assert v.status is Status.FAIL and v.first_bad.layer == 2 and [p.layer for p in v.downstream] == [9, 10]
    assert compare_runs(a, one).status is Status.PASS


def test_stacks_of_layers_stay_apart():
    names = ["embed", "vision.layers.1.x", "vision.layers.0.x", "layers.10.x", "layers.2.x", "layers.2.y", "norm"]
    assert by_layer(names) == ["embed", "vision.layers.0.x", "vision.layers.1.x", "layers.2.x", "layers.2.y", "layers.10.x", "norm"]


def test_a_step_that_one_side_lacks_is_named_alike_in_both_directions(tmp_path):
    for name, steps in (("a", 3), ("b", 2)):
        with RecordWriter(tmp_path / name) as w:
            for s in range(steps):
                w.add("logprobs", "logprobs", -torch.arange(1.0, 4), request="r", tokens=[1, 2, 3], step=s)
    for pair, side in ((("a", "b"), "b"), (("b", "a"), "a")):
        v = compare_runs(tmp_path / pair[0], tmp_path / pair[1])
        assert v.status is Status.INVALID and (v.first_bad.step, v.first_bad.request) == (2, "r")
        assert f"missing on side {side}" in v.reason and v.coverage["requests"].expected == 3
