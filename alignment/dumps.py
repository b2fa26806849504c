"""Files of tensors that somebody else wrote, opened without trusting them.

safetensors (one file, or the shards of a checkpoint directory), ``.npz``, ``.npy``, ``.pt`` (weights only: no pickled
code runs) and ``.json`` numbers become a mapping name -> tensor that reads a tensor when it is asked for. A header is
checked against the file before anything is read: a truncated file, an offset outside it, two tensors in one place,
a name that is used twice or that is a path out of the directory are errors that say what was found.
"""
from __future__ import annotations

import itertools
import json
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alignment.errors import InputError, KeyCollision
from alignment.formats import SAFETENSORS, format_of
from alignment.rules import rename
from alignment.sources import FileSource, as_tensor

__all__ = ["SUFFIXES", "Dump", "check_name", "open_dump", "parse_json", "read_json", "rename", "unique"]

MAX_HEADER = 100 << 20
SUFFIXES = (".safetensors", ".npz", ".npy", ".pt", ".pth", ".bin", ".json")


class Dump(Mapping[str, Any]):
    """A mapping name -> tensor (or a Source that reads it from the file). Use it as a context manager to close it."""

    unordered = True  # a file does not say in which order its tensors were computed

    def __init__(self, path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None,
                 files: tuple[int, ...] = (), skipped: Mapping[str, Any] | None = None) -> None:  # fmt: skip
        self.path, self._tensors, self._files = path, tensors, files
        self.skipped = dict(skipped or {})  # entries that are no numbers, by name
        self.metadata = dict(metadata or {})

    def __getitem__(self, name: str) -> Any:
        value = self._tensors[name]
        return value() if callable(value) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def close(self) -> None:
        for fd in self._files:
            os.close(fd)
        self._files = ()

    def __enter__(self) -> Dump:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_name(name: Any, where: object) -> str:
    """A tensor or file name that cannot lead anywhere else. Raises InputError."""
    bad = (
        not isinstance(name, str) or not name or len(name) > 512 or name.startswith(("/", "~")) or "\\" in name
        or not name.isprintable() or ".." in name.split("/")
    )  # fmt: skip
    if bad:
        raise InputError(f"{where} names a tensor {str(name)[:80]!r}", "a plain name without '..', control characters or a leading '/'",
                         "do not use this file: it was made to mislead, or is damaged")
    return name


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json: an object that refuses a key it has already."""
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise KeyCollision(f"the key {key!r} is there twice", "one value a key")
        out[key] = value
    return out


def parse_json(text: bytes, where: str) -> Any:
    """JSON with duplicate keys refused. Raises InputError for anything that is not JSON."""
    try:
        return json.loads(text, object_pairs_hook=unique)
    except KeyCollision as e:
        raise KeyCollision(f"{where}: {e.found}", e.expected) from e
    except (ValueError, RecursionError) as e:
        raise InputError(f"{where} is not JSON ({e})", "a JSON document", "write it again") from e


def read_json(path: Path) -> Any:
    return parse_json(path.read_bytes(), path.name)


def open_dump(path: str | os.PathLike[str]) -> Dump:
    """Open a file of tensors, or a directory of safetensors shards. Raises InputError (KeyCollision for a name that is
    there twice) for anything that is not what it says, FileNotFoundError if there is nothing."""
    path = Path(path)
    if path.is_dir():
        return _directory(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(f"{path.name} has the suffix {suffix or '(none)'}", "one of " + ", ".join(SUFFIXES))
    if path.stat().st_size == 0:
        raise InputError(f"{path.name} is empty", f"a {suffix} file")
    try:
        if suffix == ".safetensors":
            return _safetensors([path])
        if suffix in (".npz", ".npy"):
            return _numpy(path)
        return _nested(path, read_json(path) if suffix == ".json" else read_torch(path))
    except InputError:
        raise
    except Exception as e:  # whatever a reader raises on damaged bytes, the caller gets one kind of error
        raise InputError(f"{path.name} cannot be read ({type(e).__name__}: {str(e)[:200]})", f"a whole {suffix} file") from e


def _directory(path: Path) -> Dump:
    shards = sorted(p for p in path.iterdir() if p.suffix == ".safetensors")
    if not shards:
        others = sorted({p.suffix for p in path.iterdir() if p.suffix in (*SUFFIXES, ".jsonl", ".distcp")})
        todo = "convert it with tools/convert_torch_dist_to_hf.py" if ".distcp" in others else "compare them one by one" if others else ""
        raise InputError(f"{path.name} holds no .safetensors file" + (f", but {', '.join(others)}" if others else ""),
                         "a checkpoint directory or a directory of records", todo)
    dump = _safetensors(shards)
    index = path / "model.safetensors.index.json"
    if index.exists():
        listed = read_json(index)
        names = listed.get("weight_map") if isinstance(listed, dict) else None
        if not isinstance(names, dict):
            raise InputError(f"{index.name} has no weight_map", "an object name -> file")
        here = {p.name for p in shards}
        for name, file in names.items():
            if file not in here:
                raise InputError(f"{index.name} says that {name} is in {str(file)[:80]!r}", f"one of the {len(here)} shards beside it",
                                 "copy the missing shards")  # fmt: skip
        loose = sorted(set(dump) - set(names))
        if loose:
            raise InputError(f"a shard holds {loose[0]} ({len(loose)} such), which {index.name} does not list",
                             "every tensor in the index: who loads by it gets less than the files hold")  # fmt: skip
        missing = sorted(set(names) - set(dump))
        if missing:
            raise InputError(f"{index.name} lists {missing[0]} ({len(missing)} such), which no shard holds",
                             "every listed tensor", "copy the missing shards")  # fmt: skip
    return Dump(path, dump._tensors, dump.metadata, dump._files)


def _safetensors(paths: list[Path]) -> Dump:
    tensors: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    files: list[int] = []
    try:
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            files.append(fd)
            header, start, size = _header(fd, path)
            metadata.update(header.pop("__metadata__", None) or {})
            for name, entry in header.items():
                check_name(name, path.name)
                if name in tensors:
                    raise KeyCollision(f"{path.name} has {name!r}, which another shard has too", "one tensor a name")
                tensors[name] = _entry(fd, name, entry, start, size, path)
    except BaseException:
        for fd in files:
            os.close(fd)
        raise
    return Dump(paths[0], tensors, metadata, tuple(files))


def _header(fd: int, path: Path) -> tuple[dict[str, Any], int, int]:
    size = os.fstat(fd).st_size
    head = os.pread(fd, 8, 0)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(size - 8, MAX_HEADER):
        raise InputError(f"{path.name} has {size} bytes and promises a header of {length}", "a whole safetensors file")
    header = parse_json(os.pread(fd, length, 8), f"the header of {path.name}")
    if not isinstance(header, dict):
        raise InputError(f"{path.name} has a header of type {type(header).__name__}", "an object")
    spans = sorted(
        tuple(e["data_offsets"]) for n, e in header.items()
        if n != "__metadata__" and isinstance(e, dict) and isinstance(e.get("data_offsets"), list)
        and len(e["data_offsets"]) == 2 and all(type(x) is int for x in e["data_offsets"])
    )  # fmt: skip
    for (b0, e0), (b1, _) in itertools.pairwise([(0, 0), *spans]):
        if b1 < e0 and b0 != e0:
            raise InputError(f"{path.name} has two tensors in the bytes {b1} to {e0}", "tensors that do not overlap")
        if b1 > e0:
            raise InputError(f"{path.name} has {b1 - e0} bytes at {e0} that belong to no tensor", "tensors one right after another",
                             "it was changed after it was written, or its header lost a tensor: write it again")  # fmt: skip
    end = max((e for _, e in spans), default=0)
    if 8 + length + end < size:
        raise InputError(f"{path.name} has {size - 8 - length - end} bytes that belong to no tensor", "data that ends with the last tensor",
                         "it was changed after it was written, or its header lost a tensor: write it again")  # fmt: skip
    return header, 8 + length, size


def _entry(fd: int, name: str, entry: Any, start: int, size: int, path: Path) -> FileSource:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if dtype not in SAFETENSORS or not all(type(s) is int and s >= 0 for s in shape):
            raise TypeError(f"dtype {dtype}, shape {shape}")
        source = FileSource(fd, start + begin, format_of(dtype, name), shape, path.name)
        ok = type(begin) is int and type(end) is int and 0 <= begin <= end <= size - start
    except (KeyError, TypeError, ValueError) as e:
        raise InputError(f"{path.name} describes {name} as {str(entry)[:120]} ({e})", "dtype, shape and data_offsets") from e
    if not ok or end - begin != source.nbytes:
        raise InputError(f"{path.name}: {name} needs {source.nbytes} bytes and has {begin} to {end} of {size - start}",
                         "offsets inside the file", "it is truncated or damaged: write it again")  # fmt: skip
    return source


def _numpy(path: Path) -> Dump:
    if path.suffix.lower() == ".npy":
        return Dump(path, {path.stem: _array(np.load(path, allow_pickle=False), path.name)})
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    for name in names:
        check_name(name, path.name)
    twice = {n for n in names if names.count(n) > 1}
    if twice:
        raise KeyCollision(f"{path.name} has {min(twice)!r} twice", "one array a name")
    arrays = np.load(path, allow_pickle=False)

    def lazily(name: str) -> Any:
        def load() -> torch.Tensor:
            try:
                return _array(arrays[name], name)
            except InputError:
                raise
            except Exception as e:
                raise InputError(f"{path.name}: {name} cannot be read ({e})", "a plain array (no pickled objects)") from e
        return load

    return Dump(path, {n.removesuffix(".npy"): lazily(n.removesuffix(".npy")) for n in names})


def _array(array: np.ndarray, name: str) -> Any:
    """A tensor; or the array as it is where numpy has no name for its dtype (bfloat16), so that a mapping file can give it one."""
    return array if array.dtype.kind == "V" and array.dtype.names is None else as_tensor(array, name)


def read_torch(path: Path) -> Any:
    """What ``torch.save`` wrote, without running any code of it; tensors are mapped, not read. Raises InputError."""
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as e:
            if "mmap" not in str(e):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)  # the old format cannot be mapped
    except pickle.UnpicklingError as e:
        raise InputError(f"{path.name} holds more than tensors, and its code is not run", "a file that loads weights-only",
                         "save a plain dict of tensors, or convert it to safetensors where it was made") from e
    except Exception as e:  # whatever a reader raises on damaged bytes, the caller gets one kind of error
        raise InputError(f"{path.name} cannot be read ({type(e).__name__}: {str(e)[:200]})", f"a whole {path.suffix.lower()} file") from e


def _nested(path: Path, content: Any) -> Dump:
    """Nested mappings become dotted names; text and None are left out and named by ``skipped``, anything else is refused."""
    out: dict[str, Any] = {}
    skipped: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        key = prefix or path.stem
        if isinstance(value, Mapping):
            for name, item in value.items():
                walk(f"{prefix}.{check_name(str(name), path.name)}" if prefix else check_name(str(name), path.name), item)
        elif isinstance(value, list | tuple) and any(isinstance(v, Mapping | torch.Tensor) for v in value):
            for i, item in enumerate(value):
                walk(f"{prefix}.{i}" if prefix else str(i), item)
        elif value is None or isinstance(value, _NO_NUMBERS) or (isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value)):
            skipped[key] = value
        else:
            if key in out:
                raise KeyCollision(f"{path.name} has {key!r} twice once nested names are joined", "one tensor a name")
            tensor = as_tensor(value, key)
            if isinstance(value, torch.Tensor):
                _fits_its_file(tensor, key, path)
            out[key] = value if isinstance(value, list | int | float) else tensor  # plain numbers have no dtype of their own

    walk("", content)
    return Dump(path, out, skipped=skipped)


_NO_NUMBERS = (str, bytes, torch.Size, torch.dtype, torch.device)


def _fits_its_file(tensor: torch.Tensor, name: str, path: Path) -> None:
    """A stride of 0 says one number a million times: a small file may claim more than any memory holds."""
    if tensor.layout is torch.strided and not tensor.is_nested and tensor.nbytes > 64 * max(path.stat().st_size, 1 << 24):
        raise InputError(f"{path.name}: {name} has {tensor.nbytes} bytes by its shape {list(tensor.shape)}, and the file {path.stat().st_size}",
                         "numbers that the file holds", "call .contiguous() or .clone() before saving, or save what was expanded")
