"""The two ends of a weight transport, and how to open them.

A transport moves bytes and nothing else: it does not judge them and does not know the engine. The sender runs in the
trainer and drives the engine's control plane; the receiver runs in the engine and hands over what arrived together with
the manifest that was announced.
"""
from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from vime.vllm.protocol import UpdateFailed
from vime.weights.manifest import Manifest

if TYPE_CHECKING:
    from vime.vllm.client import EngineClient

KINDS = ("process_group", "disk", "ipc")


class Endpoint(msgspec.Struct, kw_only=True):
    """Where an engine is and how to reach it; plain data, so that it can be handed to trainer ranks.

    Attributes:
        url, token: the engine's HTTP address and bearer token.
        transport: ``process_group``, ``disk`` or ``ipc`` (both sides on GPUs of one machine).
        backend: of the process group: ``gloo`` or ``nccl``.
        host: address of *this* (sending) side that the engine can reach.
        disk_dir: folder that both sides see, for ``disk``.
        keep_files: leave the written folders (``--update-weight-disk-keep-files``).
        check_equal: read every element back from the engine and compare (``--check-weight-update-equal``).
        timeout_s: longest wait for the other side.
    """

    url: str
    token: str | None = None
    transport: str = "process_group"
    backend: str = "gloo"
    host: str = "127.0.0.1"
    disk_dir: str | None = None
    keep_files: bool = False
    check_equal: bool = True
    timeout_s: float = 300.0


class Sender(abc.ABC):
    """The trainer's end. One object serves many updates."""

    def __init__(self, endpoint: Endpoint) -> None:
        from vime.vllm.client import EngineClient

        self.endpoint = endpoint
        self.client: EngineClient = EngineClient(endpoint.url, token=endpoint.token, timeout=endpoint.timeout_s)

    @abc.abstractmethod
    def send(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, Any]:
        """Replace the engine's weights by ``named_tensors`` (all of them, under Hugging Face names) as ``version``.

        Returns:
            The engine's report: version, tensors, elements, digest, seconds, what was compared.

        Raises:
            UpdateFailed: the engine did not take them; it refuses to generate until an update succeeds.
            EngineDied: the engine is gone.
        """

    def close(self) -> None:
        self.client.close()

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Receiver(abc.ABC):
    """The engine's end, for one update. ``keep_on``: where tensors are kept that have arrived; None, where they arrive."""

    keep_on: torch.device | None = None
    #: Looks at each tensor as it arrives and says what is kept of it, before :attr:`keep_on`; None: the tensor. Streams only.
    look: Callable[[str, torch.Tensor], torch.Tensor] | None = None

    @abc.abstractmethod
    def receive(self) -> tuple[dict[str, torch.Tensor], Manifest]:
        """All tensors, on the CPU, the transport's device or ``keep_on``, and the manifest that came with them.

        Raises:
            UpdateFailed: the sender gave up, died, or sent something that cannot be read.
        """

    def close(self) -> None:  # noqa: B027 - most receivers hold nothing
        """Release sockets and files."""


def open_sender(endpoint: Endpoint) -> Sender:
    """The sending end for ``endpoint``. Raises UpdateFailed on an unknown transport."""
    from vime.weights.transports.disk import DiskSender
    from vime.weights.transports.ipc import IpcSender
    from vime.weights.transports.process_group import ProcessGroupSender

    if endpoint.transport == "process_group":
        return ProcessGroupSender(endpoint)
    if endpoint.transport == "disk":
        return DiskSender(endpoint)
    if endpoint.transport == "ipc":
        return IpcSender(endpoint)
    raise UpdateFailed(f"unknown weight transport {endpoint.transport!r}; known: {', '.join(KINDS)}")


def open_receiver(transport: dict[str, Any], device: torch.device) -> Receiver:
    """The receiving end for what a sender announced. Raises UpdateFailed on an unknown one."""
    from vime.weights.transports.disk import DiskReceiver
    from vime.weights.transports.ipc import IpcReceiver
    from vime.weights.transports.process_group import ProcessGroupReceiver

    fields = dict(transport)
    kind = fields.pop("kind", None)
    if kind == "process_group":
        return ProcessGroupReceiver(device=device, **fields)
    if kind == "disk":
        return DiskReceiver(**fields)
    if kind == "ipc":
        return IpcReceiver(device=device, **fields)
    raise UpdateFailed(f"unknown weight transport {kind!r}; known: {', '.join(KINDS)}")
