"""Proof for attention: a position of a sequence has one result, however it was batched, cached or chunked."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from vime import ops
from vime.ops import reference, stock
from vime.ops.prove_cases import QWEN25, SMOLLM2, Model
from vime.ops.prove_types import CaseResult, relative_error

#: (queries, lengths) -> rows of the last ``queries[b]`` positions of sequence b, for sequences given by number.
Paged = Callable[[list[int], list[int], list[int]], torch.Tensor]
WIDE = Model("head-dim-128", 1024, 0, 8, 2, 128, 0)


class Setup:
    """Packed sequences, and the same keys and values in a cache whose pages are shuffled."""

    def __init__(self, model: Model, lengths: list[int], dtype: torch.dtype, device: str, generator: torch.Generator) -> None:
        total, D = sum(lengths), model.head_dim
        self.model, self.lengths, self.scale = model, lengths, D ** -0.5
        self.q, self.k, self.v = (torch.randn(total, n, D, generator=generator).to(device, dtype)
                                  for n in (model.heads, model.kv_heads, model.kv_heads))
        self.starts = [0]
        for n in lengths:
            self.starts.append(self.starts[-1] + n)
        self.generator = generator

    def of(self, x: torch.Tensor, b: int, first: int = 0) -> torch.Tensor:
        return x[self.starts[b] + first:self.starts[b + 1]]

    def packed(self, order: list[int]) -> torch.Tensor:
        cu = torch.tensor([0, *(self.lengths[b] for b in order)], device=self.q.device).cumsum(0).to(torch.int32)
        return ops.attention_varlen(*(torch.cat([self.of(x, b) for b in order]) for x in (self.q, self.k, self.v)), cu, self.scale)

    def fill(self, page: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache (NaN where nothing was written) and block table."""
        blocks = [(n + page - 1) // page for n in self.lengths]
        count = sum(blocks) + 3
        shape = ops.kv_cache_shape(count, page, self.model.kv_heads, self.model.head_dim, self.q.dtype, self.q.device)
        cache = torch.full(shape, float("nan"), dtype=self.q.dtype, device=self.q.device)
        free = torch.randperm(count, generator=self.generator).tolist()
        table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
        slots = []
        for b, n in enumerate(blocks):
            for i in range(n):
                table[b, i] = free.pop()
            position = torch.arange(self.lengths[b])
            slots.append(table[b, position // page].long() * page + position % page)
        ops.kv_cache_write(self.k, self.v, cache, torch.cat(slots).to(self.q.device))
        return cache, table.to(self.q.device)

    def paged(self, cache: torch.Tensor, table: torch.Tensor, order: list[int], upto: list[int], queries: list[int]) -> torch.Tensor:
        """Rows of positions [upto - queries, upto) of the sequences in ``order``."""
        q = torch.cat([self.of(self.q, b)[n - m:n] for b, n, m in zip(order, upto, queries, strict=True)])
        starts = torch.tensor([0, *queries], device=q.device).cumsum(0).to(torch.int32)
        return ops.attention_paged(q, cache, table[order], torch.tensor(upto, dtype=torch.int32, device=q.device), starts, self.scale)


def prove(dtype: torch.dtype, device: str, quick: bool, subject: str, generator: torch.Generator, threads: list[int],
          implementation: str, clock: Callable[..., Any] | None) -> Iterator[CaseResult]:
    lengths = [1, 64, 2, 130, 65] if quick else [1, 2, 3, 63, 64, 65, 127, 128, 129, 300, 777, 2049]
    for model in (SMOLLM2,) if quick else (SMOLLM2, QWEN25, WIDE):
        setup = Setup(model, lengths, dtype, device, generator)
        shape = f"{model.name} heads {model.heads}/{model.kv_heads} dim {model.head_dim}, lengths {min(lengths)} to {max(lengths)}"
        result = CaseResult("attention", "attention", str(dtype).removeprefix("torch."), shape, implementation)
        if subject == "stock":
            _sweep_stock(setup, result)
        else:
            _sweep(setup, result, quick, threads)
        if clock is not None and not quick:
            _time(setup, result, clock)
        yield result


def _sweep(setup: Setup, result: CaseResult, quick: bool, threads: list[int]) -> None:
    everyone = list(range(len(setup.lengths)))
    want = setup.packed(everyone)
    rows = {b: setup.of(want, b) for b in everyone}
    shorter = [b for b in everyone if setup.lengths[b] <= 800]
    exact = reference.attention_varlen(*(x[:setup.starts[len(shorter)]].double() for x in (setup.q, setup.k, setup.v)),
                                       torch.tensor(setup.starts[:len(shorter) + 1]), setup.scale)
    result.error = relative_error(want[:len(exact)], exact)

    def compare(order: list[int], got: torch.Tensor, place: dict[str, Any], spans: list[tuple[int, int]] | None = None) -> None:
        spans = spans or [(0, setup.lengths[b]) for b in order]
        wanted = torch.cat([rows[b][first:last] for b, (first, last) in zip(order, spans, strict=True)])
        result.rows_expected += len(wanted)
        result.compare(got, wanted, place)

    for count in threads:
        if setup.q.device.type == "cpu":
            torch.set_num_threads(count)
        compare(everyone, setup.packed(everyone), {"form": "packed", "threads": count})
        for b in everyone:
            compare([b], setup.packed([b]), {"form": "packed alone", "sequence": b, "threads": count})
        order = torch.randperm(len(everyone), generator=setup.generator).tolist()
        compare(order, setup.packed(order), {"form": "packed, permuted", "order": order, "threads": count})
    for page in (16, 64) if quick else (16, 32, 64, 128):
        cache, table = setup.fill(page)
        compare(everyone, setup.paged(cache, table, everyone, setup.lengths, setup.lengths), {"form": "paged prefill", "page": page})
        for chunk in (7, 64) if quick else (2, 7, 16, 64, 100, 256):
            first = {b: max(0, setup.lengths[b] - 40 * chunk) for b in everyone}  # long sequences: their last 40 chunks
            while active := [b for b in everyone if first[b] < setup.lengths[b]]:
                spans = [(first[b], min(first[b] + chunk, setup.lengths[b])) for b in active]
                got = setup.paged(cache, table, active, [s[1] for s in spans], [s[1] - s[0] for s in spans])
                compare(active, got, {"form": "chunked prefill", "chunk": chunk, "page": page}, spans)
                first.update({b: span[1] for b, span in zip(active, spans, strict=True)})
        for back in range(1, 5 if quick else 80):  # decode: one query each, all sequences that are long enough, shuffled
            active = [b for b in torch.randperm(len(everyone), generator=setup.generator).tolist() if setup.lengths[b] >= back]
            upto = [setup.lengths[b] - back + 1 for b in active]
            compare(active, setup.paged(cache, table, active, upto, [1] * len(active)), {"form": "decode", "page": page},
                    [(n - 1, n) for n in upto])


def _sweep_stock(setup: Setup, result: CaseResult) -> None:
    """Stock packed attention against stock decode: the negative control."""
    lengths = setup.lengths
    want = stock.attention_varlen(lengths, setup.scale)["torch scaled_dot_product_attention"](setup.q, setup.k, setup.v)
    for b, n in enumerate(lengths):
        for m in (1, min(n, 7)):
            routes = stock.attention_paged([n], [m], setup.of(setup.k, b), setup.of(setup.v, b), setup.scale)
            for name, run in routes.items():
                result.rows_expected += m
                result.compare(run(setup.of(setup.q, b, n - m)), setup.of(want, b, n - m), {"form": f"{name}, last {m} of {n}"})


def _time(setup: Setup, result: CaseResult, clock: Callable[..., Any]) -> None:
    model, dtype, device = setup.model, setup.q.dtype, str(setup.q.device)
    for lengths in ([512] * 2, [100, 300, 700, 900]):
        s = Setup(model, lengths, dtype, device, setup.generator)
        routes = dict(stock.attention_varlen(lengths, s.scale))
        paged = stock.attention_paged(lengths, lengths, s.k, s.v, s.scale)
        routes.update({name: (lambda q, k, v, run=run: run(q)) for name, run in paged.items() if name.startswith("vllm")})
        cu = torch.tensor(s.starts, dtype=torch.int32, device=device)
        result.timings.append(clock(f"prefill {lengths}", lambda q, k, v, s=s, cu=cu: ops.attention_varlen(q, k, v, cu, s.scale), routes, (s.q, s.k, s.v)))
    for count, n in ((1, 512), (16, 512), (4, 2048)):
        s = Setup(model, [n] * count, dtype, device, setup.generator)
        cache, table = s.fill(32)
        lens, starts = torch.full((count,), n, dtype=torch.int32, device=device), torch.arange(count + 1, dtype=torch.int32, device=device)
        q = torch.cat([s.of(s.q, b, n - 1) for b in range(count)])
        result.timings.append(clock(f"decode {count} x {n}", lambda q, s=s, c=cache, t=table, m=lens, a=starts: ops.attention_paged(q, c, t, m, a, s.scale),
                                    stock.attention_paged([n] * count, [1] * count, s.k, s.v, s.scale), (q,)))
