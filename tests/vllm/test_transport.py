"""Manifest and transports without an engine: what is sent is what arrives, and every planted fault is named."""
from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vllm.stand_in import Engine
from vime.vllm.protocol import UpdateFailed
from vime.weights.manifest import Manifest, ManifestError, arrival_problems, describe, digest_of, manifest_of
from vime.weights.transports import disk, fanout, open_receiver
from vime.weights.transports.base import Endpoint
from vime.weights.transports.process_group import ProcessGroupSender
from vime.weights.transports.stream import buckets

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 10).to(dtype)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(kinds=st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=0, max_size=6))
def test_process_group_delivers_every_byte(kinds) -> None:
    tensors = {f"t{i}": make(shape, dtype, i) for i, (shape, dtype) in enumerate(kinds)}
    sender = ProcessGroupSender(Endpoint(url="http://127.0.0.1:1", timeout_s=20))
    sender.client = engine = Engine()
    sender.send(iter(tensors.items()), 5)
    assert arrival_problems(engine.manifest, engine.received) == []
    assert engine.manifest == manifest_of(tensors.items(), 5)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(kinds=st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=6), limit=st.sampled_from([1, 64, 1 << 20]))
def test_disk_delivers_every_byte(tmp_path_factory, kinds, limit) -> None:
    tensors = {f"t{i}": make(shape, dtype, i) for i, (shape, dtype) in enumerate(kinds)}
    folder = tmp_path_factory.mktemp("disk") / "w"
    disk.write(folder, iter(tensors.items()), 3, file_bytes=limit)
    received, manifest = open_receiver({"kind": "disk", "folder": str(folder)}, torch.device("cpu")).receive()
    assert arrival_problems(manifest, received) == [] and manifest == manifest_of(tensors.items(), 3)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def broken():
        yield "a", torch.ones(4)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        disk.write(tmp_path / "w", broken(), 1)
    assert list(tmp_path.iterdir()) == []


def test_a_dead_sender_is_noticed() -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    receiver = open_receiver({"kind": "process_group", "backend": "gloo", "host": "127.0.0.1", "port": store.port, "timeout_s": 1},
                             torch.device("cpu"))
    with pytest.raises(UpdateFailed, match=r"lost the sender at 127\.0\.0\.1"):
        receiver.receive()


def test_a_sender_killed_in_the_middle_is_noticed() -> None:
    """The sender's process ends after the first bucket; the receiver hears of it at once, not after its timeout."""
    code = (
        "import os, sys, torch, torch.distributed as dist\n"
        "from vime.weights.transports.process_group import Wire, make_group\n"
        "store = dist.TCPStore('127.0.0.1', 0, 2, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True)\n"
        "wire = Wire(make_group('gloo', store, 0, '127.0.0.1', 30), torch.device('cpu'))\n"
        "wire.send_bucket([('a', torch.ones(1000))])\n"
        "os._exit(9)\n")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    receiver = open_receiver({"kind": "process_group", "backend": "gloo", "host": "127.0.0.1", "port": port, "timeout_s": 60},
                             torch.device("cpu"))
    started = time.monotonic()
    with pytest.raises(UpdateFailed, match="before the update was complete"):
        receiver.receive()
    assert time.monotonic() - started < 30
    assert process.wait(10) == 9


@given(sizes=st.lists(st.integers(0, 40), max_size=12), limit=st.integers(1, 60))
def test_buckets_keep_order_and_limit(sizes, limit) -> None:
    tensors = [(str(i), torch.zeros(n, dtype=torch.uint8)) for i, n in enumerate(sizes)]
    parts = list(buckets(iter(tensors), limit))
    assert [name for part in parts for name, _ in part] == [name for name, _ in tensors]
    assert all(len(part) == 1 or sum(t.numel() for _, t in part) <= limit for part in parts)


@settings(deadline=None)
@given(index=st.integers(0, 11), bit=st.integers(0, 31))
def test_one_flipped_bit_is_found(index: int, bit: int) -> None:
    good = {"a": torch.arange(12, dtype=torch.float32).reshape(3, 4), "b": torch.zeros(2)}
    manifest = manifest_of(good.items(), 1)
    bits = good["a"].clone().view(torch.int32)
    bits.view(-1)[index] ^= torch.tensor(1, dtype=torch.int64).bitwise_left_shift(bit).to(torch.int32)
    problems = arrival_problems(manifest, {**good, "a": bits.view(torch.float32)})
    assert len(problems) == 1 and problems[0].startswith("a: digest ")


def test_signed_zero_dtype_and_shape_are_differences() -> None:
    zero = torch.zeros(4)
    assert digest_of(zero) != digest_of(-zero)
    assert describe("a", zero) != describe("a", zero.reshape(2, 2)) != describe("a", zero.to(torch.int32))


def test_a_manifest_survives_json_and_refuses_nonsense() -> None:
    manifest = manifest_of([("a", torch.ones(3))], 4)
    assert Manifest.from_json(manifest.to_json()) == manifest
    with pytest.raises(ManifestError, match="not a weight manifest"):
        Manifest.from_json(b"{}")
    with pytest.raises(ManifestError, match="announces a twice"):
        manifest_of([("a", torch.ones(3)), ("a", torch.ones(3))], 4)


def test_an_nccl_group_raises_when_its_time_is_up_and_others_stay_as_they_are(monkeypatch) -> None:
    """Read when the group is made: otherwise a dead trainer takes the engine's whole process with it."""
    import os

    import torch.distributed as dist

    from vime.weights.transports.process_group import make_group

    seen = []

    class Group:
        class Options: ...

        def __init__(self, store, rank, size, options) -> None:
            seen.append((os.environ.get("TORCH_NCCL_BLOCKING_WAIT"), rank, size, options._timeout.total_seconds()))
            if rank == 1:
                raise RuntimeError("no GPU")

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    for before in (None, "0"):
        if before is not None:
            monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)
        make_group("nccl", dist.HashStore(), 0, "127.0.0.1", 7.0)
        with pytest.raises(RuntimeError, match="no GPU"):
            make_group("nccl", dist.HashStore(), 1, "127.0.0.1", 7.0)
        assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before
    assert seen == [("1", 0, 2, 7.0), ("1", 1, 2, 7.0)] * 2


def test_through_a_folder_one_gather_serves_every_rank_of_an_engine(tmp_path: Path, monkeypatch) -> None:
    tensors = {f"t{i}": make((5, 3 + i), DTYPES[i % 4], i) for i in range(9)}
    engines = [Engine() for _ in range(3)]
    endpoints = [Endpoint(url=f"http://127.0.0.1:{i + 1}", transport="disk", disk_dir=str(tmp_path)) for i in range(3)]

    def open_sender(endpoint):
        sender = disk.DiskSender(endpoint)
        sender.client = engines[endpoints.index(endpoint)]
        return sender

    monkeypatch.setattr(fanout, "open_sender", open_sender)
    assert fanout.rounds(endpoints) == [endpoints]
    streams = [Endpoint(url=e.url) for e in endpoints]
    assert fanout.rounds(streams) == [[e] for e in streams]
    taken = iter(tensors.items())  # can be read once
    assert fanout.send(endpoints, taken, 7) == [{"version": 7}] * 3
    for engine in engines:
        assert arrival_problems(engine.manifest, engine.received) == [] and engine.manifest == manifest_of(tensors.items(), 7)
    assert list(tmp_path.iterdir()) == []

    def refuse(version):
        raise UpdateFailed("2 requests are running")

    engines[1].finish_update = refuse
    with pytest.raises(UpdateFailed, match="2 requests are running"):
        fanout.send(endpoints, iter(tensors.items()), 8)
    assert engines[2].begun == 1 and list(tmp_path.iterdir()) == []  # the third was not asked, and no files stay
