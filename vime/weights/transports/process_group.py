"""Weights over a process group of their own: gloo between any two processes, NCCL between GPUs.

The group has two members, the sender (rank 0, which also serves the store) and the engine (rank 1). It lives for one
update, so a failed one leaves nothing to repair, and it is no part of the default group of either framework. Tensors
travel packed in buckets; each bucket is preceded by a frame that says what is in it. The last frame carries the
manifest, so that a sender which gathers its tensors one by one never needs them twice.
"""
from __future__ import annotations

import datetime
import socket
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from vime.vllm.protocol import EngineError, UpdateFailed
from vime.weights.manifest import Manifest, ManifestError, TensorInfo, as_bytes, describe, dtype_from
from vime.weights.transports.base import Endpoint, Receiver, Sender

#: Bytes of a bucket. A larger tensor travels alone.
BUCKET_BYTES = 64 << 20
_SENDER, _ENGINE = 0, 1


class Frame(msgspec.Struct, kw_only=True):
    """What comes next: a bucket of tensors, the manifest (the end), or the sender's reason to give up."""

    tensors: list[TensorInfo] = []
    manifest: Manifest | None = None
    abort: str | None = None


def make_group(backend: str, store: dist.Store, rank: int, own_host: str, timeout_s: float) -> Any:
    """A two-member process group that is not the default one."""
    timeout = datetime.timedelta(seconds=timeout_s)
    store = dist.PrefixStore("vime-weights", store)
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host)]
        return dist.ProcessGroupGloo(store, rank, 2, options)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, 2, options)
    raise UpdateFailed(f"unknown process group backend {backend!r}; known: gloo, nccl")


def own_address(towards: str, port: int) -> str:
    """The address of this machine that packets to ``towards`` leave from."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, port))
        return probe.getsockname()[0]


class Wire:
    """Frames and bytes over a group. ``device`` is where the group can send from: the CPU for gloo, a GPU for NCCL."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device, self._tag = group, device, 0

    def _send(self, data: torch.Tensor) -> None:
        self._tag += 1
        self.group.send([data.to(self.device)], _ENGINE, self._tag).wait()

    def _receive(self, count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        self._tag += 1
        data = torch.empty(count, dtype=dtype, device=self.device)
        self.group.recv([data], _SENDER, self._tag).wait()
        return data

    def send_frame(self, frame: Frame) -> None:
        body = torch.frombuffer(bytearray(msgspec.json.encode(frame)), dtype=torch.uint8)
        self._send(torch.tensor([body.numel()], dtype=torch.int64))
        self._send(body)

    def receive_frame(self) -> Frame:
        count = int(self._receive(1, torch.int64))
        return msgspec.json.decode(self._receive(count).cpu().numpy().tobytes(), type=Frame)

    def send_bucket(self, bucket: list[tuple[str, torch.Tensor]]) -> list[TensorInfo]:
        infos = [describe(name, tensor) for name, tensor in bucket]
        self.send_frame(Frame(tensors=infos))
        parts = [as_bytes(tensor).to(self.device) for _, tensor in bucket]
        data = parts[0] if len(parts) == 1 else torch.cat(parts)
        if data.numel():
            self._send(data)
        return infos

    def receive_bucket(self, infos: list[TensorInfo]) -> Iterator[tuple[str, torch.Tensor]]:
        sizes = [_nbytes(info) for info in infos]
        data = self._receive(sum(sizes)) if sum(sizes) else torch.empty(0, dtype=torch.uint8, device=self.device)
        offset = 0
        for info, size in zip(infos, sizes, strict=True):
            # A tensor of its own, aligned, so that a bucket is freed as soon as it is unpacked.
            flat = data[offset:offset + size].clone()
            yield info.name, flat.view(dtype_from(info.dtype)).reshape(info.shape)
            offset += size


def _nbytes(info: TensorInfo) -> int:
    count = 1
    for n in info.shape:
        count *= n
    return count * dtype_from(info.dtype).itemsize


def buckets(named_tensors: Iterable[tuple[str, torch.Tensor]], limit: int = BUCKET_BYTES) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Consecutive tensors whose bytes stay within ``limit``; a larger tensor is a bucket of its own."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in named_tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if bucket and size + nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += nbytes
    if bucket:
        yield bucket


class ProcessGroupSender(Sender):
    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self.device = torch.device("cuda", torch.cuda.current_device()) if endpoint.backend == "nccl" else torch.device("cpu")

    def send(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, Any]:
        e = self.endpoint
        timeout = datetime.timedelta(seconds=e.timeout_s)
        store = dist.TCPStore(e.host, 0, 2, is_master=True, timeout=timeout, wait_for_workers=False)
        self.client.begin_update(version, {"kind": "process_group", "backend": e.backend, "host": e.host,
                                           "port": store.port, "timeout_s": e.timeout_s}, check_equal=e.check_equal)
        try:
            self._stream(store, named_tensors, version)
        except BaseException as error:
            # The engine's own account says more than a broken connection does, but never hide why *we* stopped.
            if isinstance(error, RuntimeError):
                self._raise_engine_reason(version, error)
            raise
        return self.client.finish_update(version)

    def _stream(self, store: dist.Store, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        e = self.endpoint
        wire = Wire(make_group(e.backend, store, _SENDER, e.host, e.timeout_s), self.device)
        infos: list[TensorInfo] = []
        try:
            for bucket in buckets(named_tensors):
                infos += wire.send_bucket(bucket)
            frame = Frame(manifest=Manifest(version=version, tensors=infos))
        except Exception as error:
            wire.send_frame(Frame(abort=f"{type(error).__name__}: {error}"))
            raise
        wire.send_frame(frame)

    def _raise_engine_reason(self, version: int, error: RuntimeError) -> None:
        try:
            self.client.finish_update(version)
        except EngineError as reason:
            raise reason from error


class ProcessGroupReceiver(Receiver):
    def __init__(self, *, device: torch.device, backend: str, host: str, port: int, timeout_s: float) -> None:
        self.backend, self.host, self.port, self.timeout_s = backend, host, port, timeout_s
        self.device = device if backend == "nccl" else torch.device("cpu")

    def receive(self) -> tuple[dict[str, torch.Tensor], Manifest]:
        try:
            timeout = datetime.timedelta(seconds=self.timeout_s)
            store = dist.TCPStore(self.host, self.port, 2, is_master=False, timeout=timeout)
            own_host = own_address(self.host, self.port)
            return self._receive(Wire(make_group(self.backend, store, _ENGINE, own_host, self.timeout_s), self.device))
        except (ManifestError, msgspec.MsgspecError) as error:
            raise UpdateFailed(f"the sender at {self.host}:{self.port} sent something unreadable: {error}") from error
        except UpdateFailed:
            raise
        except RuntimeError as error:
            raise UpdateFailed(f"lost the sender at {self.host}:{self.port} before the update was complete: {error}") from error

    def _receive(self, wire: Wire) -> tuple[dict[str, torch.Tensor], Manifest]:
        received: dict[str, torch.Tensor] = {}
        while True:
            frame = wire.receive_frame()
            if frame.abort is not None:
                raise UpdateFailed(f"the sender gave up: {frame.abort}")
            if frame.manifest is not None:
                return received, frame.manifest
            received.update(wire.receive_bucket(frame.tensors))
