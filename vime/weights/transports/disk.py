"""Weights through a folder that both sides see: safetensors files and the manifest, written aside and then renamed."""
from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from vime.vllm.protocol import UpdateFailed
from vime.weights.folders import INDEX
from vime.weights.manifest import Manifest, ManifestError, TensorInfo, describe
from vime.weights.transports.base import Endpoint, Receiver, Sender
from vime.weights.transports.stream import buckets

#: Bytes of a file.
FILE_BYTES = 2 << 30
MANIFEST = "manifest.json"


def write(folder: Path, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int, file_bytes: int = FILE_BYTES) -> Manifest:
    """Write ``folder`` (it appears under its name only when complete).

    Raises OSError or SafetensorError on a full disk, ManifestError for a name that comes twice; leaves nothing.
    """
    aside = folder.with_name(folder.name + ".part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        infos: list[TensorInfo] = []
        where: dict[str, str] = {}
        for number, bucket in enumerate(buckets(named_tensors, file_bytes)):
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket}
            name = f"model-{number:05d}.safetensors"
            for key, _ in bucket:
                if key in where:
                    raise ManifestError(f"{key} comes twice in version {version}; one of the two would be lost")
                where[key] = name
            infos += [describe(key, tensor) for key, tensor in tensors.items()]
            # Two names of one tensor are two tensors in a file.
            safetensors.torch.save_file({k: t.clone() for k, t in tensors.items()}, aside / name, metadata={"format": "pt"})
        manifest = Manifest(version=version, tensors=infos)
        (aside / MANIFEST).write_bytes(manifest.to_json())
        (aside / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        return manifest
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


class DiskSender(Sender):
    def __init__(self, endpoint: Endpoint) -> None:
        if not endpoint.disk_dir:
            raise UpdateFailed("the disk transport needs a folder that both sides see (--update-weight-disk-dir)")
        super().__init__(endpoint)
        self.root = Path(endpoint.disk_dir)

    def send(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, Any]:
        return self.send_files([self], named_tensors, version)[0]

    @staticmethod
    def send_files(senders: Sequence[DiskSender], named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> list[dict[str, Any]]:
        """One folder for all of ``senders``, which have the same; their engines read it in turn."""
        folder, keep = senders[0].root / f"version-{version:06d}", senders[0].endpoint.keep_files
        try:
            write(folder, named_tensors, version)
        except (OSError, safetensors.SafetensorError) as error:  # a disk that is full is the one or the other
            raise UpdateFailed(f"could not write weights to {folder}: {error}") from error
        reports = []
        try:
            for sender in senders:
                sender.client.begin_update(version, {"kind": "disk", "folder": str(folder.resolve())},
                                           check_equal=sender.endpoint.check_equal)
                reports.append(sender.client.finish_update(version))
            return reports
        finally:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)


class DiskReceiver(Receiver):
    def __init__(self, *, folder: str) -> None:
        self.folder = Path(folder)

    def receive(self) -> tuple[dict[str, torch.Tensor], Manifest]:
        try:
            manifest = Manifest.from_json((self.folder / MANIFEST).read_bytes())
            received: dict[str, torch.Tensor] = {}
            for path in sorted(self.folder.glob("*.safetensors")):
                tensors = safetensors.torch.load_file(path)
                if again := next((name for name in tensors if name in received), None):
                    raise UpdateFailed(f"{again} is in {path} and in a file before it; one of the two is not of this update")
                received.update(tensors)
            return received, manifest
        except (OSError, ManifestError, safetensors.SafetensorError) as error:
            raise UpdateFailed(f"cannot read the update in {self.folder}: {error}") from error
