"""One rank of a round trip: holds its shards of a checkpoint as a trainer would, and takes part in the export.

Commands are short, so that the controller can show progress and bound every wait. A fault of the weights (a planted
one, or a real one) does not end the rank: it comes back as ``problem``, because the ledger up to there is the news.
"""
from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from vime.weights.checkpoint import HfCheckpoint, HfWriter
from vime.weights.convert import Stacker, to_pieces
from vime.weights.families import family_for
from vime.weights.families.base import WeightError
from vime.weights.faults import Fault, Rewired, plant
from vime.weights.gather import Gatherer, Groups, ShardStore
from vime.weights.ledger import Key, Ledger, chain
from vime.weights.topology import Topology

_TIMEOUT = datetime.timedelta(minutes=10)


@dataclasses.dataclass(frozen=True)
class Spec:
    """What every rank is told. ``out`` is written by rank 0."""

    folder: str
    out: str
    topology: Topology
    store: str
    vocab_multiple: int = 1
    inject: str | None = None
    ledger: bool = True


@dataclasses.dataclass
class Progress:
    """After each command: units done of all, and what went wrong."""

    done: int
    total: int
    problem: str | None = None


class Worker:
    def __init__(self, rank: int, world_size: int, spec: Spec):
        torch.set_num_threads(1)
        self.rank, self.spec, self.topology = rank, spec, spec.topology
        store = dist.FileStore(spec.store, world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
        self.groups = Groups.create(spec.topology)
        self.source = HfCheckpoint(spec.folder)
        self.family = family_for(self.source.config)
        self.plan = self.family.plan(self.source.config, self.source.files, vocab_multiple=spec.vocab_multiple)
        self.ledger = Ledger() if spec.ledger else None
        fault = plant(spec.inject, self.plan, self.topology) if spec.inject else None
        self.fault: Fault | None = fault if fault is not None and fault.rank in (None, rank) else None
        self.local: Any = self._faulty("local", ShardStore(self.source, self.plan, self.topology, rank))
        self._steps: Iterator[int] = iter(())
        self._progress = Progress(0, 0)

    def begin(self, phase: str) -> Progress:
        """Start ``local``, ``export`` or ``reload``; :meth:`step` goes on."""
        steps, total = {
            "local": (self._record("local", self.local), len(self.local)),
            "export": (self._export(), len(self.plan.units) + 1),  # the last for the end of the file
            "reload": (self._reload(), 2 * len(self.local)),
        }[phase]
        self._steps, self._progress = steps, Progress(0, total)
        return self._progress

    def step(self, units: int) -> Progress:
        """About ``units`` further units. Collective in the export: the same number on every rank."""
        progress = self._progress
        try:
            until = progress.done + units
            while progress.done < until:
                progress.done += next(self._steps)
        except StopIteration:
            progress.done = progress.total
        except WeightError as error:
            progress.problem, progress.done = str(error), progress.total
            self._steps = iter(())
        return progress

    def entries(self) -> dict[str, dict[Key, str]]:
        return self.ledger.entries if self.ledger is not None else {}

    def _faulty(self, stage: str, store: Any) -> Any:
        if self.fault is None or self.fault.stage != stage or self.fault.kind == "second-reload":
            return store
        if stage == "received":
            return Rewired(store, self.fault, lambda name: None)
        units = self.plan.by_name
        return Rewired(store, self.fault, lambda name: self.topology.shard_index(units[name], self.rank))

    def _record(self, stage: str, store: Any, change: Fault | None = None) -> Iterator[int]:
        """Show a stage's tensors to the ledger, one by one."""
        units = self.plan.by_name
        for name in store:
            try:
                tensor = store[name]
            except (KeyError, WeightError):  # it is not there: the ledger will say so
                continue
            part = self.topology.shard_index(units[name], self.rank) if name in units else None
            key = Key(name, part)
            if change is not None and key in change.at and change.change is not None:
                tensor = change.change(tensor)
            if self.ledger is not None:
                self.ledger(stage, {key: tensor})
            yield 1

    def _export(self) -> Iterator[int]:
        wrong_root = self.fault.stage if self.fault is not None and self.fault.kind == "wrong-root" else None
        tap = chain(self.fault, self.ledger)
        gatherer = Gatherer(self.plan, self.groups, self.local, tap, wrong_root=wrong_root)
        if self.rank != 0:
            for bucket in gatherer.buckets:
                for _ in gatherer.fetch(bucket):
                    pass
                yield len(bucket.units)
            yield 1
            return
        with self._writer() as writer:
            stacker = Stacker(self.plan, tap)
            for bucket in gatherer.buckets:
                for key, piece in to_pieces(gatherer.fetch(bucket), self.plan, tap):
                    for name, tensor in stacker.add(key, piece):
                        self._write(writer, name, tensor)
                yield len(bucket.units)
            stacker.finish()
            for name in self.plan.carried:
                writer.write(name, self.source[name])
        yield 1

    def _writer(self) -> HfWriter:
        """Announces what the source holds (under a fault at the file: what the fault lets through)."""
        specs, files = dict(self.source.specs), dict(self.source.files)
        if self.fault is not None and self.fault.stage == "file":
            kept = {new.name for new in self.fault.rewire(map(Key, specs))}
            specs, files = ({n: v for n, v in d.items() if n in kept} for d in (specs, files))
        return HfWriter(self.spec.out, specs, files, self.source.other_files())

    def _write(self, writer: HfWriter, name: str, tensor: torch.Tensor) -> None:
        batch = {Key(name): tensor}
        for key, piece in (batch if self.fault is None else self.fault("file", batch)).items():
            writer.write(key.name, piece)

    def _reload(self) -> Iterator[int]:
        """Read the written folder as a receiver does, and cut it into shards again, twice: the second time must
        change nothing."""
        written = HfCheckpoint(self.spec.out)
        if self.rank == 0 and self.ledger is not None:
            for name in written:
                if name not in self.plan.carried:
                    self.ledger("file", {Key(name): written[name]})
        received = self._faulty("received", written)
        if self.rank == 0 and self.ledger is not None:
            for name in received:
                if name not in self.plan.carried:
                    self.ledger("received", {Key(name): received[name]})
        loaded = self._faulty("loaded", ShardStore(received, self.plan, self.topology, self.rank))
        yield from self._record("loaded", loaded)
        second = self.fault if self.fault is not None and self.fault.kind == "second-reload" else None
        yield from self._record("loaded", loaded, second)
