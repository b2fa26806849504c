"""``vime prove --device cuda``: the sweeps of every model's shapes, and their cost, in one report.

What was found is kept on disk as well (:mod:`vime.ops.cuda.proven`): a shape whose rows differ is refused from then on.
"""
from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from vime.ops.cuda import bench, needs, proof_attention, proven
from vime.ops.cuda.proof import Sweep
from vime.ops.cuda.shapes import MODELS, ModelShape
from vime.ops.prove_types import CaseResult, ProofReport, Timing

_COSTS: dict[str, Callable[[ModelShape], Iterator[tuple[str, Timing]]]] = {
    "linear": bench.linears, "norm": bench.elementwise, "logprob": bench.vocabulary, "attention": bench.attention,
}
#: Which operations one timing function covers besides the one that starts it.
_TOGETHER = {"norm": ("rope", "activation"), "logprob": ("sampling",)}


def run(dtypes: Iterable[torch.dtype], ops: Iterable[str], quick: bool, progress: Callable[[CaseResult], None], subject: str) -> ProofReport:
    """Sweep ``ops`` on the CUDA device of this process; ``quick``: one model, few rows, no timing."""
    if proven.mode() == "require":  # others may use only what was kept; this is what makes it
        os.environ["VIME_PROOFS"] = ""
    properties = torch.cuda.get_device_properties(0)
    report = ProofReport("cuda", subject, quick, [], f"{properties.name}, {properties.multi_processor_count} multiprocessors")
    chosen, started = tuple(ops), time.perf_counter()
    with torch.no_grad():
        for dtype in dtypes:
            for shape in list(MODELS.values())[: 1 if quick else None]:
                torch.manual_seed(1234)
                cases = list(_sweeps(Sweep(shape, dtype, quick, subject), chosen, quick, progress))
                if not quick and subject == "vime" and dtype is torch.bfloat16:
                    _attach(cases, _timings(shape, chosen))
                if subject == "vime":
                    needs.keep(cases, dtype, shape, quick)
                report.cases += cases
                torch.cuda.empty_cache()
    report.seconds = time.perf_counter() - started
    return report


def _sweeps(sweep: Sweep, chosen: tuple[str, ...], quick: bool, progress: Callable[[CaseResult], None]) -> Iterator[CaseResult]:
    for op in chosen:
        results = proof_attention.attention(sweep, quick) if op == "attention" else getattr(sweep, op)()
        for result in results:
            progress(result)
            yield result
        if op == "attention" and sweep.subject == "vime":
            for result in proof_attention.attention_backward(sweep, quick):
                progress(result)
                yield result


def _timings(shape: ModelShape, chosen: tuple[str, ...]) -> Iterator[tuple[str, Timing]]:
    for op, measure in _COSTS.items():
        if {op, *_TOGETHER.get(op, ())} & set(chosen):
            yield from measure(shape)


def _attach(cases: list[CaseResult], timings: Iterable[tuple[str, Timing]]) -> None:
    """Each timing to the first case of its function."""
    first = {case.function: case for case in reversed(cases)}
    for function, timing in timings:
        if function in first:
            first[function].timings.append(timing)
