"""A checkpoint folder without tensors: ``config.json`` and a file that says of which counter each tensor is made.

``counter.json`` is ``{"seed": S, "tensors": {NAME: {"dtype": "bfloat16", "shape": [..], "mean": M, "scale": S}}}``; the elements are
those of :mod:`vime.weights.counter`. :class:`vime.weights.checkpoint.HfCheckpoint` opens such a folder like any other, and
makes a tensor where and when it is asked for.
"""
from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from vime.weights import counter
from vime.weights.folders import COUNTER, CannotWrite, aside, remove_abandoned, require_free
from vime.weights.manifest import dtype_from, dtype_name

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Drawn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: mean and scale (the standard deviation) of the distribution it is drawn from."""

    dtype: str
    shape: tuple[int, ...]
    mean: float
    scale: float


class Counted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All tensors, in the order of a file."""

    seed: int
    tensors: dict[str, Drawn]

    def specs(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {name: (dtype_from(one.dtype), one.shape) for name, one in self.tensors.items()}

    def tensor(self, name: str, device: torch.device | str) -> torch.Tensor:
        one = self.tensors[name]
        return counter.tensor(name, one.shape, one.mean, one.scale, dtype_from(one.dtype), device, self.seed)


def is_counted(folder: str | Path) -> bool:
    """Whether the weights of a folder are made of a counter."""
    return (Path(folder) / COUNTER).is_file()


def read(folder: Path) -> Counted:
    """Raises ValueError for a file that doesn't say what a tensor is made of, or that lies beside tensors."""
    path = folder / COUNTER
    if files := sorted(p.name for p in folder.glob("*.safetensors")):
        raise ValueError(f"{folder} holds {COUNTER} and {files[0]}: one of the two says what the weights are; remove the other")
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Counted)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} does not say what the tensors are made of: {error}") from error
    if not found.tensors:
        raise ValueError(f"{path} names no tensor")
    for name, one in found.tensors.items():
        if getattr(torch, one.dtype, None) not in _DTYPES:
            raise ValueError(f"{path}: {name} has dtype {one.dtype}; expected {', '.join(map(dtype_name, _DTYPES))}")
        if min(one.shape, default=1) < 0 or not (math.isfinite(one.mean) and 0 <= one.scale < math.inf):
            raise ValueError(f"{path}: {name} has shape {list(one.shape)}, mean {one.mean}, scale {one.scale}")
    return found


def write(folder: Path, config: Mapping[str, Any], entries: Iterable[tuple[str, Drawn]], seed: int = 0) -> Path:
    """Write such a folder, which must not exist or be empty; it appears whole or not at all.

    Raises:
        vime.weights.folders.CheckpointError: there is something of that name, or the disk is full or not to be written to.
    """
    require_free(folder)
    part = aside(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(folder)
        part.mkdir()
        (part / COUNTER).write_bytes(msgspec.json.encode(Counted(seed, dict(entries))))
        (part / "config.json").write_text(json.dumps(config, indent=1))
        os.replace(part, folder)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError):
            raise CannotWrite(f"cannot write {folder}: {error.strerror or error}. Nothing was left behind.") from error
        raise
    return folder
