"""What the transports that stream have in common: buckets, frames, and the two ends that bring them through.

Tensors travel packed in buckets; each bucket is preceded by a frame that says what is in it. The last frame carries the
manifest, so that a sender which gathers its tensors one by one never needs them twice. Both ends meet at a store that the
sender serves for this one update, so a failed one leaves nothing to repair. How bytes get across is a :class:`Channel`.
"""
from __future__ import annotations

import abc
import datetime
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from vime.vllm.protocol import EngineError, UpdateFailed
from vime.weights.folders import spec_bytes
from vime.weights.manifest import Manifest, ManifestError, TensorInfo, dtype_from
from vime.weights.transports.base import Receiver, Sender

#: Bytes of a bucket. A larger tensor travels alone.
BUCKET_BYTES = 64 << 20

Bucket = list[tuple[str, torch.Tensor]]


class Frame(msgspec.Struct, kw_only=True):
    """What comes next: a bucket of tensors, the manifest (the end), or the sender's reason to give up."""

    tensors: list[TensorInfo] = []
    manifest: Manifest | None = None
    abort: str | None = None


class Channel(abc.ABC):
    """One direction between a sender and an engine, for one update. The sending or the receiving half may be missing."""

    @abc.abstractmethod
    def send_frame(self, frame: Frame) -> None:
        """A frame without tensors: the manifest, or the reason to give up."""

    @abc.abstractmethod
    def send_bucket(self, bucket: Bucket) -> list[TensorInfo]:
        """A frame and the tensors it announces; what was announced."""

    def settle(self) -> None:  # noqa: B027 - most channels deliver what was sent even if the sender is gone
        """Wait a little until the last frame was read, before what carries it goes away."""

    @abc.abstractmethod
    def receive_frame(self) -> Frame: ...

    @abc.abstractmethod
    def receive_bucket(self, frame: Frame) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of ``frame``, each with a storage of its own."""


class StreamSender(Sender):
    """Announces the update, then streams. Subclasses say how."""

    @abc.abstractmethod
    def announcement(self) -> dict[str, Any]:
        """``kind`` and further arguments of the receiver, beside where the store is."""

    @abc.abstractmethod
    def connect(self, store: dist.Store) -> Channel: ...

    def send(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, Any]:
        e = self.endpoint
        timeout = datetime.timedelta(seconds=e.timeout_s)
        store = dist.TCPStore(e.host, 0, 2, is_master=True, timeout=timeout, wait_for_workers=False)
        self.client.begin_update(version, {**self.announcement(), "host": e.host, "port": store.port, "timeout_s": e.timeout_s},
                                 check_equal=e.check_equal)
        try:
            self._stream(self.connect(store), named_tensors, version)
        except RuntimeError as error:
            # The engine's own account says more than a broken connection does; but never hide why *we* stopped.
            try:
                self.client.finish_update(version)
            except EngineError as reason:
                raise reason from error
            raise
        return self.client.finish_update(version)

    def _stream(self, channel: Channel, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        infos: list[TensorInfo] = []
        try:
            for bucket in buckets(named_tensors):
                infos += channel.send_bucket(bucket)
            last = Frame(manifest=Manifest(version=version, tensors=infos))
        except Exception as error:
            channel.send_frame(Frame(abort=f"{type(error).__name__}: {error}"))
            channel.settle()
            raise
        channel.send_frame(last)


class StreamReceiver(Receiver):
    """Takes buckets until the manifest comes. Subclasses say how."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self.host, self.port, self.timeout_s = host, port, timeout_s

    @abc.abstractmethod
    def connect(self, store: dist.Store) -> Channel: ...

    def receive(self) -> tuple[dict[str, torch.Tensor], Manifest]:
        try:
            timeout = datetime.timedelta(seconds=self.timeout_s)
            channel = self.connect(dist.TCPStore(self.host, self.port, 2, is_master=False, timeout=timeout))
            received: dict[str, torch.Tensor] = {}
            while True:
                frame = channel.receive_frame()
                if frame.abort is not None:
                    raise UpdateFailed(f"the sender gave up: {frame.abort}")
                if frame.manifest is not None:
                    return received, frame.manifest
                for name, tensor in list(channel.receive_bucket(frame)):  # taken whole: the next one is on its way meanwhile
                    if name in received:
                        raise UpdateFailed(f"{name} arrived twice; one of the two would be lost")
                    kept = tensor if self.look is None else self.look(name, tensor)
                    received[name] = kept if self.keep_on is None or kept.is_meta else kept.to(self.keep_on)
        except (ManifestError, msgspec.MsgspecError) as error:
            raise UpdateFailed(f"the sender at {self.host}:{self.port} sent something unreadable: {error}") from error
        except UpdateFailed:
            raise
        except RuntimeError as error:
            raise UpdateFailed(f"lost the sender at {self.host}:{self.port} before the update was complete: {error}") from error


def nbytes_of(info: TensorInfo) -> int:
    """Bytes of a tensor as announced. Raises ManifestError on an unknown dtype."""
    return spec_bytes((dtype_from(info.dtype), info.shape))


def buckets(named_tensors: Iterable[tuple[str, torch.Tensor]], limit: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Consecutive tensors whose bytes stay within ``limit``; a larger tensor is a bucket of its own."""
    bucket: Bucket = []
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
