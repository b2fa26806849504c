"""Proof on this device: a row of every operation is the same bits at any M, place, chunk and page.

The whole pool of 8192 rows is evaluated once; then every M of a long list, at several places, is evaluated and compared
bit by bit with those rows, for the very shapes of a model. ``subject="stock"`` sweeps stock kernels instead: the
negative control. Results are counts and places; nothing is judged here.
"""
from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from vime import ops
from vime.ops import reference, registry
from vime.ops.cuda import gemm
from vime.ops.cuda.shapes import ModelShape
from vime.ops.prove_types import CaseResult, as_tuple, relative_error

ROW_COUNTS = (
    *range(1, 18), 23, 31, 32, 33, 47, 48, 63, 64, 65, 79, 80, 95, 96, 97, 112, 127, 128, 129, 144, 160, 191, 192, 193, 224,
    255, 256, 257, 320, 383, 384, 385, 448, 511, 512, 513, 640, 768, 777, 895, 896, 1023, 1024, 1025, 1280, 1536, 1537, 1792,
    2047, 2048, 2049, 2560, 3072, 3333, 4095, 4096, 4097, 5120, 6144, 7168, 8191, 8192,
)
QUICK = (1, 2, 3, 7, 16, 63, 64, 65, 127, 129, 1000)
Run = Callable[..., Any]


class Sweep:
    """Evaluates operations of one model in one dtype and yields a result a case."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, quick: bool = False, subject: str = "vime") -> None:
        self.shape, self.dtype, self.subject = shape, dtype, subject
        self.counts = QUICK if quick else ROW_COUNTS
        self.pool = max(self.counts)

    def data(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda").to(self.dtype)

    def case(self, op: str, function: str, case: str) -> CaseResult:
        name = registry.implementation(op, "cuda", self.dtype) if self.subject == "vime" else "stock"
        return CaseResult(op, function, str(self.dtype).removeprefix("torch."), f"{self.shape.name} {case}", name)

    def rows(self, op: str, function: str, case: str, ours: Run, stock: Run, exact: Run | None, inputs: tuple[torch.Tensor, ...]) -> CaseResult:
        """Sweep an operation whose inputs all have the rows in dimension 0."""
        started = time.perf_counter()
        result, run = self.case(op, function, case), ours if self.subject == "vime" else stock
        pool = inputs[0].shape[0]
        whole = as_tuple(run(*inputs))
        for m in self.counts:
            if m <= pool:
                start = (37 * m) % (pool - m + 1)
                result.rows_expected += m
                part = run(*(x[start : start + m].clone() for x in inputs))
                result.compare(part, tuple(x[start : start + m] for x in whole), {"rows": m, "place": f"from row {start}"})
        if exact is not None:
            some = tuple(x[:256].double() if x.is_floating_point() else x[:256] for x in inputs)
            result.error = relative_error(tuple(x[:256] for x in whole), exact(*some))
        result.seconds = time.perf_counter() - started
        return result

    def linear(self) -> Iterator[CaseResult]:
        """Forward and input gradient of every linear layer."""
        for name, (n, k) in self.shape.linears().items():
            weight_NK = self.data(n, k) * k**-0.5
            yield self.rows("linear", "linear", f"{name} N={n} K={k}", functools.partial(_linear, weight_NK),
                            functools.partial(_stock_linear, weight_NK), functools.partial(_exact, weight_NK.t()), (self.data(self.pool, k),))
            yield self.rows("linear", "linear_input_gradient", f"{name} N={n} K={k}", functools.partial(_gradient, weight_NK),
                            lambda dy, w=weight_NK: dy @ w, functools.partial(_exact, weight_NK), (self.data(self.pool, n),))

    def norm(self) -> Iterator[CaseResult]:
        width, eps = self.shape.hidden, 1e-5
        x, r, w = self.data(self.pool, width), self.data(self.pool, width), self.data(width)
        yield self.rows("norm", "rms_norm", f"H={width}", lambda a: ops.rms_norm(a, w, eps), lambda a: F.rms_norm(a, (width,), w, eps),
                        lambda a: reference.rms_norm(a, w.double(), eps), (x,))
        yield self.rows("norm", "add_rms_norm", f"H={width}", lambda a, b: ops.add_rms_norm(a, b, w, eps),
                        lambda a, b: F.rms_norm(a + b, (width,), w, eps), lambda a, b: reference.add_rms_norm(a, b, w.double(), eps), (x, r))
        if self.subject == "vime":
            fused = self.case("norm", "add_rms_norm", f"H={width} against the two steps")
            fused.rows_expected = self.pool
            fused.compare(ops.add_rms_norm(x, r, w, eps), (ops.rms_norm(x + r, w, eps), x + r), {"rows": self.pool})
            yield fused

    def rope(self) -> Iterator[CaseResult]:
        s = self.shape
        cos, sin = ops.rope_cos_sin(torch.randint(0, 4096, (self.pool,), device="cuda"), s.head_dim, 10000.0)
        qkv = self.data(self.pool, (s.heads + 2 * s.groups) * s.head_dim)
        q = qkv[:, : s.heads * s.head_dim].view(self.pool, s.heads, s.head_dim)
        yield self.rows("rope", "apply_rope", f"{s.heads}x{s.head_dim}", ops.apply_rope, reference.apply_rope, reference.apply_rope, (q, cos, sin))

    def activation(self) -> Iterator[CaseResult]:
        yield self.rows("activation", "silu_and_mul", f"F={self.shape.ffn}", ops.silu_and_mul, reference.silu_and_mul, reference.silu_and_mul,
                        (self.data(self.pool, 2 * self.shape.ffn),))

    def embedding(self) -> Iterator[CaseResult]:
        table = self.data(self.shape.vocab, self.shape.hidden)
        ids = torch.randint(0, self.shape.vocab, (self.pool,), device="cuda")
        yield self.rows("embedding", "embedding", f"V={self.shape.vocab}", lambda i: ops.embedding(i, table), lambda i: F.embedding(i, table),
                        lambda i: table.double()[i], (ids,))

    def logprob(self) -> Iterator[CaseResult]:
        logits, ids, temperature, _, _ = self._tokens()
        case = f"V={self.shape.vocab}"
        yield self.rows("logprob", "token_logprob", case, ops.token_logprob,
                        lambda x, i, t: torch.log_softmax(x.float() / t[:, None], -1).gather(1, i[:, None])[:, 0],
                        reference.token_logprob, (logits, ids, temperature))
        if self.subject == "vime":
            full = self.case("logprob", "log_softmax", f"{case} against the selected ones")
            full.rows_expected = len(ids)
            full.compare(ops.log_softmax(logits, temperature).gather(1, ids[:, None])[:, 0], ops.token_logprob(logits, ids, temperature),
                         {"rows": len(ids)})
            yield full

    def sampling(self) -> Iterator[CaseResult]:
        logits, ids, temperature, seed, position = self._tokens()
        top_k, top_p = ids % 100, temperature - 0.5

        def stock(x: torch.Tensor, s: torch.Tensor, p: torch.Tensor, t: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            generator = torch.Generator(device=x.device).manual_seed(int(s[0]))  # a stream: a row depends on those before it
            probabilities = torch.softmax(x.float() / t[:, None], -1)
            return (probabilities / torch.empty_like(probabilities).exponential_(generator=generator)).argmax(-1)

        for name, extra in (("", ()), (" top-k, top-p", (top_k, top_p))):
            yield self.rows("sampling", "sample", f"V={self.shape.vocab}{name}", ops.sample, stock, None, (logits, seed, position, temperature, *extra))

    def _tokens(self) -> tuple[torch.Tensor, ...]:
        rows, wide = min(self.pool, 1024), self.shape.vocab
        integers = functools.partial(torch.randint, size=(rows,), device="cuda")
        return (self.data(rows, wide) * 3, integers(0, wide), torch.rand(rows, device="cuda") + 0.5, integers(-(2**62), 2**62), integers(0, 4096))


def _linear(weight_NK: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return ops.linear(x, weight_NK)


def _stock_linear(weight_NK: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight_NK)


def _gradient(weight_NK: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return gemm.padded(gemm.route(weight_NK, forward=False).kernel, dy, weight_NK)


def _exact(b_KN: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return a @ b_KN.double()
