"""Reads a ``torch_dist`` checkpoint tensor by tensor, and makes a Hugging Face folder of one."""
from __future__ import annotations

import dataclasses
import io
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from vime.weights.checkpoint import HfCheckpoint
from vime.weights.convert import Stacker
from vime.weights.convert import to_pieces as pieces_of
from vime.weights.errors import WeightError
from vime.weights.families import family_for
from vime.weights.families.base import Plan
from vime.weights.families.units import Unit
from vime.weights.folders import CheckpointError, other_files, read_json, state_of
from vime.weights.topology import experts_of, layers_of
from vime.weights.torch_dist.names import EXPERT, TRACKER, names_of, return_large_blocks
from vime.weights.writer import HfWriter

#: What a model's own tensors begin with; others are of the optimizer or of the training loop.
_MODEL = ("decoder.", "embedding.", "output_layer.", "mtp.")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
#: Modules whose classes (never functions) an index is made of: records of torch and, from Megatron, of its own.
_INDEX_MODULES = {f"torch.distributed.checkpoint.{m}" for m in ("metadata", "filesystem", "planner")} | {
    f"megatron.core.dist_checkpointing.{m}" for m in ("mapping", "strategies.torch", "strategies.filesystem_async")}
_SAFE = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"), ("builtins", "set"),
         ("pathlib", "PosixPath"), ("pathlib", "Path")}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in _INDEX_MODULES and isinstance(found := super().find_class(module, name), type):
            return found
        if (module, name) in _SAFE or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.memory_format)):
            return super().find_class(module, name)
        raise CheckpointError(f"the index of this checkpoint wants to load {module}.{name}, which no index of this format needs; "
                              "it is not opened")


def resolve(folder: str | Path) -> Path:
    """The folder that holds ``.metadata``: itself, or what its tracker file points to."""
    folder = Path(folder)
    if (folder / TRACKER).is_file():
        text = (folder / TRACKER).read_text().strip()
        if text != "release" and not text.isdecimal():
            raise CheckpointError(f"{folder / TRACKER} says {text[:40]!r}; expected release or the number of an iteration")
        folder = folder / (text if text == "release" else f"iter_{int(text):07d}")
    if not (folder / ".metadata").is_file():
        raise CheckpointError(f"{folder} is not a torch_dist checkpoint: it holds no .metadata (expected a folder such as release "
                              f"or iter_0000010, or their parent with {TRACKER})")
    return folder


class _Slice(io.RawIOBase):
    """``length`` bytes of a file from ``start``, as a file of its own: a tensor is read where it will lie, not copied there."""

    def __init__(self, file: io.FileIO, start: int, length: int):
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        done = self._file.readinto(view) or 0
        self._at += done
        return done


class TorchDist:
    """A ``torch_dist`` checkpoint as tensors of units. Only the chunks that a tensor needs are read."""

    def __init__(self, folder: str | Path):
        self.folder = resolve(folder)
        try:
            with open(self.folder / ".metadata", "rb") as file:
                index = _IndexUnpickler(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
            raise CheckpointError(f"{self.folder / '.metadata'} is not readable: {error}") from error
        if not isinstance(index, Metadata):
            raise CheckpointError(f"{self.folder / '.metadata'} holds a {type(index).__name__}, expected the index of a checkpoint")
        self.tensors: dict[str, TensorStorageMetadata] = {
            k: v for k, v in index.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
        self._state: dict[Path, tuple[int, int, int]] = {}
        self._storage = {(i.fqn, tuple(i.offset or ())): info for i, info in (index.storage_data or {}).items()}

    def check_lengths(self) -> None:
        """Raise :class:`CheckpointError` for a chunk whose place in a file is too short for it, or past the file's end."""
        sizes: dict[str, int] = {}
        for key, meta in self.tensors.items():
            for chunk in meta.chunks:
                info = self._storage.get((key, tuple(chunk.offsets))) or self._storage.get((key, ()))
                need = meta.properties.dtype.itemsize * chunk.sizes.numel()
                packed = getattr(info, "transform_descriptors", None)  # compressed: any length may do
                if info is None or (info.length < need and not packed):
                    raise CheckpointError(f"{key} in {self.folder}: {0 if info is None else info.length} bytes for a chunk of {need}")
                path = self.folder / info.relative_path
                if info.relative_path not in sizes:
                    sizes[info.relative_path] = path.stat().st_size if path.is_file() else 0
                if info.offset + info.length > sizes[info.relative_path]:
                    raise CheckpointError(f"{key} cannot be read from {path}: it has {sizes[info.relative_path]} bytes, the index says that "
                                          f"{info.offset + info.length} are needed; the file is missing or cut short")

    def check_unchanged(self) -> None:
        """Raise :class:`CheckpointError` if a file that was read from was replaced or written to since."""
        for path, before in self._state.items():
            if not path.is_file() or state_of(path) != before:
                raise CheckpointError(f"{path} changed while it was read; what was made from it is not to be trusted")

    def _places(self, unit: Unit) -> Iterator[tuple[str, dict[str, int]]]:
        """Every key under which a unit may lie, with its index along each axis that is stacked in front; the preferred one first."""
        for name in names_of(unit):
            forms: list[tuple[str, dict[str, int]]] = [(name, {})]
            if number := _LAYER.match(name):
                forms.append((f"decoder.layers.{name[number.end():]}", {"layers": int(number[1])}))
            for form, lead in forms:
                if unit.expert is None:
                    yield form, lead
                else:
                    yield EXPERT.sub("experts.", form), {**lead, "experts": unit.expert}
                    yield EXPERT.sub(f"experts.{unit.expert}.", form), lead

    def locate(self, unit: Unit) -> tuple[str, tuple[int, ...]]:
        """Key of a unit and its indices along stacked layers and experts. Raises :class:`CheckpointError` if it is not there."""
        for key, at in self._places(unit):
            if key in self.tensors or f"{key}_w" in self.tensors:
                return key, tuple(at.values())
        raise CheckpointError(f"{unit.name} is not in {self.folder}")

    def check_covered(self, plan: Plan, config: Path) -> None:
        """Raise :class:`CheckpointError` for tensors of the model that no unit of the plan is read from, and for stacks of another number
        of layers or experts: a conversion would drop them without a word. ``config``: what the plan was made of, for the message.

        States of quantisation (``_extra_state``) and of the optimizer are no tensors of the model.
        """
        sizes, known = {"layers": layers_of(plan), "experts": experts_of(plan)}, set()
        for key, at in (place for unit in plan.units for place in self._places(unit)):
            # gate and up may have keys of their own
            for stored in (key,) if key in self.tensors else (f"{key}_w", f"{key}_v"):
                known.add(stored)
                for axis, found in zip(at, self.tensors[stored].size, strict=False) if stored in self.tensors else ():
                    if found != sizes[axis]:
                        raise CheckpointError(f"{stored} in {self.folder} is a stack of {found} {axis}, {config} says {sizes[axis]}; give "
                                              "the Hugging Face folder that this checkpoint was trained from")
        if lost := sorted(k for k in self.tensors if k.startswith(_MODEL) and "_extra_state" not in k and k not in known):
            shown = ", ".join(lost[:6]) + (f" and {len(lost) - 6} more" if lost[6:] else "")
            raise CheckpointError(f"{self.folder} holds {len(lost)} tensor{'s' if lost[1:] else ''} that the model of {config} does not have, "
                                  f"and that would be lost: {shown}. Give the Hugging Face folder that this checkpoint was trained from.")

    def dtype(self, unit: Unit) -> torch.dtype:
        key, _ = self.locate(unit)
        return (self.tensors.get(key) or self.tensors[f"{key}_w"]).properties.dtype

    def shape(self, unit: Unit) -> tuple[int, ...]:
        key, lead = self.locate(unit)
        if key not in self.tensors:  # gate and up under keys of their own
            rows, *rest = self.tensors[f"{key}_w"].size[len(lead):]
            return (2 * rows, *rest)
        return tuple(self.tensors[key].size[len(lead):])

    def read(self, unit: Unit) -> torch.Tensor:
        """The full Megatron tensor of a unit."""
        key, lead = self.locate(unit)
        if key not in self.tensors:
            return torch.cat([self._read(f"{key}_w", lead), self._read(f"{key}_v", lead)])
        return self._read(key, lead)

    def _read(self, key: str, lead: tuple[int, ...]) -> torch.Tensor:
        meta = self.tensors[key]
        shape = tuple(meta.size[len(lead):])
        out: torch.Tensor | None = None
        covered = 0
        for chunk in meta.chunks:
            inside = zip(lead, chunk.offsets, chunk.sizes, strict=False)
            if any(not start <= at < start + size for at, start, size in inside):
                continue
            piece = self._chunk(key, tuple(chunk.offsets))
            for at, start in zip(lead, chunk.offsets, strict=False):
                piece = piece[at - start]
            if tuple(piece.shape) == shape:
                return piece
            out = torch.empty(shape, dtype=meta.properties.dtype) if out is None else out
            where = tuple(slice(o, o + n) for o, n in zip(chunk.offsets[len(lead):], piece.shape, strict=True))
            out[where] = piece
            covered += piece.numel()
        if out is None or covered != out.numel():
            raise CheckpointError(f"{key} in {self.folder} is not complete: {covered} of {0 if out is None else out.numel()} elements")
        return out

    def _chunk(self, key: str, offset: tuple[int, ...]) -> torch.Tensor:
        info = self._storage.get((key, offset)) or self._storage.get((key, ()))
        if info is None:
            raise CheckpointError(f"{key} in {self.folder}: no file holds the chunk at {list(offset)}")
        path = self.folder / info.relative_path
        try:
            self._state.setdefault(path, state_of(path))
            with open(path, "rb", buffering=0) as file:
                slice_: Any = _Slice(file, info.offset, info.length)
                return torch.load(slice_, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{key} cannot be read from {path}: {error}; the file is missing or cut short") from error


def to_hf(checkpoint: TorchDist, origin: str | Path, out: str | Path, progress: Callable[[int, int], None] | None = None) -> int:
    """Write an HF folder from a ``torch_dist`` checkpoint. Returns how many tensors were cast.

    ``origin`` gives config and tokenizer, and, where it holds weights, which names to write (tied copies, MTP layers,
    scales), their dtypes and their files. A tensor is cast only if its dtype there is another one. Without weights in
    ``origin``, the tensors that the config alone describes are written in the checkpoint's dtypes. Raises :class:`CheckpointError`
    before anything is written where the checkpoint holds tensors of the model that have no name there.
    """
    origin = Path(origin)
    reference = HfCheckpoint(origin) if any(origin.glob("*.safetensors")) else None
    cfg = reference.config if reference is not None else read_json(origin / "config.json")
    plan = family_for(cfg).plan(cfg, hf_names=None if reference is None else reference.files)
    plan = dataclasses.replace(plan, units=tuple(_padded(u, checkpoint) for u in plan.units))
    if reference is not None:
        reference.check(plan)
        specs, files = reference.specs, reference.files
    else:
        dtypes = {ref.name: checkpoint.dtype(u) for u in plan.units for ref in u.hf}
        specs, files = {name: (dtypes[name], shape) for name, shape in plan.hf_tensors().items()}, None
    checkpoint.check_covered(plan, origin / "config.json")
    checkpoint.check_lengths()
    return_large_blocks()
    cast = 0
    with HfWriter(out, specs, files, other_files(origin)) as writer:
        stacker = Stacker(plan)
        for number, unit in enumerate(plan.units, 1):
            for key, piece in pieces_of([(unit, checkpoint.read(unit))], plan):
                for name, tensor in stacker.add(key, piece):
                    cast += tensor.dtype != specs[name][0]
                    writer.write(name, tensor.to(specs[name][0]))
            if progress is not None:
                progress(number, len(plan.units))
        stacker.finish()
        for name in plan.carried:
            writer.write(name, reference[name])  # type: ignore[index]
        checkpoint.check_unchanged()
    return cast


def _padded(unit: Unit, checkpoint: TorchDist) -> Unit:
    """With the rows that the checkpoint's vocabulary was padded to."""
    if unit.pad_rows is None:
        return unit
    rows, real = checkpoint.shape(unit)[0], unit.hf[0].shape[0]
    if rows < real:
        raise WeightError(f"{unit.name} has {rows} rows; config.json says the vocabulary has {real}")
    return dataclasses.replace(unit, pad_rows=rows)
