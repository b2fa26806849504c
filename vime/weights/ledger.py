"""What was seen of every tensor at every stage of its way, as digests.

The ledger is a *tap*: the gather, the converter, the writer and the loader show it what they hold at each stage, and
it writes down a digest. It never looks at what came before; the truth of each stage is derived from the source
checkpoint (:mod:`vime.weights.truth`) and judged by :mod:`alignment.ledger`. Off by default: without a tap nothing
here runs.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch

from alignment.digest import device_digest, digest

#: The stages, in the order of a tensor's way from a rank's memory into an engine.
STAGES = ("local", "source", "pp", "ep", "tp", "full", "converted", "stacked", "file", "received", "loaded")


class Key(NamedTuple):
    """Name of a tensor at a stage: Megatron's global name with its TP shard, or the HF name with the slice of a
    stacked tensor. ``part`` is None for a whole tensor."""

    name: str
    part: int | None = None


Batch = Mapping[Key, torch.Tensor]


class Tap(Protocol):
    """Sees (and, for a planted fault, replaces) what is held at a stage."""

    def __call__(self, stage: str, batch: Batch) -> Batch: ...


class Ledger:
    """Digests of one rank. ``entries[stage][key]`` is the digest; a second recording of a key must say the same.

    ``form``: ``host`` (xxh3 over the bytes) or ``device`` (computed where the tensor is; for weights on a GPU).
    """

    def __init__(self, form: str = "host") -> None:
        self.digest: Callable[[torch.Tensor], str] = {"host": digest, "device": device_digest}[form]
        self.entries: dict[str, dict[Key, str]] = {}

    def __call__(self, stage: str, batch: Batch) -> Batch:
        rows = self.entries.setdefault(stage, {})
        for key, tensor in batch.items():
            seen = self.digest(tensor)
            rows[key] = seen if rows.get(key, seen) == seen else f"{seen} after {rows[key]}"
        return batch


def chain(*taps: Tap | None) -> Tap | None:
    """One tap for several, applied in order; None if there is none."""
    given = [tap for tap in taps if tap is not None]
    if not given:
        return None

    def tap(stage: str, batch: Batch) -> Batch:
        for one in given:
            batch = one(stage, batch)
        return batch

    return tap
