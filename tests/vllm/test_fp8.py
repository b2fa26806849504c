"""Block FP8 with a trainer and an engine: zero differing log-probs and layers through an update, the same layers on both sides,
and a scale that is wrong on one side is found at its layer."""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from alignment.verdict import Status
from gates.harness import Harness
from gates.judging import same_layers, same_logprobs
from gates.profiles import PROFILES
from gates.synthetic import config_of, write
from tests.vllm.plain import Plain
from vime import fp8
from vime.contract import OPS, ContractMismatch
from vime.megatron.faults_fp8 import FAULTS_FP8
from vime.rl.config import ConfigError, TrainConfig, read_hf_config
from vime.vllm import plugin
from vime.vllm.config import EngineConfig, preflight
from vime.vllm.protocol import EngineError

CASES = {"dense-tiny": {"dtype": "bfloat16"}, "glm5.2-6layer-tiny": {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write(config_of(name), tmp_path_factory.mktemp("model") / name) for name in CASES}


@pytest.fixture(scope="module", params=CASES)
def harness(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Harness]:
    folder = folders[request.param]
    profile = dataclasses.replace(PROFILES[request.param], checkpoint=lambda: folder, prompts=2, response_tokens=10)
    with Harness(profile, "cpu", fp8="blockwise", **CASES[request.param]) as both:
        yield both


def test_both_sides_run_the_same_layers_in_fp8(harness: Harness) -> None:
    """By Hugging Face name, each side from its own modules; and they are what the decision says of the checkpoint's tensors."""
    engine = harness.session.client.info()["fp8_layers"]
    (trainer,) = harness.session.pool.ranks.call("fp8_layers")
    from vime.weights.checkpoint import HfCheckpoint

    files = [name.removesuffix(".weight") for name in HfCheckpoint(harness.folder) if fp8.applies(name)]
    assert len(files) > 20 and sorted(trainer) == sorted(files)
    assert fp8.summary(engine) == fp8.summary(trainer) == harness.session.pool.contract().params["linear.fp8_layers"]
    assert not [name for name in engine if "indexer" in name or name.endswith(("mlp.gate", "kv_b_proj", "lm_head"))]


def test_without_it_other_numbers_come_out_and_one_side_alone_is_refused(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a second engine without FP8, whose handshake names the field; for the sparse model against a plain pass."""
    harness.pristine()
    samples = harness.generate(harness.requests(2))
    if harness.profile.name != "dense-tiny":
        plain = Plain(harness.folder, torch.bfloat16, fp8=True)
        assert all(s.logprobs != plain.logprobs(s.prompt_token_ids, s.token_ids) for s in samples)
        return
    contract = harness.session.pool.contract()
    monkeypatch.setattr(harness, "config", harness.config.replace(fp8=""))
    with harness.another_engine() as client:
        with pytest.raises(ContractMismatch, match=r"params\.linear\.fp8: trainer has 'e4m3_x1x128.*engine has 'off'"):
            client.handshake(contract)
        assert [s.logprobs for s in client.generate(harness.requests(2))] != [s.logprobs for s in samples]


def test_zero_differ_through_an_update(harness: Harness) -> None:
    samples, engine = harness.engine_layers(harness.requests(2))
    verdict = same_layers(engine, harness.trainer_layers(samples))
    assert verdict.green, verdict.reason
    samples = harness.generate(harness.requests(harness.profile.prompts, 2))
    verdict = same_logprobs(samples, harness.logprobs(samples), "log-probs")
    assert verdict.green, verdict.reason
    before = [s.logprobs for s in samples]
    stats = harness.train(samples, 2)
    assert stats.ratio_off == 0
    update = harness.update()
    assert update.changed > 0
    after = harness.generate(harness.requests(harness.profile.prompts, 2))
    verdict = same_logprobs(after, harness.logprobs(after), "log-probs after the update")
    assert verdict.green, verdict.reason
    assert [s.logprobs for s in after] != before


def test_a_wrong_scale_is_found_at_its_layer(harness: Harness) -> None:
    harness.in_step()
    samples, engine = harness.engine_layers(harness.requests(1))
    assert same_layers(engine, harness.trainer_layers(samples)).green
    latent = harness.profile.name != "dense-tiny"  # without fused queries, keys and values
    for fault in [name for name in FAULTS_FP8 if not (latent and name == "FP8 blocks of the fused tensor")]:
        harness.session.pool.ranks.call("plant", fault, 2)
        try:
            verdict = same_layers(engine, harness.trainer_layers(samples))
        finally:
            harness.session.pool.ranks.call("plant", None)
        assert verdict.status is Status.FAIL and verdict.first_bad is not None and verdict.first_bad.layer == 2, (fault, verdict.reason)


def test_what_cannot_be_had_is_refused_by_name(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    glm = str(folders["glm5.2-6layer-tiny"])
    for changes, message in (({"fp8": "int8"}, "--fp8 is 'int8'; expected blockwise"),
                             ({"fp8": "blockwise", "ops": ("norm",)}, "linear is not aligned")):
        with pytest.raises(ConfigError, match=message):
            TrainConfig(glm, **changes)
    with pytest.raises(EngineError, match="moe is not aligned"):
        preflight(EngineConfig(model=glm), [op for op in OPS if op != "moe"], "blockwise")
    assert preflight(EngineConfig(model=glm, device="cuda"), OPS, "blockwise")  # has kernels of its own
    assert TrainConfig(glm, fp8="blockwise", device="cuda", update_weight_transport="ipc").fp8
    for ops, mode, message in ((["norm"], "blockwise", "linear is not aligned"), (["linear"], "int8", "fp8 is 'int8'")):
        with pytest.raises(plugin.PluginError, match=message):
            plugin.settings(ops, mode)
    assert json.loads(plugin.settings(["linear"], "blockwise")) == {"ops": ["linear"], "fp8": "blockwise"}
    monkeypatch.setenv(plugin.ENV, plugin.settings(["linear"], "blockwise"))
    assert (plugin.requested(), plugin.requested_fp8()) == (("linear",), "blockwise")
    config: dict[str, Any] = {**config_of("dense-tiny"), "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    folder = write(config_of("dense-tiny"), tmp_path / "quantised")
    (folder / "config.json").write_text(json.dumps(config))
    for refused in (lambda: read_hf_config(folder), lambda: preflight(EngineConfig(model=str(folder)), OPS)):
        with pytest.raises(fp8.QuantisedCheckpoint, match=r"quantization_config .quant_method 'fp8'.*no scales.*Dequantise"):
            refused()


def test_a_layer_that_runs_otherwise_than_decided_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.linear import LinearBase

    from vime.vllm import fp8 as engine_side

    def layer(prefix: str, sizes: list[int]) -> Any:
        made: Any = LinearBase.__new__(LinearBase)
        torch.nn.Module.__init__(made)
        made.prefix, made.output_sizes, made.weight = prefix, sizes, torch.zeros(sum(sizes), 8)
        return made

    names = {"self_attn.qkv_proj": [130, 20, 20], "mlp.gate_up_proj": [300, 300], "self_attn.fused_qkv_a_proj": [128, 40],
             "self_attn.q_b_proj": [7], "mlp.shared_experts.down_proj": [7]}
    others = ["self_attn.kv_b_proj", "self_attn.indexer.wk_weights_proj", "self_attn.indexer.wq_b", "mlp.gate"]
    monkeypatch.setattr(plugin, "_installed_fp8", "blockwise")
    for name, sizes in {**names, **{name: [9] for name in others}}.items():
        at = f"model.layers.3.{name}"
        made = layer(at, sizes)
        assert engine_side.problem(at, made) == (None if name in others else "it runs without block FP8 and should run in it")
        engine_side.mark(made)
        assert engine_side.problem(at, made) is None
        found = getattr(made, engine_side._MARK, None)
        assert (found is None) == (name in others)
        if found is not None:
            assert len(set(found.tolist())) == sum(-(-n // 128) for n in sizes)  # each part starts a block of its own
            made.weight = torch.zeros(5, 8)
            assert "rows of a weight of 5" in str(engine_side.problem(at, made))
            monkeypatch.setattr(plugin, "_installed_fp8", "")
            assert engine_side.problem(at, made) == "it runs in block FP8 and should run without it"
            monkeypatch.setattr(plugin, "_installed_fp8", "blockwise")
    assert engine_side.hf_names("model.layers.0.self_attn.qkv_proj") == [f"model.layers.0.self_attn.{n}_proj" for n in "qkv"]


def test_weights_are_kept_where_an_engine_says_so_and_it_is_told_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from vllm.model_executor.layers.linear import LinearBase

    from vime.vllm import fp8 as engine_side
    from vime.vllm.protocol import EngineError

    kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    monkeypatch.setattr(engine_side.ops, "keep_quantised", lambda name, weight, block: kept.update({name: (weight, block)}) is None)
    monkeypatch.setattr(plugin, "_installed_fp8", "blockwise")
    linear: Any = LinearBase.__new__(LinearBase)
    torch.nn.Module.__init__(linear)
    linear.prefix, linear.weight = "model.layers.3.mlp.down_proj", torch.zeros(7, 8)
    held = SimpleNamespace(w13_weight=torch.zeros(2, 300, 8), w2_weight=torch.zeros(2, 8, 150))
    runner = SimpleNamespace(layer_name="model.layers.3.mlp.experts", routed_experts=held)
    with engine_side.keeping(False) as names:
        engine_side.mark(linear), engine_side.expert_blocks(runner), engine_side.keep_experts(held)
    engine_side.mark(linear)  # as in a process that is no engine of vime
    assert not kept and not names
    with engine_side.keeping(True) as names:
        engine_side.mark(linear)
        blocks = engine_side.expert_blocks(runner)
        engine_side.keep_experts(held)
    first = getattr(linear, engine_side._MARK)
    engine_side.mark(linear)
    assert getattr(linear, engine_side._MARK) is first, "loaded again outside: what is kept is found by this tensor"
    assert blocks is not None and names == set(kept) and list(kept) == [linear.prefix, "model.layers.3.mlp.experts.w13_weight", "model.layers.3.mlp.experts.w2_weight"]
    for name, weight, block in zip(kept, (linear.weight, held.w13_weight, held.w2_weight), (getattr(linear, engine_side._MARK), *blocks), strict=True):
        assert kept[name][0] is weight and kept[name][1] is block, "products come with that tensor"

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setattr(engine_side.ops, "keep_quantised", full)
    with engine_side.keeping(True), pytest.raises(EngineError, match=r"experts\.w13_weight: no room(.|\n)*20 GiB(.|\n)*--no-keep-fp8-weights"):
        engine_side.keep_experts(held)
    assert engine_side.kept(torch.nn.Linear(1, 1)) == frozenset() and engine_side.refresh(torch.nn.Linear(1, 1), "cpu") == 0
