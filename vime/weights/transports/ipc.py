"""Weights between two processes on one GPU, through device memory that both map. NCCL refuses such a pair.

The sender owns one buffer and shares its CUDA IPC handle; tensors pass through it bucket by bucket, each announced by a
frame over a TCP store. The receiver copies a bucket out and says so before the next one is written. Handles are plain
bytes and numbers: no pickle crosses.
"""
from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from vime.vllm.protocol import EngineError, UpdateFailed
from vime.weights.manifest import Manifest, ManifestError, TensorInfo, as_bytes, describe, dtype_from
from vime.weights.transports.base import Endpoint, Receiver, Sender
from vime.weights.transports.process_group import BUCKET_BYTES, Frame, buckets


class Shared(msgspec.Struct, kw_only=True):
    """A CUDA buffer as another process opens it. ``uuid`` names the GPU, whatever number it has on either side."""

    uuid: str
    nbytes: int
    handle: list[Any]


class IpcFrame(Frame, kw_only=True):
    """A frame, and the buffer that its tensors lie in one after the other, each 16-byte aligned."""

    shared: Shared | None = None


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def share(buffer: torch.Tensor) -> Shared:
    """The handle of ``buffer`` (uint8, on a GPU, a storage of its own)."""
    device, *rest = buffer.untyped_storage()._share_cuda_()
    del device
    return Shared(uuid=_uuid(buffer.device), nbytes=buffer.numel(), handle=rest)


def open_shared(shared: Shared, device: torch.device) -> torch.Tensor:
    """The buffer of another process, mapped here. Raises UpdateFailed if it lies on another GPU."""
    if shared.uuid != _uuid(device):
        raise UpdateFailed(f"the weights lie on GPU {shared.uuid}, the engine runs on {_uuid(device)}; --update-weight-transport "
                           "ipc needs both on one GPU, use nccl")
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *shared.handle)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (shared.nbytes,))


# msgpack keeps the bytes of a handle as bytes
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(IpcFrame).decode


class IpcSender(Sender):
    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        if not torch.cuda.is_available():
            raise UpdateFailed("--update-weight-transport ipc shares device memory and needs a GPU; use nccl or disk")
        self.device = torch.device("cuda", torch.cuda.current_device())

    def send(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, Any]:
        e = self.endpoint
        timeout = datetime.timedelta(seconds=e.timeout_s)
        store = dist.TCPStore(e.host, 0, 2, is_master=True, timeout=timeout, wait_for_workers=False)
        self.client.begin_update(version, {"kind": "ipc", "host": e.host, "port": store.port, "timeout_s": e.timeout_s},
                                 check_equal=e.check_equal)
        try:
            self._stream(store, named_tensors, version)
        except RuntimeError as error:
            try:
                self.client.finish_update(version)
            except EngineError as reason:
                raise reason from error
            raise
        return self.client.finish_update(version)

    def _stream(self, store: dist.Store, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        infos: list[TensorInfo] = []
        buffer: torch.Tensor | None = None
        sent = 0
        try:
            for bucket in buckets(named_tensors):
                need = sum(_aligned(t.numel() * t.element_size()) for _, t in bucket)
                if buffer is None or buffer.numel() < need:
                    buffer = torch.empty(max(need, BUCKET_BYTES), dtype=torch.uint8, device=self.device)
                described = self._fill(buffer, bucket)
                store.set(f"frame/{sent}", encode(IpcFrame(tensors=described, shared=share(buffer))))
                sent += 1
                store.get(f"taken/{sent - 1}")
                infos += described
            last = IpcFrame(manifest=Manifest(version=version, tensors=infos))
        except Exception as error:
            store.set(f"frame/{sent}", encode(IpcFrame(abort=f"{type(error).__name__}: {error}")))
            raise
        store.set(f"frame/{sent}", encode(last))

    def _fill(self, buffer: torch.Tensor, bucket: list[tuple[str, torch.Tensor]]) -> list[TensorInfo]:
        offset = 0
        for _, tensor in bucket:
            data = as_bytes(tensor)
            buffer[offset : offset + data.numel()].copy_(data)
            offset += _aligned(data.numel())
        torch.cuda.synchronize(self.device)
        return [describe(name, tensor) for name, tensor in bucket]


class IpcReceiver(Receiver):
    def __init__(self, *, device: torch.device, host: str, port: int, timeout_s: float) -> None:
        self.device, self.host, self.port, self.timeout_s = device, host, port, timeout_s

    def receive(self) -> tuple[dict[str, torch.Tensor], Manifest]:
        received: dict[str, torch.Tensor] = {}
        try:
            timeout = datetime.timedelta(seconds=self.timeout_s)
            store = dist.TCPStore(self.host, self.port, 2, is_master=False, timeout=timeout)
            step = 0
            while True:
                frame = decode(store.get(f"frame/{step}"))
                if frame.abort is not None:
                    raise UpdateFailed(f"the sender gave up: {frame.abort}")
                if frame.manifest is not None:
                    return received, frame.manifest
                if frame.shared is None:
                    raise UpdateFailed("the sender announced tensors without a buffer")
                self._take(frame, received)
                store.set(f"taken/{step}", b"1")
                step += 1
        except (ManifestError, msgspec.MsgspecError) as error:
            raise UpdateFailed(f"the sender at {self.host}:{self.port} sent something unreadable: {error}") from error
        except UpdateFailed:
            raise
        except RuntimeError as error:
            raise UpdateFailed(f"lost the sender at {self.host}:{self.port} before the update was complete: {error}") from error

    def _take(self, frame: IpcFrame, received: dict[str, torch.Tensor]) -> None:
        assert frame.shared is not None
        buffer = open_shared(frame.shared, self.device)
        offset = 0
        for info in frame.tensors:
            dtype = dtype_from(info.dtype)
            nbytes = dtype.itemsize
            for n in info.shape:
                nbytes *= n
            if offset + nbytes > buffer.numel():
                raise UpdateFailed(f"{info.name} does not fit the shared buffer of {buffer.numel()} bytes")
            received[info.name] = buffer[offset : offset + nbytes].clone().view(dtype).reshape(info.shape)
            offset += _aligned(nbytes)
        torch.cuda.synchronize(self.device)
        del buffer
