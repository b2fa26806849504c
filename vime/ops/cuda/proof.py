"""Proof on this device: a row of every operation is the same bits at any M, place, chunk and page.

Each function returns findings: how many rows were compared, how many differed, the first that did, and the error
against float64. They judge nothing; ``vime prove`` and the tests do. ``fault`` plants a difference, for the controls.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch

from vime import ops
from vime.ops import reference
from vime.ops.cuda import gemm
from vime.ops.cuda.shapes import ModelShape

ROW_COUNTS = (
    *range(1, 18), 23, 31, 32, 33, 47, 48, 63, 64, 65, 79, 80, 95, 96, 97, 112, 127, 128, 129, 144, 160, 191, 192, 193, 224,
    255, 256, 257, 320, 383, 384, 385, 448, 511, 512, 513, 640, 768, 777, 895, 896, 1023, 1024, 1025, 1280, 1536, 1537, 1792,
    2047, 2048, 2049, 2560, 3072, 3333, 4095, 4096, 4097, 5120, 6144, 7168, 8191, 8192,
)
LARGEST = 8192


@dataclasses.dataclass
class Finding:
    """What one sweep saw. ``error`` is ||ours - float64|| / ||float64||; ``first_bad`` names the first differing row."""

    op: str
    case: str
    dtype: str
    rows: int
    differing: int
    first_bad: str | None = None
    error: float | None = None
    note: str = ""


def bits(x: torch.Tensor) -> torch.Tensor:
    """The integers behind the floats: +0 and -0 differ, NaN is never equal by luck of comparison."""
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32 if x.element_size() == 4 else torch.int64)


def bad_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """bool [T]: rows whose bits differ or that hold a non-finite number."""
    a, b = a.reshape(a.shape[0], -1), b.reshape(b.shape[0], -1)
    bad = (bits(a) != bits(b)).any(1)
    return bad | ~torch.isfinite(a).all(1) if a.is_floating_point() else bad


class Tally:
    """Adds up comparisons without stopping the device for each of them."""

    def __init__(self) -> None:
        self.rows = 0
        self._found: list[tuple[str, torch.Tensor]] = []

    def compare(self, where: str, got: torch.Tensor, want: torch.Tensor) -> None:
        self.rows += got.shape[0]
        bad = bad_rows(got, want)
        self._found.append((where, torch.stack((bad.sum(), bad.to(torch.int8).argmax()))))

    def finish(self, op: str, case: str, dtype: torch.dtype, error: float | None = None, note: str = "") -> Finding:
        counts = torch.stack([found for _, found in self._found]).tolist() if self._found else []
        first = next((f"{where}, row {row}" for (where, _), (n, row) in zip(self._found, counts, strict=True) if n), None)
        return Finding(op, case, str(dtype)[6:], self.rows, sum(n for n, _ in counts), first, error, note)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


Rows = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


def rowwise(
    op: str, case: str, run: Rows, wanted: Rows, inputs: tuple[torch.Tensor, ...], dtype: torch.dtype,
    counts: tuple[int, ...] = ROW_COUNTS,
) -> Finding:
    """Sweep an operation whose inputs all have the rows in dimension 0."""
    largest = inputs[0].shape[0]
    whole = _tuple(run(*inputs))
    tally = Tally()
    for m in counts:
        if m > largest:
            continue
        start = (37 * m) % (largest - m + 1)
        part = _tuple(run(*(x[start : start + m].clone() for x in inputs)))
        for n, (got, want) in enumerate(zip(part, whole, strict=True)):
            tally.compare(f"M={m} from row {start}, output {n}", got, want[start : start + m])
    sample = tuple(x[:256] for x in inputs)
    exact = _tuple(wanted(*(x.double() if x.is_floating_point() else x for x in sample)))
    error = max(relative_error(got[:256], want) for got, want in zip(whole, exact, strict=True))
    return tally.finish(op, case, dtype, error)


def _tuple(x: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def linears(shape: ModelShape, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Iterator[Finding]:
    """Forward and input-gradient GEMM of every linear layer, over all M."""
    for name, (n, k) in shape.linears().items():
        weight_NK = torch.randn(n, k, device=device, dtype=dtype) * k**-0.5
        for forward in (True, False):
            a = torch.randn(LARGEST, k if forward else n, device=device, dtype=dtype)
            w = weight_NK if forward else weight_NK.t().contiguous()
            chosen = gemm.route(weight_NK, forward)

            def run(x: torch.Tensor, forward: bool = forward, chosen: gemm.Route = chosen, weight: torch.Tensor = weight_NK):
                return ops.linear(x, weight) if forward else gemm.padded(chosen.kernel, x, weight)

            finding = rowwise(
                "linear", f"{shape.name} {name} {'fwd' if forward else 'dgrad'} N={n} K={k}", run,
                lambda x, w=w: x @ w.double().t(), (a,), dtype,
            )
            finding.note = chosen.kernel
            yield finding


def elementwise(shape: ModelShape, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Iterator[Finding]:
    """Norms, rotary, activation: forward over all M; the norm twins against each other."""
    def data(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=dtype)

    x, r, w, eps = data(LARGEST, shape.hidden), data(LARGEST, shape.hidden), data(shape.hidden), 1e-5
    yield rowwise("norm", f"{shape.name} rms H={shape.hidden}", lambda a: ops.rms_norm(a, w, eps),
                  lambda a: reference.rms_norm(a, w.double(), eps), (x,), dtype)
    yield rowwise("norm", f"{shape.name} add_rms H={shape.hidden}", lambda a, b: ops.add_rms_norm(a, b, w, eps),
                  lambda a, b: reference.add_rms_norm(a, b, w.double(), eps), (x, r), dtype)
    tally = Tally()
    y, s = ops.add_rms_norm(x, r, w, eps)
    tally.compare("sum", s, x + r)
    tally.compare("norm of the sum", y, ops.rms_norm(s, w, eps))
    yield tally.finish("norm", f"{shape.name} fused against the two steps", dtype)

    positions = torch.randint(0, 4096, (LARGEST,), device=device)
    cos, sin = ops.rope_cos_sin(positions, shape.head_dim, 10000.0)
    qkv = data(LARGEST, (shape.heads + 2 * shape.groups) * shape.head_dim)
    q = qkv[:, : shape.heads * shape.head_dim].view(LARGEST, shape.heads, shape.head_dim)
    yield rowwise("rope", f"{shape.name} {shape.heads}x{shape.head_dim}", ops.apply_rope, reference.apply_rope, (q, cos, sin), dtype)
    yield rowwise("activation", f"{shape.name} F={shape.ffn}", ops.silu_and_mul, reference.silu_and_mul,
                  (data(LARGEST, 2 * shape.ffn),), dtype)


def vocabulary(shape: ModelShape, dtype: torch.dtype = torch.bfloat16, device: str = "cuda", rows: int = 1024) -> Iterator[Finding]:
    """Selected log-probability, full log-softmax, sampling."""
    logits = (torch.randn(rows, shape.vocab, device=device) * 3).to(dtype)
    ids = torch.randint(0, shape.vocab, (rows,), device=device)
    temperature = torch.rand(rows, device=device) + 0.5
    seed, position = torch.randint(-(2**62), 2**62, (rows,), device=device), torch.randint(0, 4096, (rows,), device=device)
    case = f"{shape.name} V={shape.vocab}"
    yield rowwise("logprob", f"{case} selected", ops.token_logprob, reference.token_logprob, (logits, ids, temperature), dtype)
    yield rowwise("logprob", f"{case} full", ops.log_softmax, reference.log_softmax, (logits, temperature), dtype)
    tally = Tally()
    tally.compare("entry of the full row", ops.log_softmax(logits, temperature).gather(1, ids[:, None])[:, 0],
                  ops.token_logprob(logits, ids, temperature))
    yield tally.finish("logprob", f"{case} selected against full", dtype)
    top_k, top_p = torch.randint(0, 100, (rows,), device=device), torch.rand(rows, device=device)
    for name, extra in (("plain", ()), ("top-k, top-p", (top_k, top_p))):
        inputs = (logits, seed, position, temperature, *extra)
        whole, tally = ops.sample(*inputs), Tally()
        for m in (1, 2, 3, 7, 16, 64, 129, 512):
            start = (37 * m) % (rows - m + 1)
            part = ops.sample(*(x[start : start + m].clone() for x in inputs))
            tally.compare(f"M={m} from row {start}", part, whole[start : start + m])
        finding = tally.finish("sampling", f"{case} {name}", dtype)
        n = 2
        want = [
            reference.sample(logits[i].cpu(), int(seed[i]), int(position[i]), float(temperature[i]),
                             *((int(top_k[i]), float(top_p[i])) if extra else ()))
            for i in range(n)
        ]
        finding.note = f"{sum(int(a) == b for a, b in zip(whole[:n], want, strict=True))} of {n} ids as float64 draws them"
        yield finding
