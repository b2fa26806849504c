"""The cases of the proof: for every operation the shapes of two real models, and odd ones.

A case has a pool of rows. The result of any subset of them, in any order, must be the rows of the result of the pool.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vime import ops
from vime.ops import reference, stock


@dataclasses.dataclass(frozen=True)
class Model:
    """Shapes of a dense decoder."""

    name: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def linears(self) -> dict[str, tuple[int, int]]:
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        return {"qkv": (qkv, self.hidden), "o": (self.hidden, self.heads * self.head_dim),
                "gate_up": (2 * self.ffn, self.hidden), "down": (self.hidden, self.ffn)}


SMOLLM2 = Model("smollm2-135m", 576, 1536, 9, 3, 64, 49152)
QWEN25 = Model("qwen2.5-0.5b", 896, 4864, 14, 2, 64, 151936)


@dataclasses.dataclass
class Case:
    """``take(rows)`` gives the inputs of those rows of the pool; ``ours`` and each route map them to result rows."""

    op: str
    function: str
    shape: str
    dtype: torch.dtype
    pool: int
    take: Callable[[torch.Tensor], tuple[Any, ...]]
    ours: Callable[..., Any]
    routes: dict[str, Callable[..., Any]]
    exact: Callable[..., Any] | None
    timed: tuple[int, ...] = (1, 16, 256, 2048)
    every: bool = True  # sweep every number of rows from 1 to 512, not a selection


def rowwise(dtype: torch.dtype, device: str, quick: bool, generator: torch.Generator) -> Iterator[Case]:
    """Every operation but attention. Pools of 4096 rows at most."""
    def rnd(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    models = (SMOLLM2,) if quick else (SMOLLM2, QWEN25)
    pool = 160 if quick else 2500
    for model in models:
        H = model.hidden
        for name, (N, K) in model.linears().items():
            yield _linear(f"{model.name} {name} N={N} K={K}", rnd(pool, K), rnd(N, K, scale=K ** -0.5), quick)
        yield _norm(f"{model.name} H={H}", rnd(pool, H, scale=3), rnd(H))
        yield _add_norm(f"{model.name} H={H}", rnd(pool, H, scale=3), rnd(pool, H), rnd(H))
        yield _rope(f"{model.name} {model.heads}x{model.head_dim}", rnd(pool, model.heads, model.head_dim), model.head_dim, device)
        yield _silu(f"{model.name} F={model.ffn}", rnd(pool, 2 * model.ffn, scale=4))
        yield from _vocabulary(model, rnd, dtype, device, quick, generator)
    for N, K in ((1, 1), (17, 33), (100, 577)) if quick else ((1, 1), (3, 7), (17, 33), (63, 65), (100, 577), (33, 2049)):
        yield dataclasses.replace(_linear(f"odd N={N} K={K}", rnd(pool, K), rnd(N, K, scale=K ** -0.5), quick), timed=())
    for H in (1, 37) if quick else (1, 15, 37, 577, 1023):
        yield dataclasses.replace(_norm(f"odd H={H}", rnd(pool, H), rnd(H)), timed=())
        yield dataclasses.replace(_silu(f"odd F={H}", rnd(pool, 2 * H, scale=4)), timed=())


def _linear(shape: str, x: torch.Tensor, w: torch.Tensor, quick: bool) -> Case:
    return Case("linear", "linear", shape, x.dtype, len(x), lambda rows: (x[rows],), lambda a: ops.linear(a, w), stock.linear(w),
                lambda a: reference.linear(a, w.double()), timed=() if quick else (1, 4, 16, 64, 256, 1024))


def _norm(shape: str, x: torch.Tensor, w: torch.Tensor, eps: float = 1e-5) -> Case:
    return Case("norm", "rms_norm", shape, x.dtype, len(x), lambda rows: (x[rows],), lambda a: ops.rms_norm(a, w, eps),
                stock.rms_norm(w, eps), lambda a: reference.rms_norm(a, w.double(), eps))


def _add_norm(shape: str, x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, eps: float = 1e-5) -> Case:
    return Case("norm", "add_rms_norm", shape, x.dtype, len(x), lambda rows: (x[rows], r[rows]), lambda a, b: ops.add_rms_norm(a, b, w, eps),
                stock.add_rms_norm(w, eps), lambda a, b: reference.add_rms_norm(a, b, w.double(), eps))


def _rope(shape: str, x: torch.Tensor, dim: int, device: str) -> Case:
    cos, sin = ops.rope_cos_sin((torch.arange(len(x)) * 37 % 8192).to(device), dim, 10000.0)
    return Case("rope", "apply_rope", shape, x.dtype, len(x), lambda rows: (x[rows], cos[rows], sin[rows]), ops.apply_rope, stock.apply_rope(),
                reference.apply_rope)


def _silu(shape: str, x: torch.Tensor) -> Case:
    return Case("activation", "silu_and_mul", shape, x.dtype, len(x), lambda rows: (x[rows],), ops.silu_and_mul, stock.silu_and_mul(),
                reference.silu_and_mul)


def _vocabulary(model: Model, rnd: Callable[..., torch.Tensor], dtype: torch.dtype, device: str, quick: bool,
                generator: torch.Generator) -> Iterator[Case]:
    V = 4099 if quick else model.vocabulary
    pool = 40 if quick else 520 if V < 100_000 else 65  # rows of a large vocabulary are slow to sort
    logits = rnd(pool, V, scale=3)
    ids = torch.randint(0, V, (pool,), generator=generator).to(device)
    seeds, positions = torch.arange(pool, device=device) * 7919 - 5, torch.arange(pool, device=device) * 3
    warm = torch.where(torch.arange(pool, device=device) % 5 == 0, 0.0, 0.5 + torch.arange(pool, device=device) % 3 / 2)
    shape, timed = f"{model.name} V={V}", () if quick else (1, 16, 128)
    yield Case("logprob", "token_logprob", shape, dtype, pool, lambda rows: (logits[rows], ids[rows]), ops.token_logprob,
               stock.token_logprob(), reference.token_logprob, timed, every=False)
    yield Case("logprob", "log_softmax", shape, dtype, pool, lambda rows: (logits[rows],), ops.log_softmax,
               {"torch log_softmax": lambda x: torch.log_softmax(x.float(), -1)}, reference.log_softmax, timed, every=False)
    ones = torch.ones(pool, device=device)
    yield Case("sampling", "sample", f"{shape} temperature 1", dtype, pool, lambda rows: (logits[rows], seeds[rows], positions[rows], ones[rows]),
               ops.sample, stock.sample(), None, timed, every=False)
    ks, ps = torch.arange(pool, device=device) % 7 * 10, 0.5 + (torch.arange(pool, device=device) % 6) / 10
    yield Case("sampling", "sample", f"{shape} mixed temperature, top-k, top-p", dtype, pool,
               lambda rows: (logits[rows], seeds[rows], positions[rows], warm[rows], ks[rows], ps[rows]), ops.sample, stock.sample(), None, (),
               every=False)
    table, tokens = rnd(V, model.hidden), torch.randint(0, V, (2500,), generator=generator).to(device)
    yield Case("embedding", "embedding", f"{shape} H={model.hidden}", dtype, 2500, lambda rows: (tokens[rows],),
               lambda t: ops.embedding(t, table), {"torch embedding": lambda t: torch.nn.functional.embedding(t, table)},
               lambda t: reference.embedding(t, table).double(), () if quick else (16, 256, 2048), every=False)
