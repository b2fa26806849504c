"""The protocol of the IPC transport: frames, one shared buffer, and who may write it when.

Its CUDA calls are replaced by CPU tensors behind the same signature (``Memory``), so this proves the protocol and not
CUDA's mapping of memory between processes, which needs a GPU.
"""
from __future__ import annotations

import itertools
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vllm.stand_in import Engine
from tests.vllm.test_transport import DTYPES, make, shapes
from vime.vllm.protocol import UpdateFailed
from vime.weights.manifest import arrival_problems, describe, manifest_of
from vime.weights.transports import ipc, open_receiver, open_sender, stream
from vime.weights.transports.base import Endpoint

CPU = torch.device("cpu")
_buffers: dict[int, torch.Tensor] = {}
_numbers = itertools.count()


class Memory(ipc.DeviceMemory):
    """A buffer of this process stands for mapped device memory. ``pause`` delays a receiver between opening and copying."""

    gpu, pause = "gpu-0", 0.0

    def allocate(self, nbytes):
        return torch.zeros(nbytes, dtype=torch.uint8)

    def share(self, buffer):
        number = next(_numbers)
        _buffers[number] = buffer
        return ipc.Shared(uuid="gpu-0", nbytes=buffer.numel(), handle=[number, b"\x00\xff", [1, 2]])

    def open(self, shared):
        if shared.uuid != self._uuid():
            return super().open(shared)
        number, opaque, numbers = shared.handle
        assert opaque == b"\x00\xff" and numbers == [1, 2]  # a handle arrives as it was
        time.sleep(self.pause)
        return _buffers.pop(number)[: shared.nbytes]

    def synchronize(self):
        pass

    def _uuid(self):
        return self.gpu


class Sender(ipc.IpcSender):
    def __init__(self):
        super(ipc.IpcSender, self).__init__(Endpoint(url="http://127.0.0.1:1", transport="ipc", timeout_s=20))
        self.memory = Memory(CPU)
        self.client = Engine()


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    monkeypatch.setattr(ipc, "BUCKET_BYTES", 256)
    monkeypatch.setattr(ipc, "DeviceMemory", Memory)
    monkeypatch.setattr(stream.buckets, "__defaults__", (256,))
    return Memory


@pytest.fixture(scope="module")
def tensors():
    return {f"t{i}": make((7, 9), torch.float32, i) for i in range(9)}


kinds_of = st.lists(st.tuples(shapes | st.just((40, 40)), st.sampled_from(DTYPES)), min_size=0, max_size=8)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(kinds=kinds_of)
def test_every_byte_comes_through_one_buffer(memory_for_all, kinds):
    tensors = {f"t{i}": make(shape, dtype, i) for i, (shape, dtype) in enumerate(kinds)}
    sender = Sender()
    sender.send(iter(tensors.items()), 5)
    assert arrival_problems(sender.client.manifest, sender.client.received) == []
    assert sender.client.manifest == manifest_of(tensors.items(), 5)
    assert not _buffers  # every mapping was closed


@pytest.fixture(scope="module")
def memory_for_all():
    """As ``memory``, for properties, which want no fixture that is made anew for each function."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ipc, "BUCKET_BYTES", 256)
        patch.setattr(ipc, "DeviceMemory", Memory)
        patch.setattr(stream.buckets, "__defaults__", (256,))
        yield


def test_the_buffer_is_written_again_only_when_it_was_taken(tensors, monkeypatch):
    monkeypatch.setattr(Memory, "pause", 0.02)
    sender = Sender()
    sender.send(iter(tensors.items()), 1)
    assert arrival_problems(sender.client.manifest, sender.client.received) == []

    class Hasty(ipc.IpcChannel):
        def send_bucket(self, bucket):
            self.store.set(f"taken/{self._step}", "1")
            return super().send_bucket(bucket)

    monkeypatch.setattr(sender, "connect", lambda store: Hasty(store, sender.memory, 20))
    sender.send(iter(tensors.items()), 2)
    assert any("digest" in p for p in arrival_problems(sender.client.manifest, sender.client.received))


def test_another_gpu_is_refused_by_its_name(tensors, monkeypatch):
    sender = Sender()
    sender.endpoint.timeout_s = 600  # it must not wait so long for an engine that gave up
    monkeypatch.setattr(Memory, "gpu", "gpu-7")
    with pytest.raises(UpdateFailed, match=r"lie on GPU gpu-0, the engine runs on gpu-7; .* use nccl"):
        sender.send(iter(tensors.items()), 1)
    assert sender.client.received == {}
    _buffers.clear()


def test_a_sender_that_gives_up_is_heard(tensors):
    def broken():
        yield from list(tensors.items())[:4]
        raise ValueError("gather failed")

    sender = Sender()
    with pytest.raises(ValueError, match="gather failed"):
        sender.send(broken(), 1)
    with pytest.raises(UpdateFailed, match="the sender gave up: ValueError: gather failed"):
        sender.client.finish_update(1)
    assert sender.client.received == {}


@pytest.mark.parametrize(("frame", "message"), [
    (b"\xc1", "sent something unreadable"),
    (ipc._encode(ipc.IpcFrame(tensors=[describe("a", torch.ones(9))])), "announced tensors without a buffer"),
    (ipc._encode(ipc.IpcFrame(tensors=[describe("a", torch.ones(9))], shared=ipc.Shared(uuid="gpu-0", nbytes=16, handle=[-1, b"\x00\xff", [1, 2]]))),
     "a does not fit the shared buffer of 16 bytes"),
])
def test_nonsense_is_refused(frame, message):
    _buffers[-1] = torch.zeros(16, dtype=torch.uint8)
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    store.set("frame/0", frame)
    receiver = open_receiver({"kind": "ipc", "host": "127.0.0.1", "port": store.port, "timeout_s": 5}, CPU)
    with pytest.raises(UpdateFailed, match=message):
        receiver.receive()
    _buffers.clear()


def test_a_sender_killed_in_the_middle_is_noticed():
    """It ends when its first bucket was taken; the receiver hears of it at once, not after its timeout."""
    _buffers[-1] = torch.zeros(64, dtype=torch.uint8)
    shared = ipc.Shared(uuid="gpu-0", nbytes=64, handle=[-1, b"\x00\xff", [1, 2]])
    frame = ipc._encode(ipc.IpcFrame(tensors=[describe("a", torch.zeros(9))], shared=shared))
    code = ("import os, sys, torch.distributed as dist\n"
            "store = dist.TCPStore('127.0.0.1', 0, 2, is_master=True, wait_for_workers=False)\n"
            "store.set('frame/0', bytes.fromhex(sys.argv[1]))\n"
            "print(store.port, flush=True)\n"
            "store.get('taken/0')\n"
            "os._exit(9)\n")
    with subprocess.Popen([sys.executable, "-c", code, frame.hex()], stdout=subprocess.PIPE, text=True) as process:
        receiver = open_receiver({"kind": "ipc", "host": "127.0.0.1", "port": int(process.stdout.readline()), "timeout_s": 60}, CPU)
        started = time.monotonic()
        with pytest.raises(UpdateFailed, match="before the update was complete"):
            receiver.receive()
        assert time.monotonic() - started < 30


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_is_refused():
    with pytest.raises(UpdateFailed, match="shares device memory and needs a GPU; use nccl or disk"):
        open_sender(Endpoint(url="http://127.0.0.1:1", transport="ipc"))
