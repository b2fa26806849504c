"""Writes HF checkpoint folders so that a half-written one never exists.

Dtype and shape of every tensor are known beforehand, so the files are laid out first and each piece goes to its place in any
order: memory stays near the largest piece, a full disk is noticed before the first tensor, and the folder gets its name only
when every byte of it was written once.
"""
from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch

from vime.weights.folders import (
    INDEX,
    NAMES,
    SHARD_BYTES,
    CannotWrite,
    CheckpointError,
    Spec,
    aside,
    distribute,
    remove_abandoned,
    require_free,
    size_text,
    spec_bytes,
)
from vime.weights.raw import raw_bytes


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
        if odd := sorted(self._specs.keys() ^ self._where.keys()):
            raise CheckpointError(f"{odd[0]} has {'no file' if odd[0] in self._specs else 'a file, but no dtype and shape'} ({len(odd)} such); every "
                                  "tensor to write needs both")
        if odd_file := next((f for f in self._where.values() if Path(f).name != f), None):
            raise CheckpointError(f"{odd_file!r} is not the name of a file in {self.folder}")
        self._aside = aside(self.folder)
        self._left = {name: spec_bytes(spec) for name, spec in specs.items()}
        self._place: dict[str, tuple[int, int]] = {}  # tensor -> file descriptor, offset
        self._seen: dict[str, set[int | None]] = {}  # slices; None: the whole
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
        if part is not None and not 0 <= part < (shape or (0,))[0]:  # it would be written over a neighbour
            raise CheckpointError(f"{name}: got slice {part} to write, announced shape {list(shape)}")
        shape = shape if part is None else shape[1:]
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise CheckpointError(f"{name}: got {tensor.dtype} {list(tensor.shape)} to write, announced {dtype} {list(shape)}")
        seen = self._seen.setdefault(name, set())
        if seen and (part is None or part in seen or None in seen):
            raise CheckpointError(f"{name} was written twice" + ("" if part is None else f" (slice {part})"))
        seen.add(part)
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


def _pwrite_all(fd: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done
