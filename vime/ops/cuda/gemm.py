"""Linear layers on CUDA, the LM head included: cuBLAS without split-K where that is proven here, else Triton.

cuBLAS picks a kernel by M. Starved of workspace (:mod:`vime.ops.providers.cublas`) and with at least 64 rows, all it
can pick from was seen to add along K in one order on Hopper; that is a property of a library version and a chip, so
every (N, K, dtype) is proven on this device when it is first met, on random data: rows of many M
against the same rows in the largest; what was proven is kept on disk (:mod:`vime.ops.cuda.proven`). A shape that fails takes the Triton kernel, which is proven as well; one that
fails both is refused. Both sides of a training meet the same shapes on the same libraries and so take the same route.

Few rows may take small tiles in Triton instead: where every bit of theirs is proven to be that of the route, and they were
faster when that was proven, which takes about a second a shape. That choice shows in no bit, so the two sides need not agree on it.
"""
from __future__ import annotations

import dataclasses
import statistics
import threading
from collections.abc import Callable

import torch
import triton

from vime.ops.cuda import gemm_triton, proven
from vime.ops.cuda.tensors import dense, with_min_rows
from vime.ops.providers import cublas
from vime.ops.registry import UnsupportedOp

IMPLEMENTATION = "cuda/linear/nosplit-m64@1"
#: Values of M each shape is proven on when first met; ``vime prove`` sweeps many more.
PROOF_ROWS = (1, 2, 3, 7, 16, 33, 63, 64, 65, 96, 127, 128, 129, 192, 255, 256, 257, 384, 511, 512, 640, 1023, 1024, 1536, 2047)
PROOF_MAX = 2048
#: Up to so many rows each, small tiles are considered; they are timed with as many.
FEW_ROWS = (16, 64)
_ROUTES = {"cublas": cublas.mm, "triton": gemm_triton.mm}


@dataclasses.dataclass(frozen=True)
class Route:
    """How one shape runs, and why: rows that differed, by route. ``few``: the tile of
    :data:`vime.ops.cuda.gemm_triton.FEW` that up to so many rows of :data:`FEW_ROWS` take, None for the route's own."""

    kernel: str
    differing_rows: dict[str, int]
    few: tuple[int | None, ...] = (None,) * len(FEW_ROWS)


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
        return Route(entry["kernel"], dict(entry["differing_rows"]), _kept_tiles(entry.get("few"), weight_NK.dtype))
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
                return Route(kernel, differing, _tiles_for_few(kernel, sample) if forward else Route.few)
    raise UnsupportedOp(
        "linear", weight_NK.device, weight_NK.dtype, weight_NK.shape,
        f"No GEMM here is invariant for this shape; rows that differed over M in {PROOF_ROWS}: {differing}. "
        "Run `vime prove --device cuda --ops linear` for the sweep, or exclude linear on both sides.",
    )


def _kept_tiles(kept: object, dtype: torch.dtype) -> tuple[int | None, ...]:
    """What a proof on disk says of few rows; none where it says something else than numbers of tiles."""
    known = range(len(gemm_triton.FEW.get(dtype, ())))
    if not isinstance(kept, list | tuple) or len(kept) != len(FEW_ROWS) or any(which is not None and (type(which) is not int or which not in known) for which in kept):
        return Route.few
    return tuple(kept)


def _tiles_for_few(kernel: str, weight_NK: torch.Tensor) -> tuple[int | None, ...]:
    """For each of :data:`FEW_ROWS` the fastest tile that gives the bits of ``kernel``, where it is faster than that."""
    found: list[int | None] = []
    fewest = 1
    for most in FEW_ROWS:
        ratios = {which: _few_ratio(kernel, weight_NK, which, most) for which in range(len(gemm_triton.FEW.get(weight_NK.dtype, ())))}
        faster = sorted((which for which, ratio in ratios.items() if ratio < 0.97), key=ratios.__getitem__)
        found.append(next((which for which in faster if _few_is_it(kernel, weight_NK, which, fewest, most)), None))
        fewest = most + 1
    return tuple(found)


def cancelling(rows: int, weight_NK: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``a_MK`` and a weight of the shape of ``weight_NK`` whose products nearly cancel, scattered along K: what is left is mostly the
    rounding of the sums on the way, so that another order shows in it, where a large sum rounded to bf16 would hide it."""
    K, device = weight_NK.shape[1], weight_NK.device
    generator = torch.Generator(device=device).manual_seed(seed)
    half, order_K = K // 2, torch.randperm(K, generator=generator, device=device)
    a_MK = torch.randn(rows, K, device=device, generator=generator).to(weight_NK.dtype)
    a_MK[:, half:2 * half] = -a_MK[:, :half]
    a_MK[:, half:half + 4] *= 1 + 2**-7  # exact in bf16 up to its rounding: four columns are left over
    weight = weight_NK.clone()
    weight[:, half:2 * half] = weight[:, :half]
    return a_MK[:, order_K].contiguous(), weight[:, order_K].contiguous()


def _few_is_it(kernel: str, weight_NK: torch.Tensor, which: int, fewest: int, most: int) -> bool:
    """Whether a tile gives the bits of ``kernel``: in slices of ``most`` rows, and of each of :data:`PROOF_ROWS` from ``fewest`` to
    ``most``, of data that cancel."""
    a_MK, weight = cancelling(PROOF_MAX, weight_NK, 20253)
    whole_MN = padded(kernel, a_MK, weight.t())
    slices = [(first, min(most, PROOF_MAX - first)) for first in range(0, PROOF_MAX, most)]
    slices += [(first, m) for m in sorted({*PROOF_ROWS, fewest, most}) if fewest <= m <= most for first in (5 * m, PROOF_MAX - m)]
    differing = torch.zeros((), dtype=torch.int64, device=weight.device)
    for first, m in slices:
        differing += (gemm_triton.few(a_MK[first:first + m].clone(), weight.t(), which) != whole_MN[first:first + m]).sum()
    return int(differing) == 0


def _few_ratio(kernel: str, weight_NK: torch.Tensor, which: int, rows: int) -> float:
    """Its time over that of ``kernel``: the median of five pairs; infinite where this chip has no room for it."""
    a_MK = weight_NK.new_zeros(rows, weight_NK.shape[1])
    few, other = (lambda: gemm_triton.few(a_MK, weight_NK.t(), which)), (lambda: padded(kernel, a_MK, weight_NK.t()))
    try:
        few()
    except triton.runtime.errors.OutOfResources:
        return float("inf")
    return statistics.median(_milliseconds(few) / _milliseconds(other) for _ in range(5))


def _milliseconds(run: Callable[[], object], calls: int = 10) -> float:
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
    which = next((tile for most, tile in zip(FEW_ROWS, found.few, strict=True) if a_MK.shape[0] <= most), None)
    if which is not None:
        return gemm_triton.few(a_MK, b_KN, which)
    return padded(found.kernel, a_MK, b_KN)


def routes() -> dict[str, str]:
    """Every shape met so far -> kernel, for reports."""
    return {f"{'fwd' if fwd else 'bwd'} N={n} K={k} {str(dtype)[6:]}": r.kernel + "".join(f", tile {which} up to {most} rows" for most, which in zip(FEW_ROWS, r.few, strict=True) if which is not None)
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
