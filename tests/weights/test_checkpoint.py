"""Checkpoint folders: what is wrong is said with tensor and file; what is written appears whole or not at all."""
from __future__ import annotations

import errno
import json
import os
import platform
import re
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.weights.tiny import load, write
from vime.weights.checkpoint import HfCheckpoint
from vime.weights.errors import ConfigMismatch, WeightError
from vime.weights.families import family_for
from vime.weights.families.units import read_pieces
from vime.weights.folders import DTYPES, INDEX, CheckpointError, distribute, remove_abandoned
from vime.weights.raw import same_bits
from vime.weights.writer import HfWriter


@pytest.fixture
def folder(checkpoint, tmp_path):
    return shutil.copytree(checkpoint("qwen2"), tmp_path / "hf")


def shards(folder):
    return sorted(p.name for p in folder.glob("*.safetensors"))


def test_reads_what_safetensors_reads(case, checkpoint):
    ours, (theirs, cfg) = HfCheckpoint(checkpoint(case)), load(checkpoint(case))
    assert ours.keys() == theirs.keys() and ours.config == cfg
    assert all(same_bits(ours[n], t) and ours.specs[n] == (t.dtype, tuple(t.shape)) for n, t in theirs.items())
    ours.check(family_for(cfg).plan(cfg, hf_names=ours.files))
    ours.check_unchanged()


def test_a_missing_shard(folder):
    (folder / shards(folder)[1]).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-\d+\.safetensors is missing.*holds \d+ tensors, lm_head"):
        HfCheckpoint(folder)


def test_one_shard_of_several_without_an_index(folder):
    """Two folders that lost the same files would be equal tensor by tensor."""
    first, *others = shards(folder)
    for name in (INDEX, *others):
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match=rf"holds {first}, one of {len(others) + 1} files by its name, .*the others are missing"):
        HfCheckpoint(folder)
    (folder / first).rename(folder / "model-00001-of-00001.safetensors")
    assert len(HfCheckpoint(folder)) > 0


def test_a_shard_cut_short(folder):
    path = folder / shards(folder)[0]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model-00001-of.*cut short"):
        HfCheckpoint(folder)


def rewrite_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_wrong_indices(folder):
    first, second = shards(folder)[:2]
    good = (folder / INDEX).read_text()
    name = next(n for n, f in json.loads(good)["weight_map"].items() if f == first)
    for change, message in (
        (lambda m: m.update({name: second}), rf"{first} holds {name}, but .* says it is in {second}"),
        (lambda m: m.pop(name), rf"{first} holds {name}, but .* says it is nowhere"),
        (lambda m: m.update({"model.ghost": first}), rf"says model\.ghost is in {first}, but that file does not hold it"),
        (lambda m: m.update({name: "../x.safetensors"}), r"'\.\./x\.safetensors' is not the name of a file"),
    ):
        (folder / INDEX).write_text(good)
        rewrite_index(folder, change)
        with pytest.raises(CheckpointError, match=message):
            HfCheckpoint(folder)


@pytest.mark.parametrize("value", [5, None, ["model.safetensors"], {}])
def test_an_index_with_something_else_than_names_of_files(folder, value):
    rewrite_index(folder, lambda m: m.update({"model.norm.weight": value}))
    with pytest.raises(CheckpointError, match=r"weight_map says .* for model\.norm\.weight; expected the name of a file"):
        HfCheckpoint(folder)


def test_one_tensor_in_two_files(folder):
    first, second = shards(folder)[:2]
    a, b = load_file(folder / first), load_file(folder / second)
    name = sorted(a)[0]
    save_file({**b, name: a[name]}, folder / second)
    with pytest.raises(CheckpointError, match=rf"{name} is in {first} and again in {second}"):
        HfCheckpoint(folder)


def test_other_formats_and_broken_json(tmp_path):
    with pytest.raises(CheckpointError, match="not a folder"):
        HfCheckpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        HfCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not readable JSON"):
        HfCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file \(it holds pytorch_model\.bin"):
        HfCheckpoint(tmp_path)


def test_a_config_that_contradicts_its_tensors(folder):
    found = HfCheckpoint(folder)
    cfg = {**found.config, "intermediate_size": 40}
    with pytest.raises(ConfigMismatch, match=r"gate_proj\.weight in .*safetensors has shape \[48, 32\].* says \[40, 32\]"):
        found.check(family_for(cfg).plan(cfg, hf_names=found.files))


def test_an_unknown_tensor_is_named_with_its_file(folder):
    file = shards(folder)[0]
    save_file({**load_file(folder / file), "model.extra": torch.zeros(2)}, folder / file)
    rewrite_index(folder, lambda m: m.update({"model.extra": file}))
    found = HfCheckpoint(folder)
    with pytest.raises(WeightError, match=rf"1 unknown: model\.extra \(in {file}\)"):
        family_for(found.config).plan(found.config, hf_names=found.files)


def test_fp8_without_scales(folder):
    file = shards(folder)[0]
    state = load_file(folder / file)
    name = next(n for n in state if n.endswith("_proj.weight"))
    save_file({**state, name: state[name].to(torch.float8_e4m3fn)}, folder / file)
    found = HfCheckpoint(folder)
    with pytest.raises(CheckpointError, match=rf"{name} in {file} is F8_E4M3, but {name}_scale_inv is nowhere"):
        found.check(family_for(found.config).plan(found.config, hf_names=found.files))


@pytest.mark.parametrize("file", ["config.json", INDEX])
def test_a_config_or_an_index_changed_while_read(folder, file):
    found = HfCheckpoint(folder)
    found.check_unchanged()
    (folder / file).write_text((folder / file).read_text() + " ")
    with pytest.raises(CheckpointError, match=rf"{re.escape(file)} changed while it was read"):
        found.check_unchanged()


@pytest.mark.parametrize(("file", "field"), [("config.json", "num_hidden_layers"), (INDEX, "model.norm.weight")])
def test_a_field_that_comes_twice(folder, file, field):
    """The last wins here and the first elsewhere."""
    text = (folder / file).read_text()
    (folder / file).write_text(text.replace(f'"{field}":', f'"{field}": 3, "{field}":'))
    with pytest.raises(CheckpointError, match=rf"{re.escape(file)} is not readable JSON: {field} is in it twice"):
        HfCheckpoint(folder)


def test_a_pipe_in_the_place_of_a_file(folder):
    name = shards(folder)[0]
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read as safetensors \(it is not a plain file\)"):
        HfCheckpoint(folder)


WEIGHT = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.mark.parametrize(("change", "message"), [
    (lambda s: {WEIGHT: s[WEIGHT].bfloat16()}, rf"{WEIGHT}_scale_inv in .* belongs to FP8 bytes, but {WEIGHT} is BF16|{WEIGHT} in .* is BF16, but .*experts\.0"),
    (lambda s: {n: t.bfloat16() for n, t in s.items() if t.dtype == torch.float8_e4m3fn}, r"_scale_inv in .* belongs to FP8 bytes, but .* is BF16"),
    (lambda s: {WEIGHT: s[WEIGHT].float().to(torch.float8_e5m2)}, rf"{WEIGHT} in .* is F8_E5M2, but .*experts\.0\.down_proj\.weight is F8_E4M3"),
    (lambda s: {WEIGHT + "_scale_inv": s[WEIGHT + "_scale_inv"].bfloat16()}, rf"{WEIGHT}_scale_inv in .* is BF16, but .*experts\.0.*is F32"),
    (lambda s: {"model.norm.weight": s["model.norm.weight"] > 0}, r"model\.norm\.weight in .* is BOOL; expected a floating-point"),
    (lambda s: {"model.embed_tokens.weight": s["model.embed_tokens.weight"].to(torch.int8)}, r"embed_tokens\.weight in .* is I8; expected")])
def test_a_dtype_that_no_weight_can_have_there_is_named(fp8_checkpoint, tmp_path, change, message):
    state, cfg = load(fp8_checkpoint)
    HfCheckpoint(fp8_checkpoint).check(family_for(cfg).plan(cfg, hf_names=state))
    found = HfCheckpoint(write(tmp_path / "hf", {**state, **change(state)}, cfg))
    with pytest.raises(CheckpointError, match=message):
        found.check(family_for(cfg).plan(cfg, hf_names=found.files))


def test_a_file_changed_while_read(folder):
    found = HfCheckpoint(folder)
    os.utime(folder / shards(folder)[0], ns=(1, 1))
    with pytest.raises(CheckpointError, match=r"model-00001.*changed while it was read"):
        found.check_unchanged()


def test_a_file_cut_short_in_the_middle_of_a_tensor(folder, monkeypatch):
    """As a download that begins again does. Through a mapping the process would end here, by a signal."""
    found = HfCheckpoint(folder)
    file = folder / found.files["model.embed_tokens.weight"]
    read = os.preadv

    def short(fd, buffers, offset):
        done = read(fd, [buffers[0][:1000]], offset)
        os.truncate(file, offset + 500)
        return done

    monkeypatch.setattr(os, "preadv", short)
    with pytest.raises(CheckpointError, match=rf"{file.name} changed while it was read, at model\.embed_tokens\.weight"):
        found["model.embed_tokens.weight"]


def test_one_slice_of_a_stacked_tensor_is_read_alone(checkpoint, monkeypatch):
    found = HfCheckpoint(checkpoint("gemma4"))
    name = "model.layers.1.experts.gate_up_proj"
    whole, read, sizes = found[name], os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: sizes.append(len(buffers[0])) or read(fd, buffers, at))
    unit = next(u for u in family_for(found.config).plan(found.config, found.files).units if u.hf[0].name == name and u.expert == 5)
    assert same_bits(read_pieces(unit, found)[0], whole[5]) and sizes == [whole[5].nbytes]


def test_tensors_of_several_dtypes_that_megatron_holds_as_one(folder):
    file = next(f for f in shards(folder) if any("k_proj.weight" in n for n in load_file(folder / f)))
    state = load_file(folder / file)
    name = next(n for n in state if "k_proj.weight" in n)
    save_file({**state, name: state[name].bfloat16()}, folder / file)
    found = HfCheckpoint(folder)
    with pytest.raises(CheckpointError, match=rf"linear_qkv\.weight is made of tensors of several dtypes: .*{name} in {file} is BF16"):
        found.check(family_for(found.config).plan(found.config, hf_names=found.files))


SPECS = st.dictionaries(
    st.text("abc.", min_size=1, max_size=4),
    st.tuples(st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 4), max_size=3).map(tuple)),
    min_size=1, max_size=6)


@settings(max_examples=50, deadline=None)
@given(specs=SPECS, shard_bytes=st.sampled_from([1, 64, 10**9]), order=st.randoms())
def test_written_files_are_read_back_by_safetensors(tmp_path_factory, specs, shard_bytes, order):
    folder = tmp_path_factory.mktemp("w") / "out"
    state = {}
    for name, (dtype, shape) in specs.items():
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
        state[name] = raw.view(dtype).reshape(shape)
    names = list(state)
    order.shuffle(names)
    with HfWriter(folder, specs, shard_bytes=shard_bytes) as writer:
        for name in names:
            writer.write(name, state[name])
        assert not folder.exists()
    back = {}
    for file in folder.glob("*.safetensors"):
        back |= load_file(file)
    assert back.keys() == state.keys() and all(same_bits(back[n], state[n]) for n in state)


def test_a_stacked_tensor_is_written_slice_by_slice(tmp_path):
    x = torch.randn(4, 3, 2)
    with HfWriter(tmp_path / "o", {"x": (x.dtype, tuple(x.shape))}) as writer:
        for part in (2, 0, 3, 1):
            writer.write("x", x[part], part)
    assert torch.equal(load_file(tmp_path / "o" / "model.safetensors")["x"], x)


@pytest.mark.parametrize(("parts", "message"), [
    ((0, 1, 3), r"x: got slice 3 to write, announced shape \[3, 2\]"), ((0, 1, -1), "x: got slice -1"), ((0, 1, 1), r"written twice \(slice 1\)"),
    ((1, None), "x was written twice"), ((None, 2), r"written twice \(slice 2\)")])
def test_a_slice_that_a_tensor_does_not_have_is_not_written_over_its_neighbour(tmp_path, parts, message):
    x = torch.ones(3, 2)
    with pytest.raises(CheckpointError, match=message), HfWriter(tmp_path / "o", {"x": (x.dtype, (3, 2)), "y": (x.dtype, (3, 2))}) as writer:
        writer.write("y", x)
        for part in parts:
            writer.write("x", x if part is None else x[part % 3], part)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("files", "message"), [
    ({"x": "a.safetensors"}, "y has no file"), ({"x": "a.safetensors", "y": "../b.safetensors"}, "'../b.safetensors' is not the name of a file"),
    ({"x": "a.safetensors", "y": "a.safetensors", "z": "a.safetensors"}, "z has a file, but no dtype")])
def test_files_that_do_not_hold_what_is_written_are_refused(tmp_path, files, message):
    with pytest.raises(CheckpointError, match=message):
        HfWriter(tmp_path / "o", dict.fromkeys("xy", (torch.float32, (2,))), files)


def test_nothing_is_left_of_a_failed_write(tmp_path, monkeypatch):
    specs = {"a": (torch.float32, (2,)), "b": (torch.float32, (2,))}
    for problem, message in (
        (lambda w: w.write("c", torch.zeros(2)), "c was not announced"),
        (lambda w: w.write("a", torch.zeros(3)), "announced"),
        (lambda w: w.write("a", torch.zeros(2, dtype=torch.bfloat16)), "announced"),
        (lambda w: (w.write("a", torch.zeros(2)), w.write("a", torch.zeros(2))), "a was written twice"),
        (lambda w: w.write("a", torch.zeros(2)), "1 tensors of .* not completely written, b the first"),
    ):
        with pytest.raises(CheckpointError, match=message), HfWriter(tmp_path / "o", specs) as writer:
            problem(writer)
        assert list(tmp_path.iterdir()) == []

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for call in ("posix_fallocate", "pwrite"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(CheckpointError, match=r"No space left.*nothing was left behind"), HfWriter(tmp_path / "o", specs) as w:
                w.write("a", torch.zeros(2))
        assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    """Killed in the middle, it cannot clean up; the folder has no name until it is whole."""
    code = ("import os, signal, torch; from vime.weights.writer import HfWriter\n"
            f"with HfWriter({str(tmp_path / 'o[1]')!r}, {{'x': (torch.float32, (4,)), 'y': (torch.float32, (4,))}}) as writer:\n"
            "    writer.write('x', torch.zeros(4)); os.kill(os.getpid(), signal.SIGKILL)")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    left = [p.name for p in tmp_path.iterdir()]
    assert len(left) == 1 and left[0].startswith(".o[1].")
    for pid in (99999999, os.getpid()):  # of no process, and of an earlier one that had our number; the next two of a running one and of another machine
        (tmp_path / f".o[1].{platform.node()}-{pid}.part").mkdir()
        os.utime(tmp_path / f".o[1].{platform.node()}-{pid}.part", (1, 1))
    kept = [f".o[1].{platform.node()}-1.part", ".o[1].elsewhere-99999999.part"]
    for name in kept:
        (tmp_path / name).mkdir()
    with HfWriter(tmp_path / "o[1]", {"x": (torch.float32, (2,))}) as writer:
        writer.write("x", torch.ones(2))
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*kept, "o[1]"])
    with HfWriter(tmp_path / "two", {"x": (torch.float32, (2,))}) as writer:
        remove_abandoned(tmp_path / "two")  # this process is at it
        writer.write("x", torch.ones(2))
    assert (tmp_path / "two" / "model.safetensors").stat().st_size > 8


def test_an_existing_folder_is_not_overwritten(tmp_path):
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "mine").write_text("x")
    with pytest.raises(CheckpointError, match="not an empty folder"):
        HfWriter(tmp_path / "o", {})


def test_files_are_filled_in_order():
    specs = {n: (torch.uint8, (s,)) for n, s in (("a", 5), ("b", 5), ("c", 11), ("d", 1))}
    assert list(distribute(specs, 10).values()) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 1, 2, 3)]
