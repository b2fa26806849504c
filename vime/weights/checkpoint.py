"""Reads HF checkpoint folders tensor by tensor.

Everything that can be known to be wrong is said on opening, with the tensor and the file: a shard that is missing or cut short,
an index that names other tensors than the files hold, one tensor in two files, one Megatron tensor out of several dtypes. Bytes
are read when a tensor is asked for, and never through a mapping: a mapped file that somebody cuts short (a download that begins
again does) ends the process in the middle of a read, and nothing could say why.
"""
from __future__ import annotations

import ctypes
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from vime.weights import counted
from vime.weights.errors import ConfigMismatch
from vime.weights.families.base import Plan
from vime.weights.families.units import SCALE, Unit
from vime.weights.folders import (
    COUNTER,
    DTYPES,
    INDEX,
    NAMES,
    CheckpointError,
    Spec,
    distribute,
    other_files,
    read_json,
    spec_bytes,
    state_of,
)

#: How a file says of how many it is one.
_PART = re.compile(r"-\d+-of-(\d+)\.safetensors$")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class HfCheckpoint(Mapping[str, torch.Tensor]):
    """A folder of safetensors files as a read-only mapping from name to tensor, read anew each time it is asked for.

    ``specs`` holds dtype and shape of every tensor and ``files`` its file, both without reading any data. Raises
    :class:`CheckpointError` on opening for what is wrong with the folder itself. Where the tensors are made of a counter
    (:mod:`vime.weights.counted`) they are made when they are asked for, on ``device``; ``files`` then names those that a copy
    on disk would have.
    """

    def __init__(self, folder: str | Path, device: torch.device | str = "cpu"):
        self.folder, self.device = Path(folder), device
        self.specs: dict[str, Spec] = {}
        self.files: dict[str, str] = {}
        self._place: dict[str, tuple[io.FileIO, int]] = {}  # tensor -> its file, opened, and where in it
        self._stat: dict[str, tuple[int, int, int]] = {}
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is not a folder; expected one with config.json and *.safetensors files")
        self.config = self._read_json("config.json")
        self.counted: counted.Counted | None = None
        if counted.is_counted(self.folder):
            self._open_counted()
            return
        for file in self._list_files():
            self._open(file)

    def _read_json(self, file: str) -> dict:
        if (path := self.folder / file).exists():
            self._stat[file] = state_of(path)
        return read_json(path)

    def _open_counted(self) -> None:
        try:
            self.counted = counted.read(self.folder)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        self.specs = self.counted.specs()
        self.files = distribute(self.specs)
        self._stat[COUNTER] = state_of(self.folder / COUNTER)

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
            if (part := _PART.search(present[0])) and int(part[1]) > 1:
                raise CheckpointError(f"{self.folder} holds {present[0]}, one of {int(part[1])} files by its name, and no {INDEX}; the others are "
                                      "missing, copy them too")
            return present
        weight_map = self._read_json(INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map")
        if odd := next((n for n, f in weight_map.items() if not isinstance(f, str)), None):
            raise CheckpointError(f"{index}: weight_map says {weight_map[odd]!r} for {odd}; expected the name of a file")
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
            self._stat[file] = state_of(path)
            if not path.is_file():  # to open a pipe is to wait for whoever writes into it
                raise OSError("it is not a plain file")
            with safe_open(path, framework="pt") as handle:  # it knows what a valid file is
                names = list(handle.keys())
            opened = open(path, "rb", buffering=0)  # noqa: SIM115 - as long as this object
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as safetensors ({error}); it may be cut short, copy it again") from error
        for name in names:
            if name in self.files:
                raise CheckpointError(f"{name} is in {self.files[name]} and again in {file}")
            if (code := header[name]["dtype"]) not in DTYPES:
                raise CheckpointError(f"{path}: {name} has dtype {code}, which is not supported")
            self.files[name] = file
            self.specs[name] = (DTYPES[code], tuple(header[name]["shape"]))
            self._place[name] = (opened, 8 + length + header[name]["data_offsets"][0])
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
        return self._read(name, self.specs[name], 0)

    def part(self, name: str, number: int) -> torch.Tensor:
        """``self[name][number]``, without reading the rest."""
        if self.counted is not None:
            return self[name][number]
        dtype, shape = self.specs[name]
        return self._read(name, (dtype, shape[1:]), number)

    def _read(self, name: str, spec: Spec, number: int) -> torch.Tensor:
        """A tensor of that dtype and shape, the ``number``-th of its kind from where ``name`` begins."""
        opened, start = self._place[name]
        out = torch.empty(spec_bytes(spec), dtype=torch.uint8)
        # not out.numpy(), which would keep whoever is done with the tensor from giving its memory back
        view, done = memoryview((ctypes.c_ubyte * out.numel()).from_address(out.data_ptr())) if out.numel() else memoryview(b""), 0
        try:
            while done < len(view) and (more := os.preadv(opened.fileno(), [view[done:]], start + number * len(view) + done)):
                done += more
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read from {self.folder / self.files[name]}: {error.strerror or error}") from error
        self._check_file(self.files[name], name)
        if done < len(view):
            raise CheckpointError(f"{name} cannot be read from {self.folder / self.files[name]}: the file ends within it")
        return out.view(spec[0]).reshape(spec[1])

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
        :class:`CheckpointError` for tensors of several dtypes that Megatron holds as one, experts of a layer of which one has another
        dtype, numbers without a fraction, and FP8 bytes without their scales or scales without such bytes."""
        for name, shape in plan.hf_tensors().items():
            found = self.specs[name][1]
            if found != shape:
                raise ConfigMismatch(
                    f"{name} in {self.folder / self.files[name]} has shape {list(found)}; config.json of this "
                    f"{plan.family} model says {list(shape)}. One of the two belongs to another checkpoint."
                )
        for unit in plan.units:
            if len({self.specs[ref.name][0] for ref in unit.hf}) > 1:
                raise CheckpointError(f"{unit.name} is made of tensors of several dtypes: " + ", ".join(
                    f"{ref.name} in {self.files[ref.name]} is {NAMES[self.specs[ref.name][0]]}" for ref in unit.hf))
        experts: dict[tuple[int | None, str], Unit] = {}  # layer and name without the expert's number -> the first
        for unit in plan.units:
            name, first = unit.hf[0].name, unit
            if unit.expert is not None:
                first = experts.setdefault((unit.layer, unit.name.replace(f".local_experts.{unit.expert}.", ".")), unit)
            dtype, other = self.specs[name][0], self.specs[first.hf[0].name][0]
            if not dtype.is_floating_point:
                raise CheckpointError(f"{name} in {self.files[name]} is {NAMES[dtype]}; expected a floating-point dtype")
            if dtype != other:
                raise CheckpointError(f"{name} in {self.files[name]} is {NAMES[dtype]}, but {first.hf[0].name} is {NAMES[other]}: an engine holds the "
                                      "experts of a layer as one tensor and would convert one of them")
        for name, (dtype, _) in self.specs.items():
            weight = name.removesuffix(SCALE)
            if weight != name and weight in self and self.specs[weight][0] not in FP8:
                raise CheckpointError(f"{name} in {self.files[name]} belongs to FP8 bytes, but {weight} is {NAMES[self.specs[weight][0]]}: the scales "
                                      "would be applied to numbers that have them already")
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
            same = state_of(path) == self._stat[file]
        except OSError:
            same = False
        if not same:
            raise CheckpointError(f"{path} changed while it was read{f', at {name}' if name else ''}; what was made from it is not to be "
                                  "trusted")

    def unread(self) -> list[str]:
        """Files of tensors in the folder that are no part of the checkpoint: the index does not name them."""
        used = {Path(file).name for file in self.files.values()}
        return sorted(path.name for path in self.folder.glob("*.safetensors") if path.name not in used)

    def other_files(self) -> list[Path]:
        """Config, tokenizer and so on: every plain file that holds no weights."""
        return other_files(self.folder)
