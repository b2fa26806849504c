"""Weights over a process group of their own: gloo between any two processes, NCCL between GPUs.

The group has two members, the sender (rank 0) and the engine (rank 1). It lives for one update and is no part of the
default group of either framework.
"""
from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from vime.vllm.protocol import UpdateFailed
from vime.weights.manifest import TensorInfo, describe, dtype_from
from vime.weights.raw import raw_bytes
from vime.weights.transports.base import Endpoint
from vime.weights.transports.stream import Bucket, Channel, Frame, StreamReceiver, StreamSender, nbytes_of

_SENDER, _ENGINE = 0, 1


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
        with _waiting_blocks():
            return dist.ProcessGroupNCCL(store, rank, 2, options)
    raise UpdateFailed(f"unknown process group backend {backend!r}; known: gloo, nccl")


@contextlib.contextmanager
def _waiting_blocks() -> Iterator[None]:
    """An NCCL group made inside of this raises from ``wait`` when its time is up. By itself it lets the wait return, the next
    copy to the host hang, and its watchdog end the whole process: an engine whose trainer died would die, too.

    Groups of others in this process keep their ways: the variable is read when a group is made.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def own_address(towards: str, port: int) -> str:
    """The address of this machine that packets to ``towards`` leave from."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, port))
        return probe.getsockname()[0]


class Wire(Channel):
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

    def send_bucket(self, bucket: Bucket) -> list[TensorInfo]:
        infos = [describe(name, tensor) for name, tensor in bucket]
        self.send_frame(Frame(tensors=infos))
        parts = [raw_bytes(tensor).to(self.device) for _, tensor in bucket]
        data = parts[0] if len(parts) == 1 else torch.cat(parts)
        if data.numel():
            self._send(data)
        return infos

    def receive_bucket(self, frame: Frame) -> Iterator[tuple[str, torch.Tensor]]:
        sizes = [nbytes_of(info) for info in frame.tensors]
        data = self._receive(sum(sizes)) if sum(sizes) else torch.empty(0, dtype=torch.uint8, device=self.device)
        offset = 0
        for info, size in zip(frame.tensors, sizes, strict=True):
            # A tensor of its own, aligned, so that a bucket is freed as soon as it is unpacked.
            flat = data[offset:offset + size].clone()
            yield info.name, flat.view(dtype_from(info.dtype)).reshape(info.shape)
            offset += size


class ProcessGroupSender(StreamSender):
    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self.device = torch.device("cuda", torch.cuda.current_device()) if endpoint.backend == "nccl" else torch.device("cpu")

    def announcement(self) -> dict[str, Any]:
        return {"kind": "process_group", "backend": self.endpoint.backend}

    def connect(self, store: dist.Store) -> Wire:
        e = self.endpoint
        return Wire(make_group(e.backend, store, _SENDER, e.host, e.timeout_s), self.device)


class ProcessGroupReceiver(StreamReceiver):
    def __init__(self, *, device: torch.device, backend: str, host: str, port: int, timeout_s: float) -> None:
        super().__init__(host, port, timeout_s)
        self.backend = backend
        self.device = device if backend == "nccl" else torch.device("cpu")

    def connect(self, store: dist.Store) -> Wire:
        own_host = own_address(self.host, self.port)
        return Wire(make_group(self.backend, store, _ENGINE, own_host, self.timeout_s), self.device)
