"""The weights of a running model, gathered from all its ranks, as an online update sends them.

Three things are checked here and not left to the receiver, which cannot know better than the sender. Before anything
moves: who owns what, and that all ranks are about to do the same (:mod:`vime.weights.gather`). After everything moved,
and before the receiver hears that it was complete: that every rank finds its own shards, bit for bit, in what was
gathered, and that all ranks gathered the same (:class:`Proof`). Replicas that drifted apart are found by the same look.
"""
from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash

from alignment.digest import digest
from vime.weights.convert import export
from vime.weights.errors import WeightError
from vime.weights.families import family_for
from vime.weights.families.units import Unit
from vime.weights.faults import Fault, plant
from vime.weights.gather import BUCKET_BYTES, Gatherer, is_copy
from vime.weights.groups import Groups, all_gather_object
from vime.weights.lanes import device_digest
from vime.weights.ledger import Ledger, Tap, chain
from vime.weights.megatron_state import local_state
from vime.weights.raw import same_bits
from vime.weights.topology import experts_of


class GatherError(WeightError):
    """What was gathered is not what the ranks hold. The message names the first tensor, the rank and its place."""


class Proof:
    """Watches a gather on this rank; at the end all ranks put together what they saw.

    It holds one number a tensor. Collective: every rank must watch to the end.
    """

    def __init__(self, gatherer: Gatherer):
        self.gatherer = gatherer
        self._marks: dict[str, int] = {}
        self._not_mine: list[str] = []

    def watch(self) -> Iterator[tuple[Unit, torch.Tensor]]:
        """The gatherer's items. Raises :class:`GatherError` after the last, on every rank alike."""
        for unit, full in self.gatherer:
            self._see(unit, full)
            yield unit, full
        self._compare(all_gather_object((self._marks, self._not_mine)))

    def _see(self, unit: Unit, full: torch.Tensor) -> None:
        top, rank = self.gatherer.topology, self.gatherer.rank
        text = digest(full) if full.device.type == "cpu" else device_digest(full)
        self._marks[unit.name] = xxhash.xxh3_64_intdigest(text.encode())
        copies = (unit.name,) if is_copy(unit, rank, top, self.gatherer.local) else ()
        for name in (*top.names_on(rank, unit), *copies):
            if not same_bits(self.gatherer.local[name], unit.shard(full, top.shard_index(unit, rank), top.shard_size(unit))):
                self._not_mine.append(name)

    def _compare(self, everyone: list[tuple[dict[str, int], list[str]]]) -> None:
        top, first = self.gatherer.topology, everyone[0][0]
        for unit in self.gatherer.plan.units:
            for rank, (marks, not_mine) in enumerate(everyone):
                at = top.place(rank)
                if unit.name not in marks:
                    raise GatherError(f"{unit.name} never came out of the gather on rank {rank} ({at})")
                for name in (unit.name, *unit.megatron_alias):
                    if name in not_mine:
                        raise GatherError(f"{name}: rank {rank} ({at}) holds other bits than what was gathered in its place; it came "
                                          "from another owner, got changed on the way, or is a stale copy")
                if marks[unit.name] != first.get(unit.name):
                    raise GatherError(f"{unit.name}: rank {rank} ({at}) gathered other bits than rank 0; a group was sent from a wrong "
                                      "root, or the replicas of the model have drifted apart")


class Exporter:
    """HF tensors of a Megatron model that is spread over TP, PP, EP and expert-TP, as often as wanted.

    Args:
        chunks: this rank's model, one module a virtual pipeline stage.
        hf_config: parsed ``config.json``.
        hf_names: names to come out, as the source checkpoint has them (tied copies, MTP layers).
        vocab_multiple: what the model's vocabulary was padded to a multiple of.
        ledger: writes down every stage of every gather (off by default).

    Collective: every rank makes one and then makes the same calls. Raises :class:`WeightError` naming the tensor for a
    model that does not fit its config or its groups.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], hf_config: Mapping[str, Any], hf_names: Collection[str],
                 vocab_multiple: int = 1, ledger: Ledger | None = None):
        self.ledger = ledger
        self.chunks = list(chunks)
        self.plan = family_for(hf_config).plan(hf_config, hf_names=hf_names, vocab_multiple=vocab_multiple)
        self.groups = Groups.of_megatron(self.chunks, experts_of(self.plan))
        self._wrong_root: str | None = None
        self._fault: Tap | None = None

    def inject(self, text: str | None) -> None:
        """Plant ``STAGE:FAULT`` (:mod:`vime.weights.faults`) into every gather from now on, for negative controls;
        None takes it out again."""
        fault: Fault | None = plant(text, self.plan, self.groups.topology) if text else None
        self._wrong_root = fault.stage if fault is not None and fault.kind == "wrong-root" else None
        mine = fault is not None and fault.kind != "wrong-root" and fault.rank in (None, self.groups.rank)
        self._fault = fault if mine else None

    def tensors(self, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, torch.Tensor]]:
        """``(HF name, tensor)``, one bucket in memory at a time. Every rank must iterate to the end.

        Raises:
            OwnershipError, AgreementError: from this call, before anything was sent.
            GatherError: from the iterator, after the last tensor.
        """
        top, rank = self.groups.topology, self.groups.rank
        tap = chain(self._fault, self.ledger)
        gatherer = Gatherer(self.plan, self.groups, local_state(self.chunks, top, rank), tap, bucket_bytes, self._wrong_root,
                            strict=self._fault is None)
        return export(gatherer, tap, Proof(gatherer).watch())
