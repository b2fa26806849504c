"""Linear layers on CUDA, the LM head included: cuBLAS without split-K where that is proven here, else Triton.

cuBLAS picks a kernel by M. Starved of workspace (:mod:`vime.ops.providers.cublas`) and with at least 64 rows, all it
can pick from was seen to add along K in one order on Hopper; that is a property of a library version and a chip, so
every (N, K, dtype) is proven on this device when it is first met, in milliseconds, on random data: rows of many M
against the same rows in the largest; what was proven is kept on disk (:mod:`vime.ops.cuda.proven`). A shape that fails takes the Triton kernel, which is proven as well; one that
fails both is refused. Both sides of a training meet the same shapes on the same libraries and so take the same route.

Few rows of bf16 may take narrow tiles in Triton instead: where every bit of theirs is proven to be that of the route, and they were
faster when that was proven. That choice shows in no bit, so the two sides need not agree on it.
"""
from __future__ import annotations

import dataclasses
import statistics
import threading
from collections.abc import Callable

import torch

from vime.ops.cuda import gemm_triton, proven
from vime.ops.cuda.tensors import dense, with_min_rows
from vime.ops.providers import cublas
from vime.ops.registry import UnsupportedOp

IMPLEMENTATION = "cuda/linear/nosplit-m64@1"
#: Values of M each shape is proven on when first met; ``vime prove`` sweeps many more.
PROOF_ROWS = (1, 2, 3, 7, 16, 33, 63, 64, 65, 96, 127, 128, 129, 192, 255, 256, 257, 384, 511, 512, 640, 1023, 1024, 1536, 2047)
PROOF_MAX = 2048
#: Rows up to which narrow tiles are considered, and where they are timed.
NARROW_ROWS, _TIMED_ROWS = 64, 16
_ROUTES = {"cublas": cublas.mm, "triton": gemm_triton.mm}


@dataclasses.dataclass(frozen=True)
class Route:
    """How one shape runs, and why: rows that differed, by route. ``narrow``: up to :data:`NARROW_ROWS` rows take narrow tiles."""

    kernel: str
    differing_rows: dict[str, int]
    narrow: bool = False


_routes: dict[tuple[int, int, torch.dtype, bool, int], Route] = {}
_lock = threading.Lock()


def padded(kernel: str, a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """Product by one kernel with at least ``MIN_ROWS`` rows: a [M, K], b [K, N] of any strides."""
    return _ROUTES[kernel](with_min_rows(a_MK), b_KN)[: a_MK.shape[0]]


def differing_rows(kernel: str, weight_NK: torch.Tensor, forward: bool, row_counts: tuple[int, ...], largest: int) -> int:
    """Rows whose bits differ between a launch of M rows and the launch of ``largest``; random data, own generator."""
    generator = torch.Generator(device=weight_NK.device).manual_seed(20251)
    b = weight_NK.t() if forward else weight_NK
    a = torch.randn(largest, b.shape[0], dtype=weight_NK.dtype, device=weight_NK.device, generator=generator)
    whole = padded(kernel, a, b)
    differing = torch.zeros((), dtype=torch.int64, device=a.device)
    for m in row_counts:
        start = (37 * m) % (largest - m + 1)
        part = padded(kernel, a[start : start + m].clone(), b)
        differing += (part != whole[start : start + m]).any(dim=1).sum()
    return int(differing)


def route(weight_NK: torch.Tensor, forward: bool = True) -> Route:
    """The proven route for ``x @ weight.T`` (forward) or ``dy @ weight`` (backward) of this shape."""
    N, K = weight_NK.shape
    key = (N, K, weight_NK.dtype, forward, weight_NK.device.index or 0)
    found = _routes.get(key)
    if found is None:
        with _lock:
            found = _routes.get(key) or _kept_or_proven(weight_NK, forward)
            _routes[key] = found
    return found


def _kept_or_proven(weight_NK: torch.Tensor, forward: bool) -> Route:
    proofs, key = proven.store(weight_NK.device.index or 0), proof_key(weight_NK.shape[0], weight_NK.shape[1], weight_NK.dtype, forward)
    entry = proofs.get(key)
    if entry is not None and entry.get("refused"):
        raise UnsupportedOp("linear", weight_NK.device, weight_NK.dtype, weight_NK.shape, f"A sweep of `vime prove` found {entry['refused']}. "
                            "Run it again after a change, or exclude linear on both sides.")
    if entry is not None and entry.get("kernel") in _ROUTES and entry.get("differing_rows", {}).get(entry["kernel"]) == 0:
        return Route(entry["kernel"], dict(entry["differing_rows"]), bool(entry.get("narrow")))
    found = _prove(weight_NK, forward)
    proofs.put(key, {**dataclasses.asdict(found), "rows": list(PROOF_ROWS), "largest": PROOF_MAX})
    return found


def proof_key(n: int, k: int, dtype: torch.dtype, forward: bool) -> str:
    """What a proof of one shape is called on disk."""
    return f"linear {'fwd' if forward else 'bwd'} {n}x{k} {str(dtype)[6:]}"


def _prove(weight_NK: torch.Tensor, forward: bool) -> Route:
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedOp(
            "linear", weight_NK.device, weight_NK.dtype, weight_NK.shape,
            "This shape is first met inside a CUDA graph capture, where it cannot be proven: run it once before capturing.",
        )
    differing: dict[str, int] = {}
    with torch.no_grad():
        sample = torch.randn(
            weight_NK.shape, dtype=weight_NK.dtype, device=weight_NK.device,
            generator=torch.Generator(device=weight_NK.device).manual_seed(20252),
        )
        for kernel in _ROUTES:
            differing[kernel] = differing_rows(kernel, sample, forward, PROOF_ROWS, PROOF_MAX)
            if differing[kernel] == 0:
                return Route(kernel, differing, forward and _narrow_is_it(kernel, sample) and _narrow_is_faster(kernel, sample))
    raise UnsupportedOp(
        "linear", weight_NK.device, weight_NK.dtype, weight_NK.shape,
        f"No GEMM here is invariant for this shape; rows that differed over M in {PROOF_ROWS}: {differing}. "
        "Run `vime prove --device cuda --ops linear` for the sweep, or exclude linear on both sides.",
    )


def _narrow_is_it(kernel: str, weight_NK: torch.Tensor) -> bool:
    """Whether narrow tiles give the bits of ``kernel``, over the few-row part of :data:`PROOF_ROWS`."""
    if weight_NK.dtype != torch.bfloat16:
        return False
    generator = torch.Generator(device=weight_NK.device).manual_seed(20253)
    a_MK = torch.randn(PROOF_MAX, weight_NK.shape[1], dtype=weight_NK.dtype, device=weight_NK.device, generator=generator)
    whole_MN = padded(kernel, a_MK, weight_NK.t())
    few = [(first, m) for m in PROOF_ROWS if m <= NARROW_ROWS for first in (0, 5 * m, PROOF_MAX - m)]
    return all(torch.equal(gemm_triton.narrow(a_MK[i:i + m].clone(), weight_NK.t()), whole_MN[i:i + m]) for i, m in few)


def _narrow_is_faster(kernel: str, weight_NK: torch.Tensor) -> bool:
    """By the median of five pairs."""
    a_MK = weight_NK.new_zeros(_TIMED_ROWS, weight_NK.shape[1])
    narrow, other = (lambda: gemm_triton.narrow(a_MK, weight_NK.t())), (lambda: padded(kernel, a_MK, weight_NK.t()))
    return statistics.median(_milliseconds(narrow) / _milliseconds(other) for _ in range(5)) < 0.97


def _milliseconds(run: Callable[[], object], calls: int = 20) -> float:
    """Of ``calls`` calls on the device. It sleeps first, so that none of them waits for the host."""
    run()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(6_000_000)  # cycles: about 3 ms
    start.record()
    for _ in range(calls):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def product(found: Route, a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """Product by a proven route."""
    if found.narrow and a_MK.shape[0] <= NARROW_ROWS:
        return gemm_triton.narrow(a_MK, b_KN)
    return padded(found.kernel, a_MK, b_KN)


def routes() -> dict[str, str]:
    """Every shape met so far -> kernel, for reports."""
    return {f"{'fwd' if fwd else 'bwd'} N={n} K={k} {str(dtype)[6:]}": r.kernel + (", narrow tiles for few rows" if r.narrow else "")
            for (n, k, dtype, fwd, _), r in _routes.items()}


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TK, weight_NK):
        ctx.save_for_backward(x_TK, weight_NK)
        return product(route(weight_NK), x_TK, weight_NK.t())

    @staticmethod
    def backward(ctx, dy_TN):
        x_TK, weight_NK = ctx.saved_tensors
        dy_TN = dense(dy_TN)
        dx_TK = padded(route(weight_NK, forward=False).kernel, dy_TN, weight_NK) if ctx.needs_input_grad[0] else None
        dweight_NK = weight_gradient(dy_TN, x_TK) if ctx.needs_input_grad[1] else None
        return dx_TK, dweight_NK


def weight_gradient(dy_TN: torch.Tensor, x_TK: torch.Tensor) -> torch.Tensor:
    """``dy.T @ x``, [N, K]. Without a workspace cuBLAS adds in one order for one number of rows."""
    return cublas.mm(dy_TN.t(), x_TK)


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T``. x: fp32 or bf16 [..., K]; weight: [N, K]; fp32 accumulation, one rounding."""
    N = weight_NK.shape[0]
    x2_TK = dense(x_TK.reshape(-1, x_TK.shape[-1]))
    y_TN = _Linear.apply(x2_TK, weight_NK) if x2_TK.shape[0] else x2_TK @ weight_NK.t()
    return y_TN.reshape(*x_TK.shape[:-1], N)
