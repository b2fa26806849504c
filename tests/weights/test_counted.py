"""A checkpoint without tensors on disk is the checkpoint that holds the same weights as files: bits, families, both sides."""
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gates.synthetic import config_of, count, ensure
from gates.synthetic_experts import SPARSE
from vime.weights import counted
from vime.weights.checkpoint import HfCheckpoint
from vime.weights.families import family_for
from vime.weights.folders import COUNTER, CannotWrite, CheckpointError, aside
from vime.weights.raw import same_bits
from vime.weights.writer import HfWriter

TINY = [name for name in SPARSE if name.endswith("-tiny")] + ["dense-tiny"]


def as_files(source: HfCheckpoint, folder: Path) -> HfCheckpoint:
    """The same weights as an ordinary folder."""
    with HfWriter(folder, source.specs, source.files, source.other_files()) as writer:
        for name in source:
            writer.write(name, source[name])
    return HfCheckpoint(folder)


@pytest.mark.parametrize("name", TINY)
def test_the_same_as_files(name: str, tmp_path: Path) -> None:
    made = HfCheckpoint(count(config_of(name), tmp_path / "counted"))
    written = as_files(made, tmp_path / "files")
    assert sorted(os.listdir(tmp_path / "counted")) == ["config.json", "counter.json"]
    assert (tmp_path / "files" / "model.safetensors").is_file() and not counted.is_counted(written.folder)
    assert written.config == made.config and written.specs == made.specs
    assert all(same_bits(made[n], written[n]) for n in written)
    plan = family_for(made.config).plan(made.config, hf_names=made)
    made.check(plan)
    made.check_unchanged()
    assert len({made[n].sum().item() for n in made}) > len(made) / 2, "tensors differ from each other"


def test_what_it_cannot_be(tmp_path: Path) -> None:
    folder = count(config_of("dense-tiny"), tmp_path / "counted")
    good = json.loads((folder / COUNTER).read_text())

    def refused(expected: str, **changes: Any) -> None:
        (folder / COUNTER).write_text(json.dumps({**good, **changes}))
        with pytest.raises(CheckpointError, match=expected):
            HfCheckpoint(folder)

    one = good["tensors"]["lm_head.weight"]
    refused("names no tensor", tensors={})
    refused("dtype float8_e4m3fn; expected float32", tensors={"lm_head.weight": {**one, "dtype": "float8_e4m3fn"}})
    refused("scale -1", tensors={"lm_head.weight": {**one, "scale": -1}})
    refused("does not say", tensors={"lm_head.weight": {**one, "mean": "nan"}})
    refused("does not say", seed="x")
    (folder / COUNTER).write_text(json.dumps(good))
    HfCheckpoint(folder)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="remove the other"):
        HfCheckpoint(folder)


def test_it_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("dense-tiny")
    folder = tmp_path / "counted"
    folder.mkdir()
    (folder / "mine").write_text("x")
    with pytest.raises(CheckpointError, match="exists and is not an empty folder"):
        count(config, folder)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CannotWrite, match=r"cannot write .*file/counted: "):
        count(config, tmp_path / "file" / "counted")
    left = aside(tmp_path / "other")  # of an earlier process that had our number and was killed
    left.mkdir()
    (left / "counter.json").write_text("{")
    os.utime(left, (1, 1))

    def full(self: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(CannotWrite, match="No space left on device"):
            count(config, tmp_path / "other")
    assert not left.exists() and not (tmp_path / "other").exists()
    left.mkdir()
    os.utime(left, (1, 1))
    assert counted.is_counted(count(config, tmp_path / "other")) and not left.exists()


def test_a_profile_changes_its_form(tmp_path: Path) -> None:
    assert not counted.is_counted(ensure("dense-tiny", tmp_path))
    folder = ensure("dense-tiny", tmp_path, counted=True)
    before = (folder / COUNTER).stat().st_mtime_ns
    assert counted.is_counted(folder) and not list(folder.glob("*.safetensors"))
    assert ensure("dense-tiny", tmp_path, counted=True) == folder and (folder / COUNTER).stat().st_mtime_ns == before
    assert list(ensure("dense-tiny", tmp_path).glob("*.safetensors"))


def test_the_full_width_takes_a_small_file(tmp_path: Path) -> None:
    folder = ensure("glm5.2-6layer", tmp_path, counted=True)
    made = HfCheckpoint(folder)
    assert made.nbytes > 60 * 2**30 and sum(p.stat().st_size for p in folder.iterdir()) < 4 << 20
    made.check(family_for(made.config).plan(made.config, hf_names=made))
    part = made["model.layers.5.mlp.experts.255.down_proj.weight"]
    assert part.shape == (6144, 2048) and part.dtype is torch.bfloat16
