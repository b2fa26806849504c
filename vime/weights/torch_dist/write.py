"""Writes a ``torch_dist`` checkpoint from a Hugging Face folder, one tensor at a time; whole or not at all."""
from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from vime.weights.checkpoint import HfCheckpoint
from vime.weights.families.base import Plan
from vime.weights.families.units import Unit, read_pieces
from vime.weights.folders import CannotWrite, CheckpointError, aside, remove_abandoned, size_text
from vime.weights.topology import experts_of
from vime.weights.torch_dist.names import TRACKER, keys_of, return_large_blocks
from vime.weights.torch_dist.read import TorchDist


def _saved_none() -> bytes:
    buffer = io.BytesIO()
    torch.save([None], buffer)  # a list of one object, as Megatron saves it
    return buffer.getvalue()


_NOTHING = _saved_none()


class _Planner(DefaultSavePlanner):
    """Tells the format what will be written and makes each tensor only when its turn comes."""

    def __init__(self, source: HfCheckpoint, plan: Plan, progress: Callable[[int], None] | None):
        super().__init__()
        self._source, self._experts, self._progress, self._done = source, experts_of(plan), progress, 0
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
    if final.exists() or final.is_symlink():  # a link to nothing, too, cannot be replaced by a folder
        raise CheckpointError(f"{final} exists; give another folder or remove it")
    return_large_blocks()
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
            dcp_save({}, storage_writer=writer, planner=_Planner(source, plan, progress), no_dist=True)
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
