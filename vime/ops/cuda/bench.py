"""What exactness costs on this device: every operation against the fastest stock route, in alternating pairs.

Times are taken inside CUDA graphs, ours and stock in turn; the ratio is the median of the pairs. Stock is cuBLAS with
its workspace (in a process of its own), vLLM's CUDA kernels where its library is installed, torch, and FA3 as it splits
by itself. ``python -m vime.ops.cuda.bench`` prints a table of one model in under a minute.
"""
from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from vime import ops
from vime.ops.cuda import stock_gemm
from vime.ops.cuda.proof_attention import paged_copy
from vime.ops.cuda.shapes import MODELS, ModelShape
from vime.ops.cuda.stock_gemm import graph_of
from vime.ops.prove_types import Timing
from vime.ops.providers import cublas, fa3

PAIRS = 7


#: (function, timing), the function named as in :mod:`vime.ops.cuda.proof`.
Cost = tuple[str, Timing]


def measure(function: str, rows: str, ours: Callable[[], object], stock: dict[str, Callable[[], object]]) -> Cost:
    """Alternate ours with each stock route."""
    return _pairs(function, rows, graph_of(ours), {name: graph_of(route) for name, route in stock.items()})


def _pairs(function: str, rows: str, run: Callable[[], float], stock: dict[str, Callable[[], float]]) -> Cost:
    mine: dict[str, list[float]] = {name: [] for name in stock}
    theirs: dict[str, list[float]] = {name: [] for name in stock}
    for _ in range(PAIRS):
        for name, other in stock.items():
            mine[name].append(run())
            theirs[name].append(other())
    best = min(stock, key=lambda name: statistics.median(theirs[name]))
    ratio = statistics.median(a / b for a, b in zip(mine[best], theirs[best], strict=True))
    return function, Timing(rows, statistics.median(mine[best]), statistics.median(theirs[best]), ratio, best, PAIRS)


def linears(shape: ModelShape, rows: tuple[int, ...] = (1, 8, 64, 256, 1024, 8192)) -> Iterator[Cost]:
    """cuBLAS with workspace runs in a child process; the two take turns. Run by path: the package would starve it."""
    env = {name: value for name, value in os.environ.items() if name not in cublas.STARVED}
    with subprocess.Popen([sys.executable, "-P", stock_gemm.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True, env=env) as child:
        assert child.stdin is not None and child.stdout is not None
        for name, (n, k) in shape.linears().items():
            weight_NK = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
            for m in rows:
                x_MK = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)

                def stock(line: str = f"{n} {k} {m}\n") -> float:
                    child.stdin.write(line)
                    child.stdin.flush()
                    return float(child.stdout.readline())

                yield _pairs("linear", f"{m} x {name} N={n} K={k}",
                             graph_of(lambda x=x_MK, w=weight_NK: ops.linear(x, w)), {"cublas": stock})
        child.stdin.close()


def _vllm_kernels() -> bool:
    spec = importlib.util.find_spec("vllm")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for path in Path(root).glob("_C_stable_libtorch*.so"):
            torch.ops.load_library(str(path))
            return True
    return False


def elementwise(shape: ModelShape, rows: tuple[int, ...] = (1, 64, 1024, 8192)) -> Iterator[Cost]:
    """Norms, rotary, activation."""
    vllm = _vllm_kernels()

    def data(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16)

    w, eps, dim = data(shape.hidden), 1e-5, shape.head_dim
    for m in rows:
        x, r, out = data(m, shape.hidden), data(m, shape.hidden), data(m, shape.hidden)
        stock = {"torch": lambda x=x: F.rms_norm(x, (shape.hidden,), w, eps)}
        fused = {"torch": lambda x=x, r=r: F.rms_norm(x + r, (shape.hidden,), w, eps)}
        if vllm:
            stock["vllm"] = lambda out=out, x=x: torch.ops._C.rms_norm(out, x, w, eps)
            fused["vllm"] = lambda x=x, r=r: torch.ops._C.fused_add_rms_norm(x, r, w, eps)
        yield measure("rms_norm", str(m), lambda x=x: ops.rms_norm(x, w, eps), stock)
        yield measure("add_rms_norm", str(m), lambda x=x, r=r: ops.add_rms_norm(x, r, w, eps), fused)
        gate_up, half = data(m, 2 * shape.ffn), data(m, shape.ffn)
        stock = {"torch": lambda x=gate_up: F.silu(x[:, : shape.ffn]) * x[:, shape.ffn :]}
        if vllm:
            stock["vllm"] = lambda out=half, x=gate_up: torch.ops._C.silu_and_mul(out, x)
        yield measure("silu_and_mul", str(m), lambda x=gate_up: ops.silu_and_mul(x), stock)
        if vllm:
            position = torch.randint(0, 4096, (m,), device="cuda")
            cos, sin = ops.rope_cos_sin(torch.arange(4096, device="cuda"), dim, 1e4)
            table = data(4096, dim)
            q, k = data(m, shape.heads * dim), data(m, shape.groups * dim)
            yield measure(
                "apply_rope", str(m),
                lambda p=position, q=q, k=k, c=cos, s=sin, m=m: ops.rotate(q.view(m, shape.heads, dim), k.view(m, shape.groups, dim), c, s, p),
                {"vllm": lambda p=position, q=q, k=k, t=table: torch.ops._C.rotary_embedding(p, q, k, dim, t, True)},
            )


def vocabulary(shape: ModelShape, rows: tuple[int, ...] = (1, 64, 256, 1024)) -> Iterator[Cost]:
    """Selected log-probability and sampling."""
    for m in rows:
        logits = torch.randn(m, shape.vocab, device="cuda", dtype=torch.bfloat16)
        ids = torch.randint(0, shape.vocab, (m,), device="cuda")
        seed, temperature = ids.clone(), torch.ones(m, device="cuda")
        yield measure("token_logprob", str(m), lambda x=logits, i=ids, t=temperature: ops.token_logprob(x, i, t), {
            "log_softmax": lambda x=logits, i=ids: x.log_softmax(-1, dtype=torch.float32).gather(1, i[:, None]),
            "cross_entropy": lambda x=logits, i=ids: F.cross_entropy(x.float(), i, reduction="none"),
        })
        noise = torch.empty(m, shape.vocab, device="cuda")
        yield measure("sample", str(m), lambda x=logits, s=seed, t=temperature: ops.sample(x, s, s, t), {
            "softmax, exponential": lambda x=logits, n=noise: (x.softmax(-1, dtype=torch.float32) / n.exponential_()).argmax(-1),
        })


def attention(shape: ModelShape) -> Iterator[Cost]:
    """Decode of 1, 64 and 256 sequences at 1024 positions, a packed prefill, and its backward."""
    heads, groups, dim = shape.heads, shape.groups, shape.head_dim
    scale = dim**-0.5

    def data(rows: int, n: int) -> torch.Tensor:
        return torch.randn(rows, n, dim, device="cuda", dtype=torch.bfloat16)

    length = 1024
    for batch in (1, 64, 256):
        cache, table = paged_copy(data(batch * length, groups), data(batch * length, groups), (length,) * batch)
        q = data(batch, heads)
        used = torch.full((batch,), length, device="cuda", dtype=torch.int32)
        start = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
        yield measure(
            "attention_paged", f"decode {batch} at {length}",
            lambda q=q, c=cache, t=table, u=used, s=start, o=torch.empty_like(q): ops.attention_paged_into(o, q, c, t, u, s, scale),
            {"fa3": lambda q=q, c=cache, t=table, u=used, s=start: fa3.stock_paged(q, c[:, 0], c[:, 1], s, 1, length, scale, u, t)},
        )
    rows, batch = 8192, 8
    q, k, v = data(rows, heads), data(rows, groups), data(rows, groups)
    cu = torch.arange(0, rows + 1, rows // batch, device="cuda", dtype=torch.int32)
    longest = rows // batch

    def flash() -> tuple[torch.Tensor, ...]:
        return torch.ops.aten._flash_attention_forward(q, k, v, cu, cu, longest, longest, 0.0, True, False, scale=scale)

    yield measure("attention_varlen", f"packed {batch}x{longest}", lambda: ops.attention_varlen(q, k, v, cu, scale),
                  {"torch flash": flash, "fa3": lambda: fa3.stock_packed(q, k, v, cu, longest, scale)})
    o, lse, state, unused, _ = flash()
    o3, lse3 = fa3.forward(q, k, v, cu, longest, longest, scale, True, key_start_B1=cu)
    yield measure(
        "attention_backward", f"packed {batch}x{longest}",
        lambda: fa3.backward(q, q, k, v, o3, lse3, cu, longest, scale, True),
        {"torch flash": lambda: torch.ops.aten._flash_attention_backward(
            q, q, k, v, o, lse, cu, cu, longest, longest, 0.0, True, state, unused, scale=scale)},
    )


def report(shape: ModelShape, rows: tuple[int, ...], parts: Iterable[str]) -> dict[str, list[dict[str, object]]]:
    """Time the parts and print a line each, slowest in sum last: microseconds of ours, of stock, and their ratio."""
    every: dict[str, Callable[[], Iterator[Cost]]] = {
        "linear": lambda: linears(shape, rows), "elementwise": lambda: elementwise(shape, rows), "vocabulary": lambda: vocabulary(shape, rows),
        "attention": lambda: attention(shape)}
    found: dict[str, list[dict[str, object]]] = {}
    with torch.no_grad():
        for part in parts:
            for function, timing in every[part]():
                found.setdefault(function, []).append(dataclasses.asdict(timing))
                print(f"{function:20} {timing.rows:34} {timing.ours_us:9.1f} us {timing.stock_us:9.1f} us ({timing.stock_route}) "
                      f"{timing.ratio:6.2f}x {timing.ours_us - timing.stock_us:+9.1f} us", flush=True)
    return found


def main() -> None:
    """``python -m vime.ops.cuda.bench --model qwen2.5-0.5b --rows 1 64 256``"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="smollm2-135m")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--parts", nargs="+", choices=("linear", "elementwise", "vocabulary", "attention"),
                        default=["linear", "elementwise", "vocabulary", "attention"])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the timings as JSON at the end")
    args = parser.parse_args()
    global PAIRS
    PAIRS = args.pairs
    found = report(MODELS[args.model], tuple(args.rows), args.parts)
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
