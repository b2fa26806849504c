"""What a checkpoint folder is made of: its files, the dtypes of safetensors, how tensors are spread, and how one appears whole.

The format is safetensors: 8 bytes little-endian header length, a JSON header, the data
(https://huggingface.co/docs/safetensors). :mod:`vime.weights.checkpoint` reads such a folder, :mod:`vime.weights.writer`
writes one.
"""
from __future__ import annotations

import json
import math
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from vime.weights.errors import WeightError

INDEX = "model.safetensors.index.json"
#: Stands in the place of tensors that are made of a counter (:mod:`vime.weights.counted`).
COUNTER = "counter.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SHARD_BYTES = 5 * 1000**3

Spec = tuple[torch.dtype, tuple[int, ...]]


class CheckpointError(WeightError):
    """A checkpoint folder that cannot be read or written as it is. The message names file and tensor."""


class CannotWrite(CheckpointError):
    """The disk is full, or may not be written to. Nothing was left behind."""


def require_free(folder: Path) -> None:
    """Raise :class:`CheckpointError` unless a folder of this name can appear: there is none, or an empty one."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not an empty folder; give another name or remove it")


def size_text(nbytes: int) -> str:
    """``5.313 GB``; below a megabyte ``1234 bytes``."""
    return f"{nbytes / 1e9:.3f} GB" if nbytes >= 1e6 else f"{nbytes} bytes"


def aside(folder: Path) -> Path:
    """Where this process builds ``folder`` before it gets its name."""
    return folder.with_name(f".{folder.name}.{platform.node()}-{os.getpid()}.part")


def remove_abandoned(folder: Path) -> None:
    """Remove what killed writers of ``folder`` on this machine have left beside it (see :func:`aside`). What has the number of this
    process and is older is of an earlier one, as in a container that was started again."""
    import psutil

    prefix = f".{folder.name}.{platform.node()}-"
    for path in list(folder.parent.iterdir()) if Path("/proc/self").exists() else []:
        pid = path.name.removeprefix(prefix).removesuffix(".part")
        if path.name != f"{prefix}{pid}.part" or not pid.isdecimal():
            continue
        ours = pid == str(os.getpid()) and path.stat().st_mtime < psutil.Process().create_time()
        if ours or not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)


def other_files(folder: Path) -> list[Path]:
    """Every plain file of a folder that holds no weights."""
    skip = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
    return [p for p in sorted(folder.iterdir()) if p.is_file() and p.suffix not in skip and p.name not in (INDEX, COUNTER)]


def state_of(path: Path) -> tuple[int, int, int]:
    """What changes when a file is written to or replaced."""
    info = path.stat()
    return info.st_size, info.st_mtime_ns, info.st_ino


def spec_bytes(spec: Spec) -> int:
    """Bytes of a tensor of that dtype and shape."""
    dtype, shape = spec
    return dtype.itemsize * math.prod(shape)


def distribute(specs: Mapping[str, Spec], shard_bytes: int = SHARD_BYTES) -> dict[str, str]:
    """Tensor -> file name, filling files in order up to ``shard_bytes`` (a larger tensor gets its own file)."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, spec in specs.items():
        size = spec_bytes(spec)
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    if len(shards) == 1:
        return dict.fromkeys(shards[0], "model.safetensors")
    return {n: f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i, shard in enumerate(shards, 1) for n in shard}


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object, whose fields must not come twice: each reader would take another one."""
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is in it twice")
    return out


def read_json(path: Path) -> dict:
    """A JSON object. Raises :class:`CheckpointError` for a file that is missing or holds something else."""
    try:
        data = json.loads(path.read_text(), object_pairs_hook=_once)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; a checkpoint folder needs it") from None
    except (OSError, ValueError) as error:  # no UTF-8, no JSON, or a field twice
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}; expected a JSON object")
    return data
