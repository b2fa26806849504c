"""One update to every rank of an engine, gathered as seldom as can be.

Through a folder, all ranks read what was gathered and written once. A stream serves one rank: the ranks of an engine meet before
every round of their serving loop, and one that receives keeps the others from beginning, so they can't take the tensors at the
same time, and nobody holds the whole model in between.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from vime.weights.transports.base import Endpoint, open_sender
from vime.weights.transports.disk import DiskSender


def rounds(endpoints: Sequence[Endpoint]) -> list[Sequence[Endpoint]]:
    """``endpoints`` in groups that one gather serves. The same on every rank of the trainer."""
    if all(endpoint.transport == "disk" for endpoint in endpoints):
        return [endpoints]
    return [[endpoint] for endpoint in endpoints]


def send(endpoints: Sequence[Endpoint], named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> list[dict[str, Any]]:
    """As :meth:`vime.weights.transports.base.Sender.send` to all of one of :func:`rounds`; a report of each."""
    with contextlib.ExitStack() as stack:
        senders = [stack.enter_context(open_sender(endpoint)) for endpoint in endpoints]
        if len(senders) == 1:
            return [senders[0].send(named_tensors, version)]
        return DiskSender.send_files([s for s in senders if isinstance(s, DiskSender)], named_tensors, version)
