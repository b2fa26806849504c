"""What makes two runs one recipe, what is refused by name, and the pieces whose order must not depend on luck."""
from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment import machine, runlog, runs
from alignment.verdict import Status
from tests.alignment.test_runs import lines_of, write
from tests.rl.tiny import write_checkpoint
from vime.rl import recipe
from vime.rl.config import ConfigError, TrainConfig, engine_env, trainer_env
from vime.rl.curves import Curves, CurvesUnavailable
from vime.rl.data import generate
from vime.rl.packing import balance, plan_microbatches
from vime.rl.rollout import waves
from vime.rl.runlog import LedgerExists, RunLog

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "run-qwen2.5-0.5B-reproducibility.sh"


def config(**changes):
    return TrainConfig("model", **changes)


def facts(c, weights=None, problems=None):
    return recipe.recipe(c, weights or {"w": "1"}, problems or generate(3))


#: Another valid value of every field; a field without one here makes the test below fail by name.
OTHER = {
    "dtype": "float32", "ops": ("linear",), "seed": 5, "rollout_batch_size": 9, "n_samples_per_prompt": 9, "rollout_max_response_len": 9,
    "rollout_temperature": 0.5, "reward": "gate", "lr": 0.5, "weight_decay": 0.5, "adam_beta1": 0.5, "adam_beta2": 0.5, "clip_grad": 0.5,
    "eps_clip": 0.5, "eps_clip_high": 0.5, "max_tokens_per_gpu": 9, "balance_data": True, "recompute": True, "freeze_indexer": False,
    "deterministic_mode": False, "vllm_enable_deterministic_inference": False, "vllm_attention_backend": "flash_attn",
    "kv_cache_dtype": "fp8", "fp8": "blockwise",
}


def test_every_setting_is_recipe_topology_place_or_condition():
    """A new setting has to be put on one side: one that may change a bit and is forgotten would make runs look alike."""
    for field in dataclasses.fields(TrainConfig):
        if field.name in recipe.CONDITIONS | recipe.PLACES | set(recipe._TOPOLOGY) | {"rollout_top_p", "rollout_top_k"}:
            continue
        other = OTHER.get(field.name)
        if other is None or field.name not in facts(config()):
            assert field.name in facts(config()), f"{field.name} is neither in the recipe nor named as a condition"
            continue
        try:
            changed = config(**{field.name: other})
        except ConfigError:
            continue
        assert recipe.fingerprint(facts(changed)) != recipe.fingerprint(facts(config())), field.name


def test_conditions_and_places_change_no_recipe_and_content_does():
    same = config(num_rollout=7, output_dir="o", timeout_s=1.0, rollout_concurrency=2, rollout_arrival="shuffled", save="s", load="l")
    assert facts(same) == facts(config()) == facts(TrainConfig("elsewhere", data=""))
    assert facts(config(), weights={"w": "2"})["model"] != facts(config())["model"]
    swapped = generate(3)[::-1]
    assert facts(config(), problems=swapped)["data_digest"] != facts(config())["data_digest"]


def test_code_is_among_the_versions_by_its_content_and_place(tmp_path):
    (tmp_path / "p" / "q").mkdir(parents=True)
    code = tmp_path / "p" / "q" / "x.py"

    def digest(text):
        code.write_text(text)
        return machine.sources([tmp_path / "p"])

    first = digest("a = 1")
    (tmp_path / "p" / "q" / "x.pyc").touch()
    assert digest("a = 1") == first != digest("a = 2")
    digest("a = 1")
    code.rename(tmp_path / "p" / "q" / "y.py")
    assert machine.sources([tmp_path / "p"]) != first
    found = recipe.versions("c")
    assert len(found["code"]) == 16 and found == recipe.versions("c")
    edited = {**found, "code": "0" * 16}
    verdict = runs.compare(*(write(tmp_path / name, lines_of(versions=v)) for name, v in (("a", found), ("b", edited))))
    assert verdict.status is Status.INVALID and f"different versions: code {found['code']!r} in A" in verdict.reason


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 6))
def test_balance_deals_every_place_once_and_evenly(lengths, parts):
    dealt = balance(lengths, parts)
    assert sorted(i for part in dealt for i in part) == list(range(len(lengths))) and all(part == sorted(part) for part in dealt)
    assert dealt == balance(list(lengths), parts)
    loads = [sum(lengths[i] for i in part) for part in dealt]
    assert max(loads) - min(loads) <= max(lengths, default=0)
    assert all(dealt) or len(lengths) < parts


@given(st.integers(1, 24), st.integers(1, 5))
def test_ties_are_broken_by_place(count, parts):
    assert balance([7] * count, parts) == [list(range(r, count, parts)) for r in range(parts)]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_microbatches_keep_the_given_order(lengths):
    assert [i for part in plan_microbatches(lengths, 40) for i in part] == list(range(len(lengths)))


@given(st.integers(1, 20), st.integers(0, 7), st.sampled_from(["given", "reversed", "shuffled"]))
def test_waves_hold_every_request_once(count, concurrency, arrival):
    requests = [types.SimpleNamespace(request_id=f"r{i}") for i in range(count)]
    sent = waves(config(rollout_concurrency=concurrency, rollout_arrival=arrival), requests, 3)
    flat = [r for wave in sent for r in wave]
    assert sorted(flat, key=lambda r: int(r.request_id[1:])) == requests
    assert all(len(wave) <= (concurrency or count) for wave in sent)
    if arrival != "given" and count > 1:
        assert flat != requests


@pytest.mark.parametrize(("name", "value"), [("NCCL_ALGO", "NVLS"), ("CUBLAS_WORKSPACE_CONFIG", ":8:8"),
                                             ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")])
def test_a_variable_against_the_recipe(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(recipe.NotReproducible, match=rf"{name} is '{value}'; the recipe needs .*unset it"):
        recipe.require(config())
    assert recipe.require(config(deterministic_mode=False)) == []


def test_a_narrower_workspace_than_asked_for_is_said(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert recipe.require(config()) == []
    (said,) = recipe.require(config(device="cuda"))
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in said and "get :16:8" in said


def test_flash_attention_3_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", types.ModuleType("flash_attn_interface"))
    with pytest.raises(recipe.NotReproducible, match=r"FlashAttention 3 is installed .flash_attn_interface.*Uninstall"):
        recipe.require(config())


def test_an_attention_backend_is_honoured_or_refused_never_ignored(monkeypatch):
    assert recipe.require(config()) == recipe.require(config(device="cuda")) == []
    for backend in ("flash_attn", "flashinfer"):
        with pytest.raises(recipe.NotReproducible, match=rf"{backend} has no kernels for a CPU"):
            recipe.require(config(vllm_attention_backend=backend))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    with monkeypatch.context() as without:
        without.setattr(recipe, "_present", lambda name: False)
        with pytest.raises(recipe.NotReproducible, match="flashinfer: FlashInfer is not installed"):
            recipe.require(config(vllm_attention_backend="flashinfer", device="cuda"))
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    asked = config(vllm_attention_backend="flashinfer", device="cuda")
    assert "FlashInfer's prefill kernel at one tile" in recipe.require(asked)[0]
    assert engine_env(asked)["VIME_ATTENTION"] == trainer_env(asked)["VIME_ATTENTION"] == "flashinfer"
    assert engine_env(config(device="cuda"))["VIME_ATTENTION"] == trainer_env(config(device="cuda"))["VIME_ATTENTION"] == "flash_attn"
    (said,) = recipe.require(config(vllm_attention_backend="flash_attn", device="cuda"))
    assert "FlashAttention 3's forward kernel at one split" in said
    with pytest.raises(recipe.NotReproducible, match="with --vime-off"):
        recipe.require(config(vllm_attention_backend="flash_attn", device="cuda", ops=()))


@pytest.mark.parametrize("flag", sorted(recipe.REFUSED))
def test_what_makes_a_rerun_a_matter_of_luck_is_refused_by_name(flag, tmp_path):
    option = "--" + flag.replace("_", "-")
    value = ["64"] if flag == "over_sampling_batch_size" else []
    result = subprocess.run([sys.executable, "-m", "vime.cli", "train", "--output-dir", str(tmp_path / "o"), option, *value],
                            capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2 and result.stderr.startswith(f"error: {option}: "), result.stderr
    assert not (tmp_path / "o").exists()


def test_nothing_to_go_on_from_is_said_before_anything_starts(tmp_path):
    model = write_checkpoint(tmp_path / "model")
    result = subprocess.run([sys.executable, "-m", "vime.cli", "train", "--hf-checkpoint", str(model), "--output-dir", str(tmp_path / "o"),
                             "--load", str(tmp_path / "ck")], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2 and "holds no checkpoint" in result.stderr, result.stderr
    assert not (tmp_path / "o").exists()


def test_checkpoints_of_another_run_are_kept_before_anything_starts(tmp_path):
    model, there = write_checkpoint(tmp_path / "model"), tmp_path / "ck" / "step-000003"
    there.mkdir(parents=True)
    result = subprocess.run([sys.executable, "-m", "vime.cli", "train", "--hf-checkpoint", str(model), "--output-dir", str(tmp_path / "o"),
                             "--save", str(tmp_path / "ck")], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2 and "holds checkpoints of another run (the newest is step-000003)" in result.stderr, result.stderr
    assert not (tmp_path / "o").exists() and there.is_dir()


def test_a_ledger_is_never_written_over(tmp_path):
    log = RunLog(str(tmp_path))
    assert not (tmp_path / runlog.FILE).exists()
    log.start({"resumed_from": None})
    log.close()
    with pytest.raises(LedgerExists, match="is the ledger of another run"):
        RunLog(str(tmp_path))
    with open(tmp_path / runlog.FILE, "ab") as out:
        out.write(b'{"kind":"st')
    log = RunLog(str(tmp_path), resumed=True)
    assert log.continued
    with pytest.raises(LedgerExists, match="of another recipe"):
        log.start({"resumed_from": 0, "recipe": {"lr": 1.0}})
    log.start({"resumed_from": 0})
    log.end(0, "PASS", "")
    log.close()
    read = runlog.read(tmp_path)
    assert len(read.starts) == 2 and len(read.notes) == 1 and read.problems == []


def test_curves_are_refused_where_they_are_not_installed(monkeypatch, tmp_path):
    for package, module in (("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(CurvesUnavailable, match=rf"--use-{package} needs the package {package}.*pip install 'vime\[{package}\]'"):
            Curves(config(output_dir=str(tmp_path), **{f"use_{package}": True}))
    with pytest.raises(ConfigError, match="an --output-dir"):
        config(use_wandb=True)


def test_curves_write_what_a_step_has(monkeypatch, tmp_path):
    seen = []

    class Writer:
        def __init__(self, log_dir):
            seen.append(("open", Path(log_dir).name))

        def add_scalar(self, name, value, step):
            seen.append((name, value, step))

        def flush(self):
            pass

        def close(self):
            seen.append("closed")

    board = types.ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = Writer
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **kw: types.SimpleNamespace(log=lambda values, step: seen.append((kw["mode"], values, step)), finish=lambda: None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with Curves(config(output_dir=str(tmp_path), use_tensorboard=True, use_wandb=True)) as curves:
        curves.step(3, {"train_rollout_logprob_abs_diff": 0.0, "reward": 0.5, "other": 1})
    assert seen == [("open", "tensorboard"), ("train/train_rollout_logprob_abs_diff", 0.0, 3), ("rollout/reward", 0.5, 3),
                    ("offline", {"train/train_rollout_logprob_abs_diff": 0.0, "rollout/reward": 0.5}, 3), "closed"]


def script(**env):
    clean = {k: v for k, v in os.environ.items() if k not in ("NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")}
    return subprocess.run([str(SCRIPT)], capture_output=True, text=True, timeout=120, check=False,
                          env={**clean, "PYTHON": sys.executable, **env})


def test_the_script_has_the_documented_settings(tmp_path):
    """The recipe as the command line gets it: a stand-in for python writes down its arguments and environment."""
    spy = tmp_path / "python"
    spy.write_text('#!/bin/sh\necho "$@"\necho "$NCCL_ALGO $NVTE_ALLOW_NONDETERMINISTIC_ALGO $CUBLAS_WORKSPACE_CONFIG"\n')
    spy.chmod(0o755)
    said = script(PYTHON=str(spy), HF_CHECKPOINT="/model", GSM8K="/gsm8k", OUTPUT=str(tmp_path / "o")).stdout
    for part in ("--deterministic-mode", "--vllm-enable-deterministic-inference", "--vllm-attention-backend", "--rollout-batch-size 32",
                 "--n-samples-per-prompt 8", "--rollout-max-response-len 1024", "--rollout-temperature 1", "--lr 1e-6", "--data /gsm8k",
                 "--hf-checkpoint /model", "-m vime.cli train", "--max-tokens-per-gpu 9216", "Ring 0 :4096:8"):
        assert part in said, part
    assert "-m vime.cli repro run" in script(PYTHON=str(spy), MODE="repro", DEVICE="cpu", OUTPUT=str(tmp_path / "o")).stdout
    assert script(DEVICE="tpu").returncode == script(MODE="x", DEVICE="cpu").returncode == script(MODEL="y").returncode == 2


def test_the_script_on_a_tiny_model_refuses_a_backend_that_a_cpu_has_not(tmp_path):
    model = write_checkpoint(tmp_path / "model")
    result = script(DEVICE="cpu", HF_CHECKPOINT=str(model), ATTENTION_BACKEND="flash_attn", OUTPUT=str(tmp_path / "o"))
    assert result.returncode == 2 and "has no kernels for a CPU" in result.stderr and not (tmp_path / "o").exists()


def test_arrival_does_not_draw_from_the_shared_generator():
    random.seed(1)
    before = random.getstate()
    waves(config(rollout_arrival="shuffled"), [types.SimpleNamespace(request_id=str(i)) for i in range(9)], 0)
    assert random.getstate() == before
