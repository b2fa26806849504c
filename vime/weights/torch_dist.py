"""Megatron's ``torch_dist`` checkpoints, written and read tensor by tensor without building a model.

``torch_dist`` is torch's distributed checkpoint format with two files of Megatron beside it: ``metadata.json`` (which
backend) and ``common.pt`` (what is not sharded). Keys are those of ``GPTModel.sharded_state_dict`` with layers
numbered one by one (``non_homogeneous_layers``, which Megatron is moving to) and the experts of a layer stacked along
a first axis; since shards are found by their global offset, one chunk a tensor loads at any TP, PP and EP. Reading also
knows the older form, in which equal layers are stacked, and the one-shard-one-key form.

``common.pt`` of a foreign checkpoint is never opened, and the pickled index of the format is read by an unpickler that
knows nothing but the classes of that index.
"""
from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import io
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from vime.weights.checkpoint import HfCheckpoint
from vime.weights.convert import Stacker
from vime.weights.convert import to_pieces as pieces_of
from vime.weights.errors import WeightError
from vime.weights.families import family_for
from vime.weights.families.base import Plan
from vime.weights.families.units import Unit, read_pieces
from vime.weights.folders import (
    CannotWrite,
    CheckpointError,
    aside,
    other_files,
    read_json,
    remove_abandoned,
    size_text,
    state_of,
)
from vime.weights.writer import HfWriter

TRACKER = "latest_checkpointed_iteration.txt"
_EXPERT = re.compile(r"local_experts\.(\d+)\.")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
#: local spec's name -> the name under which a model of TransformerEngine modules saves the same tensor
_FUSED = [(re.compile(pattern), name) for pattern, name in (
    (r"\.input_layernorm\.", ".self_attention.linear_qkv.layer_norm_"),
    (r"\.pre_mlp_layernorm\.", ".mlp.linear_fc1.layer_norm_"),
    (r"\.self_attention\.q_layernorm\.", ".self_attention.linear_q_up_proj.layer_norm_"),
    (r"\.self_attention\.kv_layernorm\.", ".self_attention.linear_kv_up_proj.layer_norm_"),
)]  # fmt: skip
#: Modules whose classes (never functions) an index is made of: records of torch and, from Megatron, of its own.
_INDEX_MODULES = {f"torch.distributed.checkpoint.{m}" for m in ("metadata", "filesystem", "planner")} | {
    f"megatron.core.dist_checkpointing.{m}" for m in ("mapping", "strategies.torch", "strategies.filesystem_async")}
_SAFE = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"), ("builtins", "set"),
         ("pathlib", "PosixPath"), ("pathlib", "Path")}


def names_of(unit: Unit) -> list[str]:
    """Names under which Megatron may save a unit: its own and, for a norm, that of the projection it can be fused into."""
    return [unit.name, *(pattern.sub(name, unit.name) for pattern, name in _FUSED if pattern.search(unit.name))]


def keys_of(unit: Unit, plan_names: Collection[str]) -> list[str]:
    """Keys under which a unit is written. Norms go under each of their names: layers of TransformerEngine modules and
    layers of the local spec look for different ones (for an MoE layer even in one version), and they are small."""
    own, *fused = names_of(unit)
    kept = [n for n in fused if ".mlp.linear_fc1." in n or n.partition("layer_norm_")[0] + "weight" in plan_names]
    return [_EXPERT.sub("experts.", name) for name in (own, *kept)]


def _return_large_blocks() -> None:
    """Have glibc give every freed block of 1 MiB or more back to the system, as it does at first.

    By itself it raises that limit up to 32 MiB as blocks are freed. Aligned blocks below it then leave holes that the next
    one doesn't fit, and a conversion's memory grows by every fused tensor, as if none had been freed.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD


# --- writing ---------------------------------------------------------------------------------------------------------


def _saved_none() -> bytes:
    buffer = io.BytesIO()
    torch.save([None], buffer)  # a list of one object, as Megatron saves it
    return buffer.getvalue()


_NOTHING = _saved_none()


class _Planner(DefaultSavePlanner):
    """Tells the format what will be written and makes each tensor only when its turn comes."""

    def __init__(self, source: HfCheckpoint, plan: Plan, experts: int, progress: Callable[[int], None] | None):
        super().__init__()
        self._source, self._experts, self._progress, self._done = source, experts, progress, 0
        names = {unit.name for unit in plan.units}
        self._units = {(key, unit.expert or 0): unit for unit in plan.units for key in keys_of(unit, names)}
        self._last: torch.Tensor | None = None

    def create_local_plan(self) -> SavePlan:
        items = [self._item(key, index, unit) for (key, index), unit in self._units.items()]
        items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(len(_NOTHING)))
                  for key in self._extra_states()]
        self.plan = SavePlan(items, planner_data={})
        return self.plan

    def _extra_states(self) -> set[str]:
        """Megatron's modules each look for a state of their quantisation, and stop if it is not there: an empty one."""
        modules = {(key.removesuffix(".weight"), unit) for (key, _), unit in self._units.items() if key.endswith(".weight")}
        modules |= {(key.partition("self_attention.")[0] + "self_attention.core_attention", unit)
                    for key, unit in modules if "self_attention." in key}
        shard = {unit: "0_1" if unit.expert is None else f"{unit.expert}_{self._experts}" for _, unit in modules}
        return {f"{module}._extra_state/shard_{shard[unit]}" for module, unit in modules} | {"output_layer._extra_state/shard_0_1"}

    def _item(self, key: str, index: int, unit: Unit) -> WriteItem:
        lead = () if unit.expert is None else (1,)
        size = unit.shape if unit.expert is None else (self._experts, *unit.shape)
        offset = torch.Size([index] * len(lead) + [0] * len(unit.shape))
        chunk = ChunkStorageMetadata(offsets=offset, sizes=torch.Size(lead + unit.shape))
        dtype = self._source.specs[unit.hf[0].name][0]
        return WriteItem(MetadataIndex(key, offset), WriteItemType.SHARD,
                         tensor_data=TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(size)))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        index = write_item.index
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(_NOTHING)
        offset = index.offset or torch.Size()
        unit = self._units.get((index.fqn, offset[0] if len(offset) else 0)) or self._units[index.fqn, 0]
        if self._last is not None:
            # Written by now (nothing is read ahead, see `write`), but torch's writer keeps every tensor to its end.
            self._last.untyped_storage().resize_(0)
        tensor = unit.to_megatron(read_pieces(unit, self._source)).contiguous()
        self._last = tensor
        self._done += 1
        if self._progress is not None:
            self._progress(self._done)
        return tensor if unit.expert is None else tensor.unsqueeze(0)


def write(source: HfCheckpoint, plan: Plan, folder: str | Path, progress: Callable[[int], None] | None = None) -> Path:
    """Write ``folder/release`` and the tracker file. Whole or not at all; an existing release is refused.

    Returns the path of the release. Raises :class:`CheckpointError`.
    """
    folder = Path(folder)
    final = folder / "release"
    part = aside(final)
    if final.exists():
        raise CheckpointError(f"{final} exists; give another folder or remove it")
    _return_large_blocks()
    experts = 1 + max((u.expert for u in plan.units if u.expert is not None), default=-1)
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned(final)
        part.mkdir()
        if (free := shutil.disk_usage(part).free) < source.nbytes:
            raise OSError(28, f"only {size_text(free)} are free")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that it saves in a single process, which is meant
            # No copying ahead: the writer then asks for a tensor only when the one before is in the file.
            writer = FileSystemWriter(part, thread_count=1, per_thread_copy_ahead=0)
            dcp_save({}, storage_writer=writer, planner=_Planner(source, plan, experts, progress), no_dist=True)
        TorchDist(part).check_lengths()
        (part / "metadata.json").write_text(json.dumps({
            "sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}))
        # Version 3: Megatron would reorder the QKV projections of an older one.
        torch.save({"checkpoint_version": 3.0, "iteration": 0, "content_metadata": {"non_homogeneous_layers": True}},
                   part / "common.pt")
        source.check_unchanged()
        os.rename(part, final)
        tracker = folder / f".{TRACKER}.part"
        tracker.write_text("release")
        os.replace(tracker, folder / TRACKER)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        cause = _cause(error)
        if isinstance(cause, OSError):
            raise CannotWrite(f"cannot write {final}: {cause.strerror or cause}; it needs {size_text(source.nbytes)}. "
                              "Nothing was left behind.") from error
        if cause is not error:
            raise cause from error
        raise
    return final


def _cause(error: BaseException) -> BaseException:
    """What went wrong inside torch's writer, which wraps it (and keeps the real one beside its text), and makes of a full disk a
    RuntimeError about its archive."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict):
        error = next((inner[0] for inner in failures.values() if isinstance(inner, tuple) and isinstance(inner[0], BaseException)), error)
    below: BaseException | None = error if isinstance(error, RuntimeError) else None
    while below is not None and not isinstance(below, OSError):
        below = below.__context__
    return below or error


# --- reading ---------------------------------------------------------------------------------------------------------


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

    def locate(self, unit: Unit) -> tuple[str, tuple[int, ...]]:
        """Key of a unit and its indices along stacked layers and experts. Raises :class:`CheckpointError` if it is not there."""
        for name in names_of(unit):
            number = _LAYER.match(name)
            stacked = f"decoder.layers.{name[number.end():]}" if number else name
            for form, lead in ((name, ()), (stacked, (int(number[1]),) if number else ())):
                for key, at in ((_EXPERT.sub("experts.", form), (unit.expert,)),
                                (_EXPERT.sub(f"experts.{unit.expert}.", form), ())) if unit.expert is not None else ((form, ()),):
                    if key in self.tensors or f"{key}_w" in self.tensors:
                        return key, (*lead, *at)  # type: ignore[arg-type]
        raise CheckpointError(f"{unit.name} is not in {self.folder}")

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
    ``origin``, the tensors that the config alone describes are written in the checkpoint's dtypes.
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
    checkpoint.check_lengths()
    _return_large_blocks()
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
