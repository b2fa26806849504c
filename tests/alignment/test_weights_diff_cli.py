"""``vime weights diff``: what two equal sets of tensors do not say of their folders."""
from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from alignment import Status
from vime.commands.weights import diff


@pytest.fixture
def two(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    save_file({"model.norm.weight": torch.arange(4.0)}, a / "model.safetensors")
    (a / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": 1e-6, "transformers_version": "1"}))
    shutil.copytree(a, b)
    return a, b


def test_a_config_that_differs_is_told(two):
    assert (plain := diff(*two)).status is Status.PASS and not plain.reason
    config = json.loads((two[1] / "config.json").read_text())
    (two[1] / "config.json").write_text(json.dumps({**config, "transformers_version": "2"}))
    assert not diff(*two).reason
    (two[1] / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5, "rope_theta": 5e5}))
    v = diff(*two)
    assert v.status is Status.PASS and v.info["config_differs"] == {"rms_norm_eps": [1e-6, 1e-5], "rope_theta": [None, 5e5]}
    assert "rms_norm_eps (1e-06 and 1e-05)" in v.reason


def test_files_of_tensors_beside_the_checkpoint_are_told(two):
    (two[1] / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": "model.safetensors"}}))
    save_file({"lora_A.weight": torch.ones(2)}, two[1] / "adapter_model.safetensors")
    v = diff(*two)
    assert v.status is Status.PASS and v.info["not_read"] == {"b": ["adapter_model.safetensors"]} and "adapter_model" in v.reason
