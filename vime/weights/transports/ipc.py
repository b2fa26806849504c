"""Weights between two processes of one machine, through device memory that both map. NCCL refuses a pair on one GPU.

The sender owns one buffer and shares its CUDA IPC handle; tensors pass through it bucket by bucket, each announced by a
frame over the store. The receiver copies a bucket out and says so before the next one is written. It may run on another GPU,
as the ranks of an engine do, if it sees the sender's and the two reach each other's memory. Handles are plain bytes and
numbers: no pickle crosses.
"""
from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from vime.vllm.protocol import UpdateFailed
from vime.weights.manifest import TensorInfo, describe, dtype_from
from vime.weights.raw import raw_bytes
from vime.weights.transports.base import Endpoint
from vime.weights.transports.stream import (
    BUCKET_BYTES,
    Bucket,
    Channel,
    Frame,
    StreamReceiver,
    StreamSender,
    nbytes_of,
)

_ALIGN = 16
_ASK_EVERY = datetime.timedelta(seconds=1)


class Shared(msgspec.Struct, kw_only=True):
    """A CUDA buffer as another process opens it. ``uuid`` names the GPU, whatever number it has on either side."""

    uuid: str
    nbytes: int
    handle: list[Any]


class IpcFrame(Frame, kw_only=True):
    """A frame, and the buffer that its tensors lie in one after the other, each 16-byte aligned."""

    shared: Shared | None = None


# msgpack keeps the bytes of a handle as bytes
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(IpcFrame).decode


class DeviceMemory:
    """The CUDA calls of this transport and nothing else, so that the protocol around them can run without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A uint8 buffer with a storage of its own."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def share(self, buffer: torch.Tensor) -> Shared:
        """The handle of a buffer of :meth:`allocate`."""
        device, *rest = buffer.untyped_storage()._share_cuda_()
        del device
        return Shared(uuid=self._uuid(), nbytes=buffer.numel(), handle=rest)

    def open(self, shared: Shared) -> torch.Tensor:
        """The buffer of another process, mapped here, on the GPU where it lies. Raises UpdateFailed if this process does not see
        that one or its own GPU cannot reach it."""
        index = self._visible().get(shared.uuid)
        own = self.device.index or 0
        if index is None or (index != own and not torch.cuda.can_device_access_peer(own, index)):
            raise UpdateFailed(f"the weights lie on GPU {shared.uuid}, the engine runs on {self._uuid()}; it does not "
                               f"{'see' if index is None else 'reach'} the other. --update-weight-transport ipc needs both on one GPU, or on two "
                               "that reach each other; use nccl")
        storage = torch.UntypedStorage._new_shared_cuda(index, *shared.handle)
        empty: Any = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index))
        return empty.set_(storage, 0, (shared.nbytes,))

    def take(self, data: torch.Tensor) -> torch.Tensor:
        """A copy of mapped bytes on this process's own GPU, with a storage of its own."""
        return data.to(self.device, copy=True)

    def _visible(self) -> dict[str, int]:
        """The GPUs that this process sees: uuid -> the number they have here."""
        return {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def _uuid(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid)


class IpcChannel(Channel):
    """Frames over a store, bytes through a shared buffer that is written again only when the other side has taken it."""

    def __init__(self, store: dist.Store, memory: DeviceMemory, timeout_s: float, listening: Callable[[], bool] | None = None) -> None:
        """``listening`` tells whether the other side still takes part; asked while nothing comes from it."""
        self.store, self.memory, self.timeout_s, self.listening = store, memory, timeout_s, listening
        self._step = 0
        self._buffer: torch.Tensor | None = None

    def send_frame(self, frame: Frame) -> None:
        self._set("frame", _encode(frame))

    def send_bucket(self, bucket: Bucket) -> list[TensorInfo]:
        infos = [describe(name, tensor) for name, tensor in bucket]
        need = sum(_aligned(nbytes_of(info)) for info in infos)
        if self._buffer is None or self._buffer.numel() < need:
            self._buffer = self.memory.allocate(max(need, BUCKET_BYTES))
        offset = 0
        for _, tensor in bucket:
            data = raw_bytes(tensor)
            self._buffer[offset : offset + data.numel()].copy_(data)
            offset += _aligned(data.numel())
        self.memory.synchronize()
        self._set("frame", _encode(IpcFrame(tensors=infos, shared=self.memory.share(self._buffer))))
        self._wait_taken()
        self._step += 1
        return infos

    def _wait_taken(self) -> None:
        """A store tells nobody that a client of it is gone or gave up, so ask."""
        end = time.monotonic() + self.timeout_s
        while True:
            try:
                self.store.wait([f"taken/{self._step}"], _ASK_EVERY)
                return
            except RuntimeError as error:
                if self.listening is not None and not self.listening():
                    raise RuntimeError("the engine stopped in the middle of the update") from error
                if time.monotonic() > end:
                    raise

    def settle(self) -> None:
        if self.listening is not None and not self.listening():
            return
        with contextlib.suppress(RuntimeError):
            self.store.wait([f"taken/{self._step}"], 5 * _ASK_EVERY)

    def receive_frame(self) -> IpcFrame:
        frame = _decode(self.store.get(f"frame/{self._step}"))
        if not frame.tensors:  # a bucket is taken when it was copied
            self._set("taken", b"1")
        return frame

    def receive_bucket(self, frame: Frame) -> Iterator[tuple[str, torch.Tensor]]:
        if not isinstance(frame, IpcFrame) or frame.shared is None:
            raise UpdateFailed("the sender announced tensors without a buffer")
        buffer = self.memory.open(frame.shared)
        offset = 0
        for info in frame.tensors:
            nbytes = nbytes_of(info)
            if offset + nbytes > buffer.numel():
                raise UpdateFailed(f"{info.name} does not fit the shared buffer of {buffer.numel()} bytes")
            yield info.name, self.memory.take(buffer[offset : offset + nbytes]).view(dtype_from(info.dtype)).reshape(info.shape)
            offset += _aligned(nbytes)
        self.memory.synchronize()
        del buffer
        self._set("taken", b"1")
        self._step += 1

    def _set(self, what: str, value: bytes) -> None:
        self.store.set(f"{what}/{self._step}", value)  # type: ignore[arg-type]  # the stub knows str only


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


class IpcSender(StreamSender):
    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        if not torch.cuda.is_available():
            raise UpdateFailed("--update-weight-transport ipc shares device memory and needs a GPU; use nccl or disk")
        self.memory = DeviceMemory(torch.device("cuda", torch.cuda.current_device()))

    def announcement(self) -> dict[str, Any]:
        return {"kind": "ipc"}

    def connect(self, store: dist.Store) -> IpcChannel:
        return IpcChannel(store, self.memory, self.endpoint.timeout_s, lambda: self.client.health()["state"] == "updating")


class IpcReceiver(StreamReceiver):
    def __init__(self, *, device: torch.device, host: str, port: int, timeout_s: float) -> None:
        super().__init__(host, port, timeout_s)
        self.memory = DeviceMemory(device)

    def connect(self, store: dist.Store) -> IpcChannel:
        return IpcChannel(store, self.memory, self.timeout_s)
