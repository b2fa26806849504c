"""Our conversion against mbridge's, which shares no line with it; and the refusals where it cannot be used.

mbridge is no dependency of the package but one of these tests: where it is not installed they fail and say what to install.
"""
from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import pytest

from tests.rl.tiny import write_checkpoint
from tests.weights.test_megatron import megatron
from tests.weights.tiny import load
from vime.rl.config import ConfigError, TrainConfig
from vime.rl.pool import TrainerPool
from vime.weights import bridge
from vime.weights.families import family_for
from vime.weights.megatron_state import canonical


@pytest.fixture
def mbridge():
    """The module; without it :class:`BridgeMissing`, which fails the test by name: a skip would be counted as green."""
    bridge.require()
    return importlib.import_module("mbridge")


def test_the_tests_install_the_version_that_is_named():
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert f"mbridge=={bridge.VERSION}" in pyproject["project"]["optional-dependencies"]["dev"]


@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "qwen3", "qwen3_moe", "glm4_moe"])
def test_bridge_and_raw_give_the_same_bits(family, checkpoint, mbridge):
    state, cfg = load(checkpoint(family))
    result = megatron("bridge", cfg, str(checkpoint(family)))
    assert result["different"] == [] and result["compared"] == len(state)
    assert result["moved"] and all(".layers.0.self_attn." in n for n in result["moved"])  # it reads the model, not the folder


def test_an_architecture_it_does_not_know(checkpoint, mbridge):
    with pytest.raises(bridge.BridgeMissing, match="mbridge does not know model_type 'gemma4_text'"):
        bridge.BridgeExporter([], checkpoint("gemma4"))


def test_a_config_it_cannot_read(checkpoint, monkeypatch, mbridge):
    import torch

    def broken(config, **kwargs):
        raise AttributeError("no attribute 'rope_theta'")

    monkeypatch.setattr(mbridge.AutoBridge, "from_config", broken)
    with pytest.raises(bridge.BridgeMissing, match=r"cannot read a qwen3 config .*rope_theta.*use --megatron-to-hf-mode raw"):
        bridge.BridgeExporter([torch.nn.Linear(1, 1)], checkpoint("qwen3"))


def test_without_it_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(bridge.BridgeMissing, match=r"pip install --no-deps mbridge==.*or use --megatron-to-hf-mode raw"):
        bridge.require()


def test_names_of_fused_modules():
    layer = "decoder.layers.3."
    dense = [layer + n for n in ("input_layernorm.weight", "self_attention.linear_qkv.weight", "pre_mlp_layernorm.weight", "mlp.linear_fc1.weight")]
    assert list(bridge.fused_names(dense).values()) == [
        layer + "self_attention.linear_qkv.layer_norm_weight", dense[1], layer + "mlp.linear_fc1.layer_norm_weight", dense[3]]
    sparse = [layer + n for n in ("pre_mlp_layernorm.weight", "mlp.experts.local_experts.12.linear_fc1.weight", "mlp.router.weight")]
    assert list(bridge.fused_names(sparse).values()) == [sparse[0], layer + "mlp.experts.linear_fc1.weight12", sparse[2]]


def test_the_setting_is_checked_before_anything_starts(checkpoint, monkeypatch):
    folder = str(checkpoint("qwen3"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(bridge.BridgeMissing, match="needs mbridge, which is not installed"):
        TrainConfig(folder, megatron_to_hf_mode="bridge")
    with pytest.raises(ConfigError, match="--megatron-to-hf-mode is 'other'; expected raw or bridge"):
        TrainConfig(folder, megatron_to_hf_mode="other")


def test_the_trainer_sends_by_it(tmp_path, mbridge):
    folder = write_checkpoint(tmp_path / "hf")
    digests = []
    for mode in ("raw", "bridge"):
        with TrainerPool(TrainConfig(str(folder), dtype="float32", actor_num_gpus=2, megatron_to_hf_mode=mode)) as pool:
            digests.append(pool.named_weights_digest())
    assert digests[0] == digests[1] and len(digests[0]) > 15


def test_fused_and_grouped_names_are_read_back(case, checkpoint):
    """A model of TransformerEngine's modules is the same model: fused norms, ``linear_fc1.weight12``."""
    state, cfg = load(checkpoint(case))
    names = [unit.name for unit in family_for(cfg).plan(cfg, hf_names=state).units]
    fused = bridge.fused_names(names)
    assert [canonical(fused[n]) for n in names] == names and len(set(fused.values())) == len(names)
    assert any(n != fused[n] for n in names) or "gemma4" in case
