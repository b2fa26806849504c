"""``vime prove``: every operation proved row-invariant on this device, with its error and its cost."""
from __future__ import annotations

from collections.abc import Sequence

from alignment.verdict import Coverage, Place, Status, Verdict, combine
from vime.commands.progress import TerminalProgress
from vime.ops.prove_types import CaseResult, ProofReport


def run(device: str, dtypes: Sequence[str], ops: Sequence[str], quick: bool, stock: bool) -> tuple[Verdict, ProofReport]:
    """Sweep, with one progress line a case."""
    import torch

    from vime.ops import prove

    with TerminalProgress() as progress:
        progress.phase(f"proving on {device}")
        report = prove.run(device, [getattr(torch, d) for d in dtypes] or None, ops or None, quick, progress.note,
                           "stock" if stock else "vime")
    return verdict_of(report), report


def show(verdict: Verdict) -> None:
    """The table, and under it what the operations cost against the fastest stock route."""
    from alignment import report

    report.terminal(verdict)
    for dtype, ops in verdict.stats["op_ratio"].items():
        each = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ops.items())
        print(f"time against the fastest stock route, {dtype}: geometric mean {verdict.stats['geomean_ratio'][dtype]:.2f} ({each})")


def verdict_of(report: ProofReport) -> Verdict:
    """One verdict a case, in the order of the sweep."""
    verdict = combine(f"prove {report.device}", [_case(case, report.subject) for case in report.cases])
    verdict.stats = {"geomean_ratio": report.geomean_ratio, "op_ratio": report.op_ratio}
    verdict.info = {"processor": report.processor, "threads": report.threads, "subject": report.subject, "quick": report.quick}
    return verdict


#: Of an operation's result against float64, by dtype, relative: several times what was seen of a right one (3e-7, 3e-3), and less than
#: inputs rounded to TF32 (3e-4) or one step of bf16 too many on the way of a sum would leave.
LARGEST_ERROR = {"float32": 2e-5, "bfloat16": 1.5e-2}


def _case(case: CaseResult, subject: str = "vime") -> Verdict:
    bad = case.first_bad or {}
    reasons = [f"{case.differing_rows} rows depend on their neighbours"] if case.differing_rows else []
    most = LARGEST_ERROR.get(case.dtype)
    # the stock kernels in our place are asked about rows only
    if subject == "vime" and most is not None and case.error is not None and not case.error <= most:  # a NaN is not
        reasons.append(f"its error against float64 is {case.error:.1e}, {most:g} is the most that {case.dtype} explains")
    return Verdict(
        f"{case.function} {case.dtype} {case.shape}",
        Status.FAIL if reasons else Status.PASS,
        reason="; ".join(reasons),
        coverage={"rows": Coverage(case.rows_compared, case.rows_expected)},
        first_bad=Place(module=case.implementation, row=bad.get("row"), stage=", ".join(f"{k}={v}" for k, v in bad.items() if k != "row"))
        if bad else None,
        stats={"error": case.error, "stock_error": case.stock_error, "ratio": case.ratio, "seconds": case.seconds},
    )
