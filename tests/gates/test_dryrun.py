"""The dry run: what is refused before a node with GPUs is taken, and that it names the place."""
from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from alignment.verdict import Status
from gates import dryrun
from gates.profiles import PROFILES
from gates.synthetic import config_of
from vime.cli import app
from vime.commands.gate import GateUnusable

FULL = PROFILES["glm5.2-6layer"]


def part(verdict, name):
    return next(c for c in verdict.children if c.name == name)


def test_a_dense_model_fits_and_a_small_card_is_refused():
    found = dryrun.run("logprob", "dense-7b")
    assert found.status is Status.PASS and part(found, "ownership").coverage["tensors"].complete
    found = dryrun.run("logprob", "dense-7b", gpu_gib=80)
    assert found.status is Status.FAIL and found.first_bad.stage == "memory" and "a GPU has 80" in part(found, "memory").reason


def test_six_layers_of_glm_over_eight_ranks():
    """32.7 G parameters; an eighth of the experts and all of the rest on each rank."""
    from vime.weights.families import family_for

    units = family_for(config_of("glm5.2-6layer")).plan(config_of("glm5.2-6layer")).units
    size = {True: 0, False: 0}
    for unit in units:
        n = 1
        for length in unit.shape:
            n *= length
        size[unit.expert is not None] += n
    assert 32.6e9 < sum(size.values()) < 32.8e9
    ranks = dryrun.memory(FULL, config_of("glm5.2-6layer"), 8)
    assert len(ranks) == 8 and {r.parts["engine weights"] for r in ranks} == {2 * (size[False] + size[True] / 8)}
    assert ranks[0].parts["optimizer"] == 12 * (size[False] + size[True] / 8)
    groups = part(dryrun.run("ep8"), "groups")
    assert groups.status is Status.PASS and groups.coverage["groups"].complete


@pytest.mark.parametrize(("change", "place", "says"), [
    ({"n_routed_experts": 12}, "groups", "EP 8 does not divide the 12 experts"),
    ({"attention_bias": True}, "arguments", "attention_bias"),
    ({"indexer_types": ["shared"] * 6}, "arguments", "indexer_types"),
])
def test_what_does_not_work_out_is_named(change, place, says):
    found = dryrun.run("ep8", "glm5.2-6layer-tiny", config=config_of("glm5.2-6layer-tiny") | change)
    assert found.status is Status.FAIL and found.first_bad.stage == place and says in found.summary()


def test_a_kernel_that_is_missing_is_named(monkeypatch):
    from vime.ops import registry

    real = registry.resolve

    def without(op, device, dtype, shape=None):
        if op == "moe":
            raise registry.UnsupportedOp(op, device, dtype)
        found = real(op, device, dtype, shape)
        return dataclasses.replace(found, functions={k: v for k, v in found.functions.items() if k != "rms_norm"})

    monkeypatch.setattr(registry, "resolve", without)
    found = part(dryrun.run("ep8", "qwen3-moe-tiny"), "kernels")
    assert found.status is Status.FAIL and "norm.rms_norm, moe.sigmoid, moe.exp" in found.reason


def test_from_the_shell():
    done = CliRunner().invoke(app, ["gate", "ep8", "--dry-run", "--json", "--gpu-gib", "20"])
    found = json.loads(done.stdout)
    assert done.exit_code == 1 and found["verdict"] == "FAIL" and "proves" in done.stdout
    assert isinstance(CliRunner().invoke(app, ["gate", "ep9", "--dry-run"]).exception, GateUnusable)  # exit code 2
