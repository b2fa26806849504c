"""Reads HF checkpoint folders tensor by tensor, and writes them so that a half-written one never exists.

Reading maps the files and copies nothing until somebody touches the bytes. Everything that can be known to be wrong
is said on opening, with the tensor and the file: a shard that is missing or cut short, an index that names other
tensors than the files hold, one tensor in two files. Writing knows every dtype and shape beforehand, so the files
are laid out first and each piece goes to its place in any order: memory stays near the largest piece, a full disk
is noticed before the first tensor, and the folder gets its name only when every byte of it was written once.

The format is safetensors: 8 bytes little-endian header length, a JSON header, the data
(https://huggingface.co/docs/safetensors).
"""
from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from vime.weights import counted
from vime.weights.families.base import ConfigMismatch, Plan, WeightError, raw_bytes

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SHARD_BYTES = 5 * 1000**3

Spec = tuple[torch.dtype, tuple[int, ...]]


class CheckpointError(WeightError):
    """A checkpoint folder that cannot be read or written as it is. The message names file and tensor."""


class CannotWrite(CheckpointError):
    """The disk is full, or may not be written to. Nothing was left behind."""


class HfCheckpoint(Mapping[str, torch.Tensor]):
    """A folder of safetensors files as a read-only mapping from name to tensor (mapped, not copied).

    ``specs`` holds dtype and shape of every tensor and ``files`` its file, both without reading any data. Raises
    :class:`CheckpointError` on opening for what is wrong with the folder itself. Where the tensors are made of a counter
    (:mod:`vime.weights.counted`) they are made when they are asked for, on ``device``; ``files`` then names those that a copy
    on disk would have.
    """

    def __init__(self, folder: str | Path, device: torch.device | str = "cpu"):
        self.folder, self.device = Path(folder), device
        self.specs: dict[str, Spec] = {}
        self.files: dict[str, str] = {}
        self._handles: dict[str, object] = {}
        self._stat: dict[str, tuple[int, int, int]] = {}
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is not a folder; expected one with config.json and *.safetensors files")
        self.config = read_json(self.folder / "config.json")
        self.counted: counted.Counted | None = None
        if counted.is_counted(self.folder):
            self._open_counted()
            return
        for file in self._list_files():
            self._open(file)

    def _open_counted(self) -> None:
        try:
            self.counted = counted.read(self.folder)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        self.specs = self.counted.specs()
        self.files = distribute(self.specs)
        self._stat[counted.FILE] = _stat(self.folder / counted.FILE)

    def _list_files(self) -> list[str]:
        present = sorted(p.name for p in self.folder.glob("*.safetensors"))
        index = self.folder / INDEX
        if not index.exists():
            if not present:
                other = sorted(p.name for p in self.folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
                hint = f" (it holds {', '.join(other[:3])}, which is not read here: convert it first)" if other else ""
                raise CheckpointError(f"{self.folder} holds no *.safetensors file{hint}")
            if len(present) > 1:
                raise CheckpointError(f"{self.folder} holds {len(present)} *.safetensors files but no {INDEX}")
            return present
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map")
        self._weight_map: dict[str, str] = weight_map
        needed = sorted(set(weight_map.values()))
        for file in needed:
            if Path(file).name != file:
                raise CheckpointError(f"{index}: {file!r} is not the name of a file in this folder")
            if file not in present:
                tensors = [n for n, f in weight_map.items() if f == file]
                raise CheckpointError(f"{self.folder / file} is missing; {INDEX} says it holds {len(tensors)} tensors, "
                                      f"{tensors[0]} the first. Download that file again.")
        return needed

    def _open(self, file: str) -> None:
        path = self.folder / file
        try:
            handle = safe_open(path, framework="pt")
            names = list(handle.keys())
            for name in names:
                if name in self.files:
                    raise CheckpointError(f"{name} is in {self.files[name]} and again in {file}")
                piece = handle.get_slice(name)
                code = piece.get_dtype()
                if code not in DTYPES:
                    raise CheckpointError(f"{path}: {name} has dtype {code}, which is not supported")
                self.files[name] = file
                self.specs[name] = (DTYPES[code], tuple(piece.get_shape()))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read as safetensors ({error}); it may be cut short, copy it again") from error
        self._handles[file] = handle
        self._stat[file] = _stat(path)
        listed = getattr(self, "_weight_map", None)
        if listed is not None:
            for name in names:
                if listed.get(name) != file:
                    said = f"in {listed[name]}" if name in listed else "nowhere"
                    raise CheckpointError(f"{path} holds {name}, but {INDEX} says it is {said}")
            if absent := [n for n, f in listed.items() if f == file and n not in self.specs]:
                raise CheckpointError(f"{INDEX} says {absent[0]} is in {file}, but that file does not hold it")

    def __getitem__(self, name: str) -> torch.Tensor:
        if self.counted is not None:
            return self.counted.tensor(name, self.device)
        file = self.files[name]
        self._check_file(file, name)  # a mapped file that was cut short since would end the process
        try:
            return self._handles[file].get_tensor(name)  # type: ignore[attr-defined]
        except SafetensorError as error:
            raise CheckpointError(f"{name} cannot be read from {self.folder / file}: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __contains__(self, name: object) -> bool:
        return name in self.files

    @property
    def nbytes(self) -> int:
        return sum(spec_bytes(spec) for spec in self.specs.values())

    def check(self, plan: Plan) -> None:
        """Raise :class:`ConfigMismatch` for the first tensor whose shape is not what the config says, and
        :class:`CheckpointError` for an FP8 tensor without its scales."""
        for name, shape in plan.hf_tensors().items():
            found = self.specs[name][1]
            if found != shape:
                raise ConfigMismatch(
                    f"{name} in {self.folder / self.files[name]} has shape {list(found)}; config.json of this "
                    f"{plan.family} model says {list(shape)}. One of the two belongs to another checkpoint."
                )
        for name, (dtype, _) in self.specs.items():
            if dtype in FP8 and name.endswith(".weight") and name + "_scale_inv" not in self:
                raise CheckpointError(f"{name} in {self.files[name]} is {NAMES[dtype]}, but {name}_scale_inv is nowhere: "
                                      "FP8 bytes without their scales are not weights")

    def check_unchanged(self) -> None:
        """Raise :class:`CheckpointError` if a file was replaced or written to since it was opened."""
        for file in self._stat:
            self._check_file(file)

    def _check_file(self, file: str, name: str = "") -> None:
        path = self.folder / file
        try:
            same = _stat(path) == self._stat[file]
        except OSError:
            same = False
        if not same:
            raise CheckpointError(f"{path} changed while it was read{f', before {name}' if name else ''}; what was made from it is not to be "
                                  "trusted")

    def other_files(self) -> list[Path]:
        """Config, tokenizer and so on: every plain file that holds no weights."""
        return other_files(self.folder)


class HfWriter:
    """Writes an HF folder of known content, piece by piece and in any order; the folder appears at the end or never.

    Args:
        folder: where it goes. Must not exist, or be empty.
        specs: dtype and shape of every tensor, in the order in which files are filled.
        files: tensor -> file name, to keep a given distribution over files; else files of ``shard_bytes`` at most.
        copy: further files to take along (config, tokenizer).

    Use as a context manager: on an exception, everything written is removed.
    """

    def __init__(self, folder: str | Path, specs: Mapping[str, Spec], files: Mapping[str, str] | None = None,
                 copy: list[Path] | None = None, shard_bytes: int = SHARD_BYTES):
        self.folder = Path(folder)
        require_free(self.folder)
        for name, (dtype, _) in specs.items():
            if dtype not in NAMES:
                raise CheckpointError(f"{name}: dtype {dtype} cannot be stored in safetensors")
        self._specs, self._copy = dict(specs), list(copy or [])
        self._where = dict(files) if files is not None else distribute(specs, shard_bytes)
        self._aside = aside(self.folder)
        self._left = {name: spec_bytes(spec) for name, spec in specs.items()}
        self._place: dict[str, tuple[int, int]] = {}  # tensor -> file descriptor, offset
        self._seen: dict[str, set[int]] = {}
        self._fds: list[int] = []

    def __enter__(self) -> HfWriter:
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(self.folder)
            self._aside.mkdir()
            for file in sorted(set(self._where.values())):
                self._lay_out(file)
        except BaseException as error:
            self._discard()
            raise self._explain(error) from error
        return self

    def _lay_out(self, file: str) -> None:
        """Header first, and the whole length claimed from the disk."""
        names = [n for n, f in self._where.items() if f == file]
        names.sort(key=lambda n: (-self._specs[n][0].itemsize, n))  # widest first: every tensor stays aligned
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            dtype, shape = self._specs[name]
            begin, end = end, end + spec_bytes((dtype, shape))
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        fd = os.open(self._aside / file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._fds.append(fd)
        os.posix_fallocate(fd, 0, 8 + len(text) + end)
        _pwrite_all(fd, memoryview(len(text).to_bytes(8, "little") + text), 0)
        for name in names:
            self._place[name] = (fd, 8 + len(text) + header[name]["data_offsets"][0])  # type: ignore[index]

    def write(self, name: str, tensor: torch.Tensor, part: int | None = None) -> None:
        """Write a tensor, or slice ``part`` of a stacked one. Dtype and shape must be the announced ones."""
        if name not in self._specs:
            raise CheckpointError(f"{name} was not announced to the writer of {self.folder}")
        dtype, shape = self._specs[name]
        shape = shape if part is None else shape[1:]
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise CheckpointError(f"{name}: got {tensor.dtype} {list(tensor.shape)} to write, announced {dtype} {list(shape)}")
        seen = self._seen.setdefault(name, set())
        if (part or 0) in seen:
            raise CheckpointError(f"{name} was written twice" + ("" if part is None else f" (slice {part})"))
        seen.add(part or 0)
        data = raw_bytes(tensor).cpu().numpy()
        fd, offset = self._place[name]
        try:
            _pwrite_all(fd, data.data, offset + (part or 0) * data.nbytes)
        except OSError as error:
            raise self._explain(error) from error
        self._left[name] -= data.nbytes

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            self._finish()
        except BaseException as problem:
            self._discard()
            raise self._explain(problem) from problem

    def _finish(self) -> None:
        if open_ := [n for n, left in self._left.items() if left]:
            raise CheckpointError(f"{len(open_)} tensors of {self.folder} were not completely written, {open_[0]} the first")
        while self._fds:
            fd = self._fds.pop()
            os.fsync(fd)
            os.close(fd)
        if len(set(self._where.values())) > 1:
            total = sum(spec_bytes(s) for s in self._specs.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(self._where.items()))}
            (self._aside / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for path in self._copy:
            shutil.copyfile(path, self._aside / path.name)
        if self.folder.exists():
            self.folder.rmdir()  # empty: checked when this writer was made
        os.rename(self._aside, self.folder)

    def _discard(self) -> None:
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds = []
        shutil.rmtree(self._aside, ignore_errors=True)

    def _explain(self, error: BaseException) -> BaseException:
        if isinstance(error, OSError):
            need = sum(spec_bytes(s) for s in self._specs.values())
            return CannotWrite(f"cannot write {self.folder}: {error.strerror or error}. It needs {size_text(need)}; nothing was left behind.")
        return error


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
    return [p for p in sorted(folder.iterdir()) if p.is_file() and p.suffix not in skip and p.name not in (INDEX, counted.FILE)]


def spec_bytes(spec: Spec) -> int:
    """Bytes of a tensor of that dtype and shape."""
    size = spec[0].itemsize
    for n in spec[1]:
        size *= n
    return size


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


def read_json(path: Path) -> dict:
    """A JSON object. Raises :class:`CheckpointError` for a file that is missing or holds something else."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; a checkpoint folder needs it") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}; expected a JSON object")
    return data


def _stat(path: Path) -> tuple[int, int, int]:
    info = path.stat()
    return info.st_size, info.st_mtime_ns, info.st_ino


def _pwrite_all(fd: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done
