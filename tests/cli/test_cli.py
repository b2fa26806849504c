"""The command line: quick help, one message for bad input, exit codes, nothing half-written."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from tests.rl.tiny import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def vime(*args, env=None):
    return subprocess.run([sys.executable, "-m", "vime.cli", *map(str, args)], capture_output=True, text=True, timeout=600,
                          env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **(env or {})}, check=False)


def refused(result, *words):
    """One clear message, no traceback, exit 2."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    for word in words:
        assert word in result.stderr.replace("\n", " "), result.stderr


def test_help_lists_the_commands_and_imports_nothing_heavy():
    out = vime("--help")
    assert out.returncode == 0
    for name in ("train", "demo", "prove", "gate", "compare", "weights", "doctor", "explain"):
        assert name in out.stdout
    code = "import sys, vime.cli; print([m for m in ('torch', 'vllm', 'megatron', 'transformers', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize("command", [(), ("train",), ("demo",), ("prove",), ("gate",), ("doctor",), ("explain",), ("compare",), ("weights",),
                                     ("weights", "roundtrip"), ("repro",), ("repro", "run"), ("repro", "compare")], ids=" ".join)
def test_help_says_every_flag_and_command_in_full_at_80_columns(command):
    import typer

    from vime.cli import app

    found = typer.main.get_command(app)
    for name in command:
        found = found.commands[name]
    out = vime(*command, "--help", env={"COLUMNS": "80"})
    assert out.returncode == 0 and out.stdout.isascii()
    assert not [line for line in out.stdout.splitlines()[1:] if line.endswith("...")], out.stdout
    words = set(out.stdout.split())
    flags = {flag for param in found.params if not getattr(param, "hidden", False) for flag in (*param.opts, *param.secondary_opts)
             if flag.startswith("--")}
    assert not flags - words, sorted(flags - words)
    assert set(getattr(found, "commands", ())) <= words
    if not command:
        assert "Exit codes: 0 PASS" in out.stdout


def test_help_costs_little_processor_time():
    before = os.times().children_user + os.times().children_system
    vime("--help")
    assert os.times().children_user + os.times().children_system - before < 1.5
    time.sleep(0)


@pytest.mark.parametrize("args", [("train", "--nonsense"), ("nonsense",), ("train", "--dtype", "float64"), ("gate", "nonsense"),
                                  ("train", "--exclude", "softmax"), ("weights", "roundtrip", "--hf", "none", "--vpp", "2"),
                                  ("weights", "roundtrip", "--hf", "none", "--vpp", "2", "--pp", "1"), ("prove", "--ops", ","),
                                  ("train", "--vime-off", "--exclude", "norm"), ("gate", "--dry-run", "--tier", "exact", "--profile", "dense-tiny"),
                                  ("gate", "--dry-run", "--device", "cpu", "--profile", "dense-tiny")])
def test_wrong_usage_is_exit_2(args, checkpoint):
    extra = ("--hf-checkpoint", checkpoint) if args[0] == "train" else ()
    result = vime(*args, *extra)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "--vpp" not in args or "2 chunks of a stage need several stages" in result.stderr


HIDE = """
import os, sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == os.environ["HIDDEN"]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.partition(".")[0] == os.environ["HIDDEN"] else found(name, package)
"""


@pytest.mark.parametrize(("module", "package"), [("vllm", "vllm"), ("megatron", "megatron-core"), ("torch", "torch")])
def test_a_missing_package_is_named_with_what_to_run(module, package, checkpoint, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    env = {"PYTHONPATH": str(tmp_path), "HIDDEN": module}
    commands = [("train", "--hf-checkpoint", checkpoint)] + ([("prove", "--quick")] if module == "torch" else [])
    for command in commands:
        result = vime(*command, env=env)
        assert result.returncode == 10 and "Traceback" not in result.stderr, result.stderr
        assert f"error: {package} is not installed in this Python; run " in result.stderr


@pytest.mark.parametrize("command", ["doctor", "explain"])
def test_an_unknown_profile(command):
    refused(vime(command, "--profile", "dense-tyny"), "Did you mean dense-tiny?")


def test_no_gpu(checkpoint):
    import torch

    if torch.cuda.device_count():
        pytest.skip("there is a GPU")
    for command in (("prove",), ("train", "--hf-checkpoint", checkpoint), ("explain", "--profile", "dense-tiny")):
        refused(vime(*command, "--device", "cuda"), "sees no GPU", "vime doctor --device cuda")


def test_a_missing_checkpoint(tmp_path):
    refused(vime("train", "--hf-checkpoint", tmp_path / "none"), "does not exist", "config.json and *.safetensors")


def test_an_incomplete_checkpoint(tmp_path):
    folder = write_checkpoint(tmp_path / "c")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    refused(vime("train", "--hf-checkpoint", folder), "model.safetensors cannot be read as safetensors")
    (folder / "model.safetensors").unlink()
    refused(vime("train", "--hf-checkpoint", folder), "holds no *.safetensors")
    (folder / "config.json").unlink()
    refused(vime("train", "--hf-checkpoint", folder), "config.json")


def test_an_uncovered_architecture(tmp_path):
    folder = write_checkpoint(tmp_path / "c")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    refused(vime("train", "--hf-checkpoint", folder), "gpt2", "llama, qwen2, qwen3")


def test_a_bad_data_line(tmp_path, checkpoint):
    (tmp_path / "d.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n{"question": "x"}\n')
    out = tmp_path / "out"
    refused(vime("train", "--hf-checkpoint", checkpoint, "--data", tmp_path / "d.jsonl", "--output-dir", out),
            "d.jsonl, line 2: field 'answer' is missing")
    assert not out.exists()


def test_too_little_memory(checkpoint, tmp_path):
    result = vime("train", "--hf-checkpoint", checkpoint, "--kv-cache-gib", 100000)
    refused(result, "needs about 10000", "are available", "--dtype bfloat16")


@pytest.mark.parametrize(("flags", "word"), [
    (("--rollout-temperature", 0), "--rollout-temperature is 0.0; expected more than 0"),
    (("--num-rollout", 0, "--no-check-last-update"), "--num-rollout is 0; expected at least 1"),
    (("--update-weight-transport", "disk"), "--update-weight-disk-dir"),
    (("--update-weight-transport", "ipc"), "needs --device cuda"),
    (("--megatron-to-hf-mode", "bridge"), "pip install --no-deps mbridge=="),
])
def test_settings_that_cannot_work(checkpoint, tmp_path, flags, word):
    (tmp_path / "sitecustomize.py").write_text(HIDE)  # the tests' own environment has mbridge
    refused(vime("train", "--hf-checkpoint", checkpoint, *flags, env={"PYTHONPATH": str(tmp_path), "HIDDEN": "mbridge"}), word)


def test_a_compilation_is_said_before_it_begins(checkpoint, tmp_path):
    env = {"VIME_CACHE_DIR": str(tmp_path), "CXX": "no-such-compiler"}  # a machine that has no kernels yet, and can't make them
    result = vime("train", "--hf-checkpoint", checkpoint, env=env)
    assert "compiled once on a machine" in result.stderr and result.returncode == 10, result.stderr
    assert result.stderr.index("compiled once on a machine") < result.stderr.index("need a C++ compiler")
    assert "Traceback" not in result.stderr


def test_train_writes_metrics_and_a_report(checkpoint, tmp_path):
    out = tmp_path / "out"
    result = vime("train", "--hf-checkpoint", checkpoint, "--num-rollout", 1, "--rollout-batch-size", 2, "--n-samples-per-prompt", 2,
                  "--rollout-max-response-len", 6, "--reward", "gate", "--lr", "1e-3", "--max-model-len", 256, "--output-dir", out, "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["verdict"] == "PASS" and document["first_bad"] is None and document["cause"] is None
    assert all(c["compared"] == c["expected"] > 0 for c in document["coverage"].values())
    assert [s["trained"] for s in document["steps"]] == [True, False]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [m["train_rollout_logprob_abs_diff"] for m in lines] == [0.0, 0.0]
    assert json.loads((out / "report.json").read_text())["verdict"] == "PASS"
    assert not [p for p in out.rglob("*") if p.name.endswith(".part") or p.name.startswith(".")]


def test_compare_and_weights_use_the_exit_codes(checkpoint, tmp_path):
    other = write_checkpoint(tmp_path / "other", seed=1)
    assert vime("weights", "diff", checkpoint, write_checkpoint(tmp_path / "same")).returncode == 0
    assert vime("weights", "diff", checkpoint, checkpoint).returncode == 11  # one and the same folder: nothing was compared
    result = vime("weights", "diff", checkpoint, other, "--json")
    assert result.returncode == 1
    assert json.loads(result.stdout)["first_bad"]["tensor"].startswith("model.")
    assert vime("compare", checkpoint, other).returncode == 1
    refused(vime("compare", checkpoint, tmp_path / "none"), "does not exist")


def test_a_fault_of_ours_is_no_verdict(tmp_path):
    code = "from vime import cli; from vime.commands import weights; weights.diff = lambda *a: 1 // 0; cli.main()"
    result = subprocess.run([sys.executable, "-c", code, "weights", "diff", str(tmp_path), str(tmp_path)], capture_output=True, text=True,
                            timeout=100)
    assert result.returncode == 10 and "ZeroDivisionError" in result.stderr
