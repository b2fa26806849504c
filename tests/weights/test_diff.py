"""Two folders: what leads the verdict, and why."""
from __future__ import annotations

import pytest

from alignment.verdict import Status
from tests.weights.tiny import load, write
from vime.weights.diff import diff


@pytest.fixture
def other(checkpoint, tmp_path):
    """``other(change)``: the qwen3 checkpoint with its tensors changed."""
    def make(change):
        state, cfg = load(checkpoint("qwen3"))
        change(state)
        return write(tmp_path / "hf", state, cfg)

    return make


@pytest.mark.parametrize(("old", "new"), [("model.norm.weight", "model.final_norm.weight"), ("model.embed_tokens.weight", "a.embed_tokens.weight"),
                                          ("model.layers.2.mlp.up_proj.weight", "model.layers.2.mlp.up.weight")])
def test_a_renamed_tensor_is_called_that(checkpoint, other, old, new):
    folder = other(lambda state: state.update({new: state.pop(old)}))
    for a, b in ((checkpoint("qwen3"), folder), (folder, checkpoint("qwen3"))):
        verdict = diff(a, b)
        assert verdict.status is Status.INVALID and verdict.first_bad.tensor in (old, new)
        assert verdict.causes[0].kind == "renamed" and {old, new} == {verdict.causes[0].evidence[k] for k in ("name", "as")}


def test_a_lost_tensor_is_no_renamed_one(checkpoint, other):
    verdict = diff(checkpoint("qwen3"), other(lambda state: state.pop("model.norm.weight")))
    assert verdict.status is Status.INVALID and verdict.first_bad.tensor == "model.norm.weight" and verdict.causes == []
    assert "1 lost: model.norm.weight" in verdict.reason


def test_a_difference_leads_before_a_lost_name(checkpoint, other):
    def change(state):
        del state["model.norm.weight"]
        state["model.layers.1.mlp.up_proj.weight"] += 1

    verdict = diff(checkpoint("qwen3"), other(change))
    assert verdict.status is Status.FAIL and verdict.first_bad.tensor == "model.layers.1.mlp.up_proj.weight"


def test_a_folder_against_itself_compares_nothing(checkpoint, tmp_path):
    folder = checkpoint("qwen3")
    link, links, hard = tmp_path / "link", tmp_path / "links", tmp_path / "hard"
    link.symlink_to(folder)
    links.mkdir()
    hard.mkdir()
    for path in folder.iterdir():
        (links / path.name).symlink_to(path)
        (hard / path.name).hardlink_to(path)
    for other in (folder, link, links, hard):
        verdict = diff(folder, other)
        assert verdict.status is Status.NOT_RUN and "one and the same" in verdict.reason
        assert not any(c.compared for c in verdict.coverage.values())
