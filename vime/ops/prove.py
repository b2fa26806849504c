"""Prove on this machine, not assume: every operation gives a row the same bits in any batch, and what that costs.

For each operation and shape the whole pool of rows is evaluated once; then every number of rows from 1 to 512 and a
selection beyond, contiguous and permuted, at several places and thread counts, is evaluated and compared bit by bit
with those rows. The error is taken against float64, the time in alternating pairs against the fastest stock route.

``subject="stock"`` sweeps the stock kernels in the place of ours: the negative control, which must find differing rows.
"""
from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from vime.ops import prove_attention, prove_cases, registry
from vime.ops.prove_types import CaseResult, ProofReport, Timing, relative_error

#: What there is to prove: the names of ``vime.contract.OPS`` that have rows of their own.
OPS = ("embedding", "linear", "norm", "rope", "activation", "attention", "logprob", "sampling")
BEYOND = (513, 575, 640, 767, 1000, 1023, 1024, 1025, 1500, 2047, 2048, 2049, 2500)
SELECTED = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 15, 16, 17, 23, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129, 160,
            191, 192, 200, 255, 256, 257, 384, 511, 512, *BEYOND)
QUICK = (1, 2, 3, 5, 6, 7, 8, 13, 16, 17, 33, 40, 64, 97, 160)


def run(device: str = "cpu", dtypes: Iterable[torch.dtype] | None = None, ops: Iterable[str] | None = None,
        quick: bool = False, progress: Callable[[str], None] | None = None, subject: str = "vime") -> ProofReport:
    """Sweep and time the operations.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        dtypes: torch.float32, torch.bfloat16; None: both on the CPU, bfloat16 on CUDA (its attention covers no other).
        ops: names out of :data:`OPS`; None: all.
        quick: a few seconds: one model's shapes, fewer row counts, no timing.
        progress: called with one line a case.
        subject: ``"vime"``, or ``"stock"`` for the negative control.

    Raises:
        ValueError: an unknown operation or subject. UnsupportedOp: no implementation on this device.
    """
    chosen = tuple(OPS if ops is None else ops)
    unknown = sorted(set(chosen) - set(OPS))
    if unknown or subject not in ("vime", "stock"):
        raise ValueError(f"cannot prove {', '.join(unknown) or subject!r}; operations: {', '.join(OPS)}; subjects: vime, stock")
    if torch.device(device).type == "cuda":
        from vime.ops.cuda import prove as cuda  # starves cuBLAS and needs Triton

        return cuda.run(dtypes or (torch.bfloat16,), chosen, quick, lambda result: progress and progress(_line(result)), subject)
    dtypes = dtypes or (torch.float32, torch.bfloat16)
    before = torch.get_num_threads()
    threads = sorted({1, 2, before}) if torch.device(device).type == "cpu" else [before]
    report = ProofReport(device, subject, quick, threads, _processor(device))
    started = time.perf_counter()
    try:
        with torch.no_grad():
            for dtype in dtypes:
                for result in _dtype(device, dtype, chosen, quick, subject, threads, before):
                    report.cases.append(result)
                    if progress is not None:
                        progress(_line(result))
    finally:
        torch.set_num_threads(before)
    report.seconds = time.perf_counter() - started
    return report


def _dtype(device: str, dtype: torch.dtype, chosen: tuple[str, ...], quick: bool, subject: str, threads: list[int],
           before: int) -> Iterable[CaseResult]:
    generator = torch.Generator().manual_seed(1234)
    clock = None if quick or subject == "stock" else _Clock(before)
    if set(chosen) - {"attention"}:
        for case in prove_cases.rowwise(dtype, device, quick, generator):
            if case.op in chosen:
                yield _rowwise(case, device, quick, subject, threads, generator, clock)
    if "attention" in chosen:
        name = registry.implementation("attention", device, dtype) if subject == "vime" else "stock"
        started = time.perf_counter()
        for result in prove_attention.prove(dtype, device, quick, subject, generator, threads, name, clock):
            result.seconds = time.perf_counter() - started
            started = time.perf_counter()
            yield result


def _rowwise(case: prove_cases.Case, device: str, quick: bool, subject: str, threads: list[int], generator: torch.Generator,
             clock: _Clock | None) -> CaseResult:
    started = time.perf_counter()
    route, function = next(iter(case.routes.items()))
    if subject == "vime":
        name, function = registry.implementation(case.op, device, case.dtype), case.ours
    else:
        name = f"stock: {route}"
    result = CaseResult(case.op, case.function, str(case.dtype).removeprefix("torch."), case.shape, name)
    everyone = torch.arange(case.pool)
    want = function(*case.take(everyone))
    wanted = want if isinstance(want, tuple) else (want,)
    counts = QUICK if quick else (*range(1, 513), *BEYOND) if case.every else SELECTED
    for i, rows in enumerate(counts):
        if rows > case.pool:
            continue
        if device == "cpu":
            torch.set_num_threads(threads[i % len(threads)])
        if i % 2:
            chosen, place = torch.randperm(case.pool, generator=generator)[:rows], "permuted"
        else:
            first = (i * 97) % (case.pool - rows + 1)
            chosen, place = everyone[first:first + rows], f"from row {first}"
        result.rows_expected += rows
        result.compare(function(*case.take(chosen)), tuple(x[chosen] for x in wanted),
                       {"rows": rows, "place": place, "threads": threads[i % len(threads)]})
    if case.exact is not None:
        some = everyone[:64]
        exact = case.exact(*(x.double() if x.is_floating_point() else x for x in case.take(some)))
        result.error = relative_error(tuple(x[:64] for x in wanted), exact)
        result.stock_error = relative_error(case.routes[route](*case.take(some)), exact)
    if clock is not None:
        result.timings = [clock(str(n), case.ours, case.routes, case.take(everyone[:n])) for n in case.timed if n <= case.pool]
    result.seconds = time.perf_counter() - started
    return result


class _Clock:
    """Times ours against the fastest stock route in alternating pairs."""

    def __init__(self, threads: int, budget: float = 0.12) -> None:
        self.threads, self.budget = threads, budget

    def __call__(self, rows: str, ours: Callable[..., Any], routes: dict[str, Callable[..., Any]], inputs: tuple[Any, ...]) -> Timing:
        torch.set_num_threads(self.threads)
        wait = torch.cuda.synchronize if any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs) else None

        def once(f: Callable[..., Any], args: tuple[Any, ...]) -> float:
            start = time.perf_counter()
            f(*args)
            if wait is not None:
                wait()
            return time.perf_counter() - start

        theirs = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs)  # some routes work in place
        for f in routes.values():
            once(f, theirs)
        fastest = min(routes, key=lambda name: min(once(routes[name], theirs) for _ in range(5)))
        once(ours, inputs)
        pairs: list[tuple[float, float]] = []
        started = time.perf_counter()
        while len(pairs) < 5 or time.perf_counter() - started < self.budget:
            pairs.append((once(ours, inputs), once(routes[fastest], theirs)))
        return Timing(rows, statistics.median(a for a, _ in pairs) * 1e6, statistics.median(b for _, b in pairs) * 1e6,
                      statistics.median(a / b for a, b in pairs), fastest, len(pairs))


def _line(result: CaseResult) -> str:
    parts = [f"{result.function:14} {result.dtype:9} {result.shape}: {result.differing_rows} of {result.rows_compared} rows differ"]
    if result.error is not None:
        parts.append(f"error {result.error:.1e}" + (f" (stock {result.stock_error:.1e})" if result.stock_error is not None else ""))
    if result.timings:
        parts.append("time ratio " + " ".join(f"{t.rows}:{t.ratio:.2f}" for t in result.timings))
    if result.first_bad is not None:
        parts.append(f"first at {result.first_bad}")
    return ", ".join(parts)


def _processor(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
