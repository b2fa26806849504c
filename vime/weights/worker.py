"""One rank of a round trip: holds its shards of a checkpoint as a trainer would, and takes part in the export.

Commands are short, so that the controller can show progress and bound every wait. A fault of the weights (a planted
one, or a real one) does not end the rank: it comes back as ``problem``, because the ledger up to there is the news.
"""
from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from vime.errors import VimeError
from vime.weights.checkpoint import HfCheckpoint
from vime.weights.convert import Stacker, to_pieces
from vime.weights.errors import WeightError
from vime.weights.families import family_for
from vime.weights.faults import Fault, Rewired, plant
from vime.weights.folders import CannotWrite, CheckpointError
from vime.weights.gather import Gatherer, ShardStore
from vime.weights.groups import Groups
from vime.weights.ledger import Key, Ledger, chain
from vime.weights.topology import Topology
from vime.weights.writer import HfWriter


class SourceLost(VimeError):
    """This rank cannot read its shards any more. It ends all ranks: the others wait for it in a collective."""


_TIMEOUT = datetime.timedelta(minutes=10)


@dataclasses.dataclass
class Progress:
    """After each command: units done of all, and what went wrong."""

    done: int
    total: int
    problem: str | None = None
    cannot_write: bool = False  # the disk is to blame, not the weights


class Worker:
    """What :class:`vime.rl.ranks.Ranks` makes for :class:`vime.weights.roundtrip.RoundTrip`. ``store``: file of the rendezvous."""

    def __init__(self, rank: int, world_size: int, store: str):
        torch.set_num_threads(1)
        self.rank = rank
        self.groups: Any = None
        self.local: Any = None
        self._steps: Iterator[int] = iter(())
        dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size,
                                timeout=_TIMEOUT)

    def open(self, folder: str, topology: Topology, vocab_multiple: int) -> None:
        """Take one checkpoint, cut one way. Collective: makes the process groups."""
        self._leave()
        self.topology, self.groups = topology, Groups.create(topology)
        self.source = HfCheckpoint(folder)
        family = family_for(self.source.config)
        self.plan = family.plan(self.source.config, self.source.files, vocab_multiple=vocab_multiple)
        self._steps = iter(())
        self._progress = Progress(0, 0)
        self.arm("", None)

    def _leave(self) -> None:
        """Give up the groups of the checkpoint before: each has threads that wake up a hundred times a second."""
        groups, self.groups = self.groups, None
        self._steps, self.local = iter(()), None
        for handle in groups.handles.values() if groups is not None else ():
            if handle is not None:
                dist.destroy_process_group(handle)

    def arm(self, out: str, inject: str | None) -> None:
        """Get ready for a run: rank 0 will write ``out``; ``inject`` plants a fault. Begins a new ledger."""
        self.out, self.ledger = out, Ledger(stacked=self.plan.stacked)
        fault = plant(inject, self.plan, self.topology) if inject else None
        self.fault: Fault | None = fault if fault is not None and fault.rank in (None, self.rank) else None
        self.local = self._faulty("local", ShardStore(self.source, self.plan, self.topology, self.rank))

    def begin(self, phase: str) -> Progress:
        """Start ``local``, ``export``, ``file`` or ``reload``; :meth:`step` goes on."""
        steps, total = {
            "local": (self._record("local", self.local), len(self.local)),
            "export": (self._export(), len(self.plan.units) + 1),  # the last for the end of the file
            "file": (self._file(), 1),
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
            progress.cannot_write = isinstance(error, CannotWrite)
            self._steps = iter(())
        return progress

    def entries(self) -> dict[str, dict[Key, str]]:
        """Stage -> key -> digest of what this rank has shown since :meth:`arm`."""
        return self.ledger.entries

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
            self.ledger(stage, {key: tensor})
            yield 1

    def _export(self) -> Iterator[int]:
        wrong_root = self.fault.stage if self.fault is not None and self.fault.kind == "wrong-root" else None
        tap = chain(self.fault, self.ledger)
        gatherer = Gatherer(self.plan, self.groups, self.local, tap, wrong_root=wrong_root)
        stacker = Stacker(self.plan, tap)
        problem: WeightError | None = None
        with contextlib.ExitStack() as stack:
            writer: HfWriter | None = None
            try:
                writer = stack.enter_context(self._writer()) if self.rank == 0 else None
            except WeightError as error:
                problem = error
            for bucket in gatherer.buckets:
                try:
                    items = gatherer.fetch(bucket)
                except CheckpointError as error:
                    raise SourceLost(str(error)) from error
                # The other ranks go on, so the collectives have to be met to the end. And what comes after the first problem is
                # looked at like the rest: a stage that was left early would be blamed for what it was not asked for.
                for item in items if self.rank == 0 else ():
                    try:
                        found = self._consume(writer if problem is None else None, stacker, to_pieces([item], self.plan, tap))
                    except WeightError as error:
                        found = error
                    problem = problem or found
                yield len(bucket.units)
            if problem is not None:
                raise problem
            if writer is not None:
                stacker.finish()
                for name in self.plan.carried:
                    writer.write(name, self.source[name])
        yield 1

    def _consume(self, writer: HfWriter | None, stacker: Stacker, pieces: Iterable[tuple[Key, torch.Tensor]]) -> WeightError | None:
        """What the writer said against the first tensor that it did not take, if any."""
        problem: WeightError | None = None
        for piece in pieces:
            for name, tensor in stacker.add(*piece):
                batch = {Key(name): tensor}
                for key, whole in (batch if self.fault is None else self.fault("file", batch)).items():
                    if writer is None or problem is not None:
                        continue
                    try:
                        writer.write(key.name, whole)
                    except WeightError as error:
                        problem = error
        return problem

    def _writer(self) -> HfWriter:
        """Announces what the source holds (under a fault at the file: what the fault lets through)."""
        specs, files = dict(self.source.specs), dict(self.source.files)
        if self.fault is not None and self.fault.stage == "file":
            kept = {new.name for new in self.fault.rewire(map(Key, specs))}
            specs, files = ({n: v for n, v in d.items() if n in kept} for d in (specs, files))
        return HfWriter(self.out, specs, files, self.source.other_files())

    def _file(self) -> Iterator[int]:
        """The written folder, as rank 0 finds it."""
        if self.rank == 0:
            written = HfCheckpoint(self.out)
            for name in written:
                if name not in self.plan.carried:
                    self.ledger("file", {Key(name): written[name]})
        yield 1

    def _reload(self) -> Iterator[int]:
        """Read the written folder as a receiver does, and cut it into shards again, twice: the second time must
        change nothing."""
        written = HfCheckpoint(self.out)
        received = self._faulty("received", written)
        if self.rank == 0:
            for name in received:
                if name not in self.plan.carried:
                    self.ledger("received", {Key(name): received[name]})
        loaded = self._faulty("loaded", ShardStore(received, self.plan, self.topology, self.rank))
        yield from self._record("loaded", loaded)
        second = self.fault if self.fault is not None and self.fault.kind == "second-reload" else None
        yield from self._record("loaded", loaded, second)
