"""What was seen of every tensor at every stage of its way, as digests.

The ledger is a *tap*: the gather, the converter, the writer and the loader show it what they hold at each stage, and
it writes down a digest. It never looks at what came before; the truth of each stage is derived from the source
checkpoint (:mod:`vime.weights.truth`) and judged by :mod:`alignment.ledger`. Off by default: without a tap nothing
here runs.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, Protocol

import torch

from alignment.digest import digest
from vime.weights import lanes

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
    """Digests of one rank. ``entries[stage][key]`` is the digest; where a key was recorded with two different
    digests, it is both: ``"<last> after <first>"``. Digests of a GPU are waited for when the entries are asked for.

    ``form``: ``host`` (xxh3 over the bytes) or ``device`` (computed where the tensor is; for weights on a GPU).
    ``stacked``: HF names that hold one expert a slice; they are recorded slice by slice.
    """

    def __init__(self, form: str = "host", stacked: Collection[str] = ()) -> None:
        self._digest: Callable[[torch.Tensor], lanes.Begun | str] = {"host": digest, "device": lanes.begin}[form]
        self._entries: dict[str, dict[Key, str]] = {}
        self._begun: list[tuple[dict[Key, str], Key, lanes.Begun | str]] = []
        self._stacked = frozenset(stacked)

    @property
    def entries(self) -> dict[str, dict[Key, str]]:
        begun, self._begun = self._begun, []
        for (rows, key, _), seen in zip(begun, lanes.finish([one for _, _, one in begun]), strict=True):
            rows[key] = seen if rows.get(key, seen) == seen else f"{seen} after {rows[key]}"
        return self._entries

    def __call__(self, stage: str, batch: Batch) -> Batch:
        rows = self._entries.setdefault(stage, {})
        for key, tensor in batch.items():
            if key.part is None and key.name in self._stacked:
                for part, piece in enumerate(tensor):
                    self._put(rows, Key(key.name, part), piece)
            else:
                self._put(rows, key, tensor)
        return batch

    def _put(self, rows: dict[Key, str], key: Key, tensor: torch.Tensor) -> None:
        self._begun.append((rows, key, self._digest(tensor)))


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
