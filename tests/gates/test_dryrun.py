"""The dry run: what is refused before a node with GPUs is taken, and that it names the place."""
from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from alignment.verdict import Status
from gates import dryrun, gpu_memory
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
    found = dryrun.run("logprob", "dense-7b", gpu_gib=30)
    assert found.status is Status.FAIL and found.first_bad.stage == "memory" and "it has 30" in part(found, "memory").reason


@pytest.mark.parametrize(("profile", "words"), [
    ("glm5.2-6layer:transformer_impl=transformer_engine", "for a glm_moe_dsa model; latent attention is a module of vime's"),
    ("deepseek-v3-tiny:transformer_impl=transformer_engine", "for a deepseek_v3 model"),
    ("dense-7b:kv_cache_dtype=fp8_e4m3", "the FP8 cache is that of latent attention")])
def test_what_only_the_rank_that_builds_the_model_would_refuse_is_refused_here(profile, words):
    found = dryrun.run("logprob", profile)
    assert found.status is Status.FAIL and words in part(found, "arguments").reason
    assert dryrun.run("logprob", "qwen2.5-0.5b:transformer_impl=transformer_engine").green


def test_what_runs_beside_the_one_pair_counts():
    """The gate on cost holds a stock trainer and engine at the same time, the gate on batches one more engine."""
    one, batch, cost = (part(dryrun.run(gate, "dense-7b"), "memory").stats for gate in ("logprob", "batch", "cost"))
    assert cost["total_gib"] == pytest.approx(2 * one["total_gib"], abs=0.1)
    assert batch["second engine"] == pytest.approx(one["engine weights"] + one["KV cache"] + gpu_memory.CONTEXT_GIB, abs=0.1)
    assert batch["total_gib"] == pytest.approx(one["total_gib"] + batch["second engine"], abs=0.1)
    assert part(dryrun.run("logprob", "dense-7b", gpu_gib=60), "memory").status is Status.PASS
    assert part(dryrun.run("cost", "dense-7b", gpu_gib=60), "memory").status is Status.FAIL


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
    found = phases(8, (8, 2))
    share, half = size[False] + size[True] / 8, size[False] + size[True] / 2
    step = found[0, "step", 8]
    assert step["trainer weights"] == step["gradients"] == 2 * share and step["optimizer"] == step["partial sums of experts"] == 0
    assert "engine weights" not in step  # it sleeps
    # the engine spreads its experts over the same GPUs
    assert found[0, "weight update", 8]["engine weights"] == found[1, "forward", 8]["engine weights"] == 2 * share
    # four sets of ranks hold an expert at EP 2 of eight, so the second source's sums are kept until they meet
    assert found[3, "step", 2]["gradients"] == 2 * half and found[3, "step", 2]["partial sums of experts"] == size[True]
    # Adam's states and fp32 gradients, and an engine that stays awake
    changed = dataclasses.replace(FULL, train={})
    step = phases(8, (8,), changed)[0, "step", 8]
    assert (step["optimizer"], step["gradients"], step["engine weights"]) == (12 * share, 4 * share, 2 * share)
    assert phases(8, (8,), dataclasses.replace(FULL, train={"accumulate_allreduce_grads_in_fp32": False}))[0, "step", 8]["gradients"] == 6 * share
    # weights that the engine keeps quantised: half of all but embedding and head, with their scales
    forward = phases(8, (8,), dataclasses.replace(FULL, train={**FULL.train, "fp8": "blockwise"}))[0, "forward", 8]
    assert forward["kept FP8 weights"] == (share - 2 * 154880 * 6144) * 33 / 32
    without = dataclasses.replace(FULL, train={**FULL.train, "fp8": "blockwise", "vllm_keep_fp8_weights": False})
    assert "kept FP8 weights" not in phases(8, (8,), without)[0, "forward", 8] and "kept FP8 weights" not in found[0, "forward", 8]
    groups = part(dryrun.run("ep8"), "groups")
    assert groups.status is Status.PASS and groups.coverage["groups"].complete


def phases(ranks, spreads, profile=FULL):
    hf = config_of("glm5.2-6layer")
    config = dryrun._train_config(f"ep{ranks}", profile, hf, ranks)
    return {(r.number, r.phase, r.spread): r.parts for r in gpu_memory.phases(profile, hf, config, spreads)}


@pytest.mark.parametrize(("gate", "profile"), [("ep8", "glm5.2-6layer"), ("ep2", "glm5.2-6layer"), ("ep1", "glm5.2-6layer-128e")])
def test_the_true_widths_fit_as_the_gates_run_them(gate, profile):
    found = dryrun.run(gate)
    assert found.status is Status.PASS and found.info["profile"] == profile
    assert 50 < part(found, "memory").stats["total_gib"] < dryrun.GPU_GIB
    least = dryrun.run(gate, gpu_gib=part(found, "memory").stats["total_gib"] - 1)  # and the sum is what decides
    assert least.status is Status.FAIL and least.first_bad.stage == "memory"


def test_what_does_not_fit_is_refused():
    assert part(dryrun.run("ep1", "glm5.2-6layer"), "memory").status is Status.FAIL  # 256 experts need two GPUs


def test_a_step_of_several_microbatches_keeps_partial_sums():
    """As the trainer does: only a step of one microbatch adds the sources up in the backward."""
    hf = config_of("glm5.2-6layer")
    config = dryrun._train_config("ep2", FULL, hf, 2)
    one, two = ({(r.number, r.phase): r.parts for r in gpu_memory.phases(FULL, hf, config.replace(max_tokens_per_gpu=n), (2,))}
                for n in (config.max_tokens_per_gpu, 5000))
    assert one[0, "step"]["partial sums of experts"] == 0
    assert two[0, "step"]["partial sums of experts"] == pytest.approx(29e9, rel=0.01)  # half of the experts, bf16


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
