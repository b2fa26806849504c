"""HF -> Megatron shards on every rank -> gather -> HF, through the code an online update uses, judged at every stage.

Equal files alone prove little: a transposed square matrix or an even split of a packed projection survives a round
trip. So the ledger compares each rank's shards, and everything between, with what slicing the source gives; the
written folder is then compared element by element, and read back and cut again, twice.
"""
from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

from alignment import ledger as alignment_ledger
from alignment.verdict import Coverage, Place, Status, Verdict, combine
from vime.weights.checkpoint import HfCheckpoint
from vime.weights.diff import diff
from vime.weights.families import family_for
from vime.weights.faults import plant
from vime.weights.ledger import STAGES
from vime.weights.topology import Sizes, Topology, experts_of, layers_of
from vime.weights.truth import Truth
from vime.weights.worker import Progress, Spec

Report = Callable[[str, int, int], None]
_STEPS = 60


def roundtrip(folder: str | Path, sizes: Sizes | None = None, inject: str | None = None, out: str | Path | None = None,
              vocab_multiple: int | None = None, report: Report | None = None, log_dir: str | Path | None = None) -> Verdict:
    """Run the round trip of an HF folder and judge it.

    Args:
        sizes: parallel sizes; one rank without.
        inject: ``STAGE:FAULT`` (:mod:`vime.weights.faults`).
        out: where the resulting HF folder goes; without, it is compared and removed.
        vocab_multiple: Megatron's ``make_vocab_size_divisible_by`` times TP. Default 128 * TP.
        report: called with (phase, done, total).

    Raises :class:`vime.weights.families.base.WeightError` for input that cannot be converted or cut this way.
    """
    sizes = sizes or Sizes()
    tell = report or (lambda phase, done, total: None)
    source = HfCheckpoint(folder)
    multiple = vocab_multiple or 128 * sizes.tp
    plan = family_for(source.config).plan(source.config, source.files, vocab_multiple=multiple)
    source.check(plan)
    topology = Topology.build(sizes, layers_of(plan), experts_of(plan))
    topology.check(plan)
    fault = plant(inject, plan, topology) if inject else None
    truth = Truth(source, plan, topology, progress=lambda n: tell("truth", n, len(plan.units)))
    with contextlib.ExitStack() as stack:
        # The folder is written where it will stay, or where temporary files go.
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vime-weights-")))
        target = Path(out) if out else scratch / "hf"
        entries, problem = _run(Spec(str(folder), str(target), topology, str(scratch / "store"), multiple, inject),
                                tell, log_dir)
        source.check_unchanged()
        verdict = alignment_ledger.judge("ledger", STAGES, truth.cells(entries), truth.origin,
                                         topology.experts // topology.size("ep"))
        children = [verdict]
        if problem is None and target.exists():
            children.append(diff(source, target, "files", lambda n, total: tell("compare", n, total), stage="file"))
        else:
            children.append(Verdict("files", Status.NOT_RUN, problem or "no folder was written"))
    return _summary(children, verdict, problem, source, sizes, plan.family, inject, fault.place if fault else None)


def _run(spec: Spec, tell: Report, log_dir: str | Path | None) -> tuple[list, str | None]:
    """All phases on all ranks. Returns every rank's entries and the first problem."""
    from vime.rl.ranks import Ranks

    problem: str | None = None
    env = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    with Ranks(spec.topology.world, "vime.weights.worker:Worker", spec, env=env, log_dir=log_dir) as ranks:
        for phase in ("local", "export", "reload"):
            progress: list[Progress] = ranks.call("begin", phase)
            units = max(1, progress[0].total // _STEPS)
            while any(p.done < p.total for p in progress):
                progress = ranks.call("step", units)
                tell(phase, min(p.done for p in progress), progress[0].total)
            problem = next((p.problem for p in progress if p.problem), None)
            if problem is not None:
                break
        return ranks.call("entries"), problem


def _summary(children: list[Verdict], ledger: Verdict, problem: str | None, source: HfCheckpoint, sizes: Sizes,
             family: str, inject: str | None, planted: Place | None) -> Verdict:
    """The ledger's place and cause lead: it names the first stage, the comparison of the files only the last."""
    out = combine(f"weights roundtrip {family} {sizes}", children)
    files = children[1]
    out.coverage = {**files.coverage, **ledger.coverage} if files.coverage else {**ledger.coverage, "tensors": Coverage(0, len(source))}
    if not ledger.green:
        out.status, out.reason, out.first_bad, out.causes = ledger.status, ledger.reason, ledger.first_bad, ledger.causes
        out.downstream = ledger.downstream
    elif problem is not None:
        out.status, out.reason = Status.FAIL, problem
    out.info = {"family": family, "topology": str(sizes), "bytes": source.nbytes, "problem": problem,
                "pictures": ledger.info.pop("pictures", [])}
    out.stats = {"tensors": len(source), "stages": ledger.stats.get("stages", {})}
    if planted is not None:
        out.info |= {"injected": inject, "planted": {**planted.to_dict(), "text": str(planted)}}
    return out
