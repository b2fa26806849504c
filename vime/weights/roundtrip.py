"""HF -> Megatron shards on every rank -> gather -> HF, through the code an online update uses, judged at every stage.

Equal files alone prove little: a transposed square matrix or an even split of a packed projection survives a round
trip. So the ledger compares each rank's shards, and everything between, with what slicing the source gives; the
written folder is then compared element by element, and read back and cut again, twice.
"""
from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from alignment.ledger import Cell, Origin
from alignment.ledger import judge as judge_ledger
from alignment.verdict import Coverage, Status, Verdict, combine
from vime.weights import serve as serving
from vime.weights.checkpoint import HfCheckpoint
from vime.weights.diff import diff
from vime.weights.errors import ConfigMismatch
from vime.weights.families import family_for
from vime.weights.faults import plant
from vime.weights.folders import CannotWrite, CheckpointError, require_free
from vime.weights.ledger import STAGES
from vime.weights.policy import describe, left_out
from vime.weights.topology import Sizes, Topology, experts_of, layers_of
from vime.weights.truth import Truth
from vime.weights.worker import Progress, SourceLost

if TYPE_CHECKING:
    from vime.rl.ranks import Ranks

Report = Callable[[str, int, int], None]
_STEPS = 60  # progress reports a phase, of at least so many units:
_UNITS = 256
PHASES = ("local", "export", "file", "reload")


def roundtrip(folder: str | Path, sizes: Sizes | None = None, inject: str | None = None, out: str | Path | None = None,
              vocab_multiple: int | None = None, report: Report | None = None, serve: bool = False) -> Verdict:
    """One round trip of an HF folder, judged. See :class:`RoundTrip`."""
    with RoundTrip(folder, sizes, vocab_multiple, report) as trip:
        return trip.run(inject, out, serve)


def start_ranks(world: int, scratch: str | Path) -> Ranks:
    """Rank processes for :class:`RoundTrip`; ``scratch`` is a folder for their rendezvous."""
    from vime.rl.ranks import Ranks

    env = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    return Ranks(world, "vime.weights.worker:Worker", str(Path(scratch) / "store"), env=env)


class RoundTrip:
    """The ranks of a topology over one checkpoint; :meth:`run` may be called several times.

    Args:
        sizes: parallel sizes; one rank without.
        vocab_multiple: what Megatron pads the vocabulary to a multiple of. Default 128 * TP.
        report: called with (phase, done, total).
        ranks: from :func:`start_ranks`, to use for several checkpoints; without, own ranks are started and ended.

    Raises :class:`vime.weights.errors.WeightError` for input that cannot be converted or cut this way,
    before a process is started.
    """

    def __init__(self, folder: str | Path, sizes: Sizes | None = None, vocab_multiple: int | None = None,
                 report: Report | None = None, ranks: Ranks | None = None):
        self.sizes = sizes or Sizes()
        self.tell = report or (lambda phase, done, total: None)
        self.source = HfCheckpoint(folder)
        self.multiple = vocab_multiple or 128 * self.sizes.tp
        self.plan = family_for(self.source.config).plan(self.source.config, self.source.files, vocab_multiple=self.multiple)
        self.source.check(self.plan)
        self.topology = Topology.build(self.sizes, layers_of(self.plan), experts_of(self.plan))
        self.topology.check(self.plan)
        self._ranks = ranks
        self._truth: Truth | None = None
        self._serving: serving.Server | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> RoundTrip:
        self._scratch = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="vime-weights-"))
        if self._ranks is None:
            self._ranks = self._stack.enter_context(start_ranks(self.topology.world, self._scratch))
        self._ranks.call("open", str(self.source.folder), self.topology, self.multiple)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    @property
    def truth(self) -> Truth:
        """Computed once."""
        if self._truth is None:
            total = len(self.plan.units)
            self._truth = Truth(self.source, self.plan, self.topology, progress=lambda n: self.tell("truth", n, total))
        return self._truth

    def run(self, inject: str | None = None, out: str | Path | None = None, serve: bool = False) -> Verdict:
        """Go once around and judge.

        Args:
            inject: ``STAGE:FAULT`` (:mod:`vime.weights.faults`).
            out: where the resulting HF folder stays; without, it is compared and removed.
            serve: take the stages ``received`` and ``loaded`` from a running vLLM (:mod:`vime.weights.serve`), and compare its
                answers with those it gives with the source's weights.
        """
        fault = plant(inject, self.plan, self.topology) if inject else None
        if out is not None:
            require_free(Path(out))
        dtype = serving.check(self.source, fault) if serve else ""
        served: serving.Served | None = None
        truth = self.truth
        with tempfile.TemporaryDirectory(dir=self._scratch) as aside:
            target = Path(out) if out else Path(aside) / "hf"
            entries, problem = self._go(str(target), inject, ("local", "export", "file") if serve else PHASES)
            if serve and problem is None:
                served = self._server(dtype).run(HfCheckpoint(target), fault, lambda n, of: self.tell("serve", n, of))
            self.source.check_unchanged()
            cells = truth.cells(entries) if served is None else itertools.chain(
                truth.cells(entries, STAGES[: STAGES.index("received")]), serving.cells(served, truth))
            ledger = judge_ledger("ledger", STAGES, cells, self._origin, self.topology.experts // self.topology.size("ep"))
            if problem is None:
                files = diff(self.source, target, "files", lambda n, total: self.tell("compare", n, total), stage="file")
            else:
                files = Verdict("files", Status.NOT_RUN, problem, coverage={"tensors": Coverage(0, len(self.source))})
        answers = served.answers if served is not None else None
        if serve and answers is None:
            answers = Verdict("served", Status.NOT_RUN, "nothing was served: " + (problem or ""), coverage={"requests": Coverage(0, serving.PROMPTS)})
        verdict = _summary(f"weights roundtrip {self.plan.family} {self.sizes}", ledger, files, problem, answers)
        verdict.info |= {"family": self.plan.family, "topology": str(self.sizes), "bytes": self.source.nbytes}
        if unread := self.source.unread():
            verdict.info["not_read"] = unread
            if verdict.green:
                verdict.reason = "not read, for the index does not name them: " + ", ".join(unread)
        with contextlib.suppress(ConfigMismatch):  # of use to an engine only, which is refused such a config before it starts
            if left := describe(left_out(self.source.config, self.source)):
                verdict.info["left_out"] = left
        if fault is not None:
            if verdict.green:
                verdict.status, verdict.reason = Status.INVALID, f"{inject} was planted at {fault.place} and not found: these checks show nothing"
            verdict.info |= {"injected": inject, "planted": {**fault.place.to_dict(), "text": str(fault.place)}}
        return verdict

    def _server(self, dtype: str) -> serving.Server:
        """Started for the first run that serves."""
        if self._serving is None:
            self.tell("engine", 0, 1)
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self._serving = self._stack.enter_context(serving.Server(self.source, dtype, device))
            self.tell("engine", 1, 1)
        return self._serving

    def _origin(self, cell: Cell) -> Origin | None:
        return serving.origin(cell, self.truth) if cell.rank and "engine" in cell.rank else self.truth.origin(cell)

    def _go(self, out: str, inject: str | None, phases: tuple[str, ...]) -> tuple[list[Any], str | None]:
        """All phases on all ranks. Returns every rank's entries and the first problem."""
        from vime.rl.ranks import TrainerFailed

        problem: str | None = None
        assert self._ranks is not None
        self._ranks.call("arm", out, inject)
        for phase in phases:
            progress: list[Progress] = self._ranks.call("begin", phase)
            units = max(_UNITS, progress[0].total // _STEPS)
            while any(p.done < p.total for p in progress):
                try:
                    progress = self._ranks.call("step", units)
                except TrainerFailed as error:
                    if error.kind != SourceLost.__name__:
                        raise
                    raise CheckpointError(str(error)) from error
                self.tell(phase, min(p.done for p in progress), progress[0].total)
            problem = next((p.problem for p in progress if p.problem), None)
            if any(p.cannot_write for p in progress):
                raise CannotWrite(next(p.problem for p in progress if p.cannot_write))
            if problem is not None:
                break
        return self._ranks.call("entries"), problem


def _summary(name: str, ledger: Verdict, files: Verdict, problem: str | None, answers: Verdict | None = None) -> Verdict:
    """The ledger's place and cause lead: it names the first stage, the comparison of the files only the last."""
    out = combine(name, [ledger, files, *([] if answers is None else [answers])])
    out.coverage = {**({} if answers is None else answers.coverage), **files.coverage, **ledger.coverage}
    if not ledger.green:
        out.status, out.reason, out.first_bad, out.causes = ledger.status, ledger.reason, ledger.first_bad, ledger.causes
        out.downstream = ledger.downstream
    elif problem is not None:
        out.status, out.reason = Status.FAIL, problem
    out.stats = {"stages": ledger.stats.get("stages", {})}
    out.info = {"problem": problem, "pictures": ledger.info.pop("pictures", [])}
    return out
