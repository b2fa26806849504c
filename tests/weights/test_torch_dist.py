"""torch_dist both ways is bitwise; a foreign index cannot load anything; nothing half-written stays."""
from __future__ import annotations

import errno
import importlib.util
import io
import json
import os
import pickle
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.weights.conversion import to_megatron
from tests.weights.tiny import load, make_checkpoint, with_mtp
from tests.weights.tiny import write as write_hf
from vime.weights.checkpoint import HfCheckpoint
from vime.weights.diff import diff
from vime.weights.families import family_for
from vime.weights.folders import CannotWrite, CheckpointError
from vime.weights.torch_dist import write as writing
from vime.weights.torch_dist.names import TRACKER
from vime.weights.torch_dist.read import TorchDist, to_hf
from vime.weights.torch_dist.write import write

TOOLS = Path(__file__).parents[2] / "tools"


def convert(folder, out, multiple=64):
    source = HfCheckpoint(folder)
    plan = family_for(source.config).plan(source.config, source.files, vocab_multiple=multiple)
    return source, write(source, plan, out)


def test_there_and_back(case, checkpoint, tmp_path):
    source, made = convert(checkpoint(case), tmp_path / "td")
    seen = []
    assert to_hf(TorchDist(tmp_path / "td"), source.folder, tmp_path / "hf", lambda done, total: seen.append((done, total))) == 0
    verdict = diff(source, tmp_path / "hf")
    assert verdict.green, verdict.summary()
    assert seen[-1][0] == seen[-1][1] and made.name == "release"


def test_fp8_there_and_back(fp8_checkpoint, tmp_path):
    source, _ = convert(fp8_checkpoint, tmp_path / "td")
    to_hf(TorchDist(tmp_path / "td"), source.folder, tmp_path / "hf")
    assert diff(source, tmp_path / "hf").green


def test_an_origin_without_weights_gives_config_and_names(checkpoint, tmp_path):
    source, _ = convert(checkpoint("qwen3"), tmp_path / "td")
    (tmp_path / "origin").mkdir()
    (tmp_path / "origin" / "config.json").write_bytes((source.folder / "config.json").read_bytes())
    to_hf(TorchDist(tmp_path / "td"), tmp_path / "origin", tmp_path / "hf")
    assert diff(source, tmp_path / "hf").green


def origin_of(folder, out, **changes):
    """A folder without weights, whose config is that of ``folder`` but for ``changes``."""
    out.mkdir()
    (out / "config.json").write_text(json.dumps({**json.loads((folder / "config.json").read_text()), **changes}))
    return out


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_hidden_layers": 1}, r"holds 12 tensors .*: decoder\.layers\.1\.\S+, .* and 6 more\. Give the Hugging Face folder"),
    ({"attention_bias": False}, r"holds 4 tensors .*: decoder\.layers\.0\.self_attention\.linear_proj\.bias, .*layers\.1\.self_attention\.linear_qkv\.bias\. "),
    ({"num_hidden_layers": 1, "attention_bias": False}, r"release holds 14 tensors that the model of \S+config\.json does not have"),
    ({"tie_word_embeddings": True}, r"holds 1 tensor that .*: output_layer\.weight"),
], ids=["layer", "bias", "both", "head"])
def test_what_the_config_does_not_describe_is_not_dropped(changes, message, tmp_path):
    source, _ = convert(make_checkpoint("llama", tmp_path / "source", num_hidden_layers=2), tmp_path / "td")
    with pytest.raises(CheckpointError, match=message):
        to_hf(TorchDist(tmp_path / "td"), origin_of(source.folder, tmp_path / "origin", **changes), tmp_path / "hf")
    assert not list(tmp_path.glob("*hf*"))
    to_hf(TorchDist(tmp_path / "td"), source.folder, tmp_path / "hf")
    assert diff(source, tmp_path / "hf").green


def test_a_prediction_layer_is_not_dropped(checkpoint, tmp_path):
    """Its tensors are in the plan only if the origin names them."""
    state, cfg = with_mtp(*load(checkpoint("deepseek_v3")))
    convert(write_hf(tmp_path / "source", state, cfg), tmp_path / "td")
    for origin in (checkpoint("deepseek_v3"), origin_of(tmp_path / "source", tmp_path / "origin")):
        with pytest.raises(CheckpointError, match=r"that would be lost: mtp\.layers\.0\."):
            to_hf(TorchDist(tmp_path / "td"), origin, tmp_path / "hf")
    to_hf(TorchDist(tmp_path / "td"), tmp_path / "source", tmp_path / "hf")
    assert diff(tmp_path / "source", tmp_path / "hf").green


def save_stacked(folder, out, cut, beside):
    """The older forms: equal layers under one key, and experts too (``stacked``) or each, its gate and its up under their own (``own``)."""
    plan, tensors = to_megatron(*load(folder))
    stacks = {}
    for unit in plan.units:
        name = unit.name if unit.layer is None else unit.name.replace(f"layers.{unit.layer}.", "layers.")
        name, lead = name.replace("local_", ""), () if unit.layer is None else (4,)
        if cut == "stacked" and unit.expert is not None:
            name, lead = name.replace(f"experts.{unit.expert}.", "experts."), (4, 8)
        halves = zip(("_w", "_v"), tensors[unit.name].chunk(2), strict=True) if cut == "own" and unit.split == "glu" else [("", tensors[unit.name])]
        for suffix, tensor in halves:
            stacks.setdefault(name + suffix, (lead, []))[1].append(tensor)
    saved = {key: torch.stack(rows).reshape(*lead, *rows[0].shape) for key, (lead, rows) in stacks.items()}
    dcp.save(saved | beside, storage_writer=dcp.FileSystemWriter(out), no_dist=True)
    return HfCheckpoint(folder)


@pytest.mark.parametrize("cut", ["stacked", "own"])
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_stacks_of_another_size_are_refused(cut, checkpoint, tmp_path):
    beside = {"optimizer.state.exp_avg.decoder.layers.9.x": torch.zeros(2), "decoder.layers.mlp._extra_state": torch.zeros(2)}
    source = save_stacked(checkpoint("qwen3_moe"), tmp_path / "td", cut, beside)
    made = TorchDist(tmp_path / "td")
    to_hf(made, source.folder, tmp_path / "good")
    assert diff(source, tmp_path / "good").green
    fewer_experts = r"layers\.mlp\.experts\.experts\.\S+ in \S+ is a stack of 8 experts, \S+config\.json says 4;" if cut == "stacked" else (
        r"holds 12 tensors .*: decoder\.layers\.mlp\.experts\.experts\.4\.linear_fc1\.weight_v, ")
    layers = r"decoder\.layers\.\S+ in \S+ is a stack of 4 layers, \S+config\.json says "
    for field, value, message in (("num_hidden_layers", 3, f"{layers}3;"), ("num_hidden_layers", 5, f"{layers}5;"), ("num_experts", 4, fewer_experts)):
        origin = origin_of(source.folder, tmp_path / f"{field}-{value}", **{field: value})
        with pytest.raises(CheckpointError, match=message):
            to_hf(made, origin, tmp_path / "hf")
        assert not list(tmp_path.glob("*hf*"))


def test_a_flipped_bit_is_found(checkpoint, tmp_path):
    source, made = convert(checkpoint("qwen3"), tmp_path / "td")
    data = made / "__0_0.distcp"
    raw = bytearray(data.read_bytes())
    weight = source["model.layers.2.mlp.down_proj.weight"].numpy().tobytes()
    raw[raw.index(weight)] ^= 1
    data.write_bytes(raw)
    try:
        to_hf(TorchDist(made), source.folder, tmp_path / "hf")
    except CheckpointError:  # the archive's own checksum noticed
        return
    verdict = diff(source, tmp_path / "hf")
    assert verdict.first_bad.tensor == "model.layers.2.mlp.down_proj.weight"


class _Evil:
    def __reduce__(self):
        return os.system, ("true",)


def test_bad_input_is_named(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no \.metadata"):
        TorchDist(tmp_path)
    source, made = convert(checkpoint("qwen3"), tmp_path / "td")
    with pytest.raises(CheckpointError, match="release exists"):
        convert(checkpoint("qwen3"), tmp_path / "td")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "release").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="release exists"):
        convert(checkpoint("qwen3"), tmp_path / "linked")
    good = (made / ".metadata").read_bytes()
    buffer = io.BytesIO()
    pickle.dump(_Evil(), buffer)
    (made / ".metadata").write_bytes(buffer.getvalue())
    with pytest.raises(CheckpointError, match=r"wants to load (posix|os)\.system"):
        TorchDist(made)
    (made / ".metadata").write_bytes(good[:50])
    with pytest.raises(CheckpointError, match="not readable"):
        TorchDist(made)
    (made / ".metadata").write_bytes(good)
    (made.parent / TRACKER).write_text("latest\n")
    with pytest.raises(CheckpointError, match=r"says 'latest'; expected release or the number of an iteration"):
        TorchDist(made.parent)
    (made / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read from .*__0_0\.distcp"):
        to_hf(TorchDist(made), source.folder, tmp_path / "hf")
    assert not (tmp_path / "hf").exists() and not list(tmp_path.glob(".hf*"))


def test_files_that_are_too_short_are_named_before_anything_is_written(checkpoint, tmp_path):
    source, made = convert(checkpoint("qwen3"), tmp_path / "td")
    data = made / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-50_000])
    with pytest.raises(CheckpointError, match=r"decoder\.\S+ cannot be read from .*__0_0\.distcp: it has \d+ bytes, .* cut short"):
        TorchDist(made).check_lengths()
    with pytest.raises(CheckpointError, match="cut short"):
        to_hf(TorchDist(made), source.folder, tmp_path / "hf")
    assert not list(tmp_path.glob(".hf*"))


def test_memory_does_not_grow_with_the_model(checkpoint, tmp_path, monkeypatch):
    """torch's writer keeps every tensor it has written; those that were made for it must not stay."""
    made, most = [], 0
    resolve = writing._Planner.resolve_data

    def watched(self, item):
        nonlocal most
        data = resolve(self, item)
        if isinstance(data, torch.Tensor):
            most = max(most, sum(tensor.untyped_storage().nbytes() for tensor in made if tensor is not self._last))
            if self._last is not None:
                made.append(self._last)
        return data

    monkeypatch.setattr(writing._Planner, "resolve_data", watched)
    source, _ = convert(checkpoint("qwen3"), tmp_path / "td")
    assert len(made) > 8 and most == 0  # fused projections and the padded vocabulary
    to_hf(TorchDist(tmp_path / "td"), source.folder, tmp_path / "hf")
    assert diff(source, tmp_path / "hf").green


def test_a_failed_write_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 0}))
    with pytest.raises(CheckpointError, match="Nothing was left behind"):
        convert(checkpoint("qwen3"), tmp_path / "td")
    assert not (tmp_path / "td").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(CheckpointError, match="Nothing was left behind"):
        convert(checkpoint("qwen3"), tmp_path / "mine")
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_disk_that_is_full_inside_torchs_writer(checkpoint, tmp_path, monkeypatch):
    """torch's archive says that it stands at an unexpected place; what the disk said lies below that."""
    save = torch.save

    def full(what, file, *args, **kwargs):
        try:
            save(what, io.BytesIO())
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CannotWrite, match=r"cannot write .*release: No space left on device; it needs .* Nothing was left behind"):
        convert(checkpoint("qwen3"), tmp_path / "td")
    assert not (tmp_path / "td").exists()


def test_a_torch_dist_checkpoint_that_changes_while_it_is_read(checkpoint, tmp_path):
    source, made = convert(checkpoint("qwen3"), tmp_path / "td")
    data = made / "__0_0.distcp"

    def touch(done, total):
        if done == 9:
            os.utime(data, ns=(1, 1))

    with pytest.raises(CheckpointError, match=r"__0_0\.distcp changed while it was read"):
        to_hf(TorchDist(made), source.folder, tmp_path / "hf", touch)
    assert not list(tmp_path.glob("*hf*"))


def test_dtypes_of_the_origin_win_and_are_counted(checkpoint, tmp_path):
    source, _ = convert(checkpoint("qwen3"), tmp_path / "td")
    state, cfg = load(source.folder)
    origin = write_hf(tmp_path / "bf16", {n: t.bfloat16() for n, t in state.items()}, cfg)
    assert to_hf(TorchDist(tmp_path / "td"), origin, tmp_path / "hf") == len(state)
    assert diff(origin, tmp_path / "hf").green
    assert HfCheckpoint(tmp_path / "hf")["model.norm.weight"].dtype == torch.bfloat16


def test_the_scripts(checkpoint, tmp_path):
    def run(script, *args):
        return subprocess.run([sys.executable, str(TOOLS / script), *map(str, args)], capture_output=True, text=True, check=False)

    made = run("convert_hf_to_torch_dist.py", "--hf-checkpoint", checkpoint("gemma4"), "--save", tmp_path / "td", "--num-layers", "4")
    assert made.returncode == 0 and "ignored: --num-layers 4" in made.stderr, made.stderr
    (tmp_path / ".hf.new").mkdir()
    (tmp_path / ".hf.new" / "config.json").write_text("{}")  # of a run that was killed at its very end
    for extra in ([], ["--force"]):
        back = run("convert_torch_dist_to_hf.py", "--input-dir", tmp_path / "td", "--output-dir", tmp_path / "hf",
                   "--origin-hf-dir", checkpoint("gemma4"), *extra)
        assert back.returncode == 0, back.stderr
        assert diff(checkpoint("gemma4"), tmp_path / "hf").green
    bad = run("convert_hf_to_torch_dist.py", "--hf-checkpoint", tmp_path / "none", "--save", tmp_path / "x")
    assert bad.returncode == 2 and "Traceback" not in bad.stderr and not (tmp_path / "x").exists()
    for flag, value in (("--tensor-model-parallel-size", "0"), ("--make-vocab-size-divisible-by", "-3")):
        bad = run("convert_hf_to_torch_dist.py", "--hf-checkpoint", checkpoint("gemma4"), "--save", tmp_path / "x", f"{flag}={value}")
        assert bad.returncode == 2 and f"{flag}: found '{value}', expected a whole number above 0" in bad.stderr
    for target in (tmp_path / "td", tmp_path / "td" / "release", tmp_path, checkpoint("gemma4")):  # what the conversion reads must stay
        before = sorted(tmp_path.rglob("*"))
        bad = run("convert_torch_dist_to_hf.py", "--input-dir", tmp_path / "td", "--output-dir", target, "--origin-hf-dir", checkpoint("gemma4"), "-f")
        assert bad.returncode == 2 and "and would replace it; give a folder of its own" in bad.stderr
        assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def back(checkpoint, tmp_path):
    """``back(target, *flags)``: the script that makes a folder of Hugging Face, on a torch_dist checkpoint; its exit status."""
    convert(checkpoint("qwen3"), tmp_path / "td")
    spec = importlib.util.spec_from_file_location("convert_torch_dist_to_hf", TOOLS / "convert_torch_dist_to_hf.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return lambda target, *flags: script.main(["--input-dir", str(tmp_path / "td"), "--origin-hf-dir", str(checkpoint("qwen3")),
                                               "--output-dir", str(target), *flags])


def test_a_target_that_cannot_be_replaced_is_refused_before_anything_is_read(back, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vime.weights.torch_dist.read.to_hf", lambda *args: pytest.fail("it was converted"))
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "mine").write_text("x")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    for name, found in (("link", "a symbolic link"), ("dangling", "a symbolic link"), ("file", "no folder")):
        for flags in ((), ("--force",)):
            with pytest.raises(SystemExit) as error:
                back(tmp_path / name, *flags)
            assert error.value.code == 2 and f"{name} is {found}; expected a folder, or a name that is free" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_is_replaced_whole_or_stays(back, checkpoint, tmp_path, monkeypatch, capsys):
    target, old = tmp_path / "hf", tmp_path / ".hf.old"
    target.mkdir()
    (target / "mine").write_text("x")
    rename, rmtree = Path.rename, shutil.rmtree

    def refuse(path, to):
        if path.name == ".hf.new":
            raise OSError(errno.EACCES, "not allowed")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", refuse)
    assert back(target, "--force") == 2 and "hf: not allowed; it is as it was, and nothing was left behind" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "td"] and (target / "mine").exists()
    monkeypatch.setattr(Path, "rename", rename)

    def busy(path, *args, **kwargs):
        if Path(path).name == ".hf.old":
            raise OSError(errno.EBUSY, "busy")
        rmtree(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", busy)
    assert back(target, "--force") == 2 and "hf is written and whole, but the folder that it replaced cannot be removed" in capsys.readouterr().err
    assert diff(checkpoint("qwen3"), target).green and (old / "mine").exists()
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert back(target, "--force") == 0 and not old.exists()
    target.rename(old)  # a run that was killed between the two: what it was to replace is not lost if the next one fails
    with monkeypatch.context() as failing:
        failing.setattr("vime.weights.torch_dist.read.to_hf", lambda *args: (_ for _ in ()).throw(CannotWrite("full")))
        assert back(target, "--force") == 2
    assert diff(checkpoint("qwen3"), target).green and sorted(p.name for p in tmp_path.iterdir()) == ["hf", "td"]


def test_a_full_disk_and_a_killed_writer_leave_nothing_half_written(checkpoint, tmp_path):
    """A limit on the size of files stands for the disk; what a killed process left is removed by the next one."""
    import resource

    def run(script, *args, limit=None):
        def set_limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        return subprocess.run([sys.executable, str(TOOLS / script), *map(str, args)], capture_output=True, text=True, check=False,
                              preexec_fn=set_limit if limit else None)

    folder = checkpoint("qwen3")
    there = ("convert_hf_to_torch_dist.py", "--hf-checkpoint", folder, "--save", tmp_path / "td")
    failed = run(*there, limit=20_000)
    assert failed.returncode == 2 and "Traceback" not in failed.stderr
    assert "File too large" in failed.stderr and "Nothing was left behind" in failed.stderr
    assert not (tmp_path / "td").exists()
    (tmp_path / "td").mkdir()
    for name in (f".release.{platform.node()}-99999999.part", ".release.elsewhere-99999999.part"):  # gone here, unknown elsewhere
        (tmp_path / "td" / name).mkdir()
    assert run(*there).returncode == 0
    assert sorted(p.name for p in (tmp_path / "td").iterdir()) == [".release.elsewhere-99999999.part", TRACKER, "release"]


def test_a_source_that_changes_while_it_is_read(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("qwen3"), tmp_path / "hf")
    source = HfCheckpoint(folder)
    plan = family_for(source.config).plan(source.config, source.files)
    files = sorted(folder.glob("*.safetensors"))

    def cut(done):
        if done == 9:
            os.truncate(files[-1], files[-1].stat().st_size // 2)

    with pytest.raises(CheckpointError, match=rf"{files[-1].name} changed while it was read, at \S+; what was made"):
        write(source, plan, tmp_path / "td", cut)
    assert not (tmp_path / "td").exists()
