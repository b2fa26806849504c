"""Times stock cuBLAS in a process of its own, since workspace settings are read once per process.

Reads lines ``N K M`` from standard input, answers each with the microseconds of one bf16 ``x @ weight.T`` inside a CUDA
graph. Run with an environment that leaves cuBLAS its workspace; :mod:`vime.ops.cuda.bench` does.
"""
from __future__ import annotations

import sys
from collections.abc import Callable

import torch


def graph_of(run: Callable[[], object], inner: int = 10) -> Callable[[], float]:
    """Capture ``inner`` calls; returns a function that replays them and gives microseconds a call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            run()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replay() -> float:
        graph.replay()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3 / inner

    return replay


def main() -> None:
    replays: dict[str, Callable[[], float]] = {}
    for line in sys.stdin:
        if line not in replays:
            replays.clear()
            n, k, m = map(int, line.split())
            x_MK, w_NK = (torch.randn(size, k, device="cuda", dtype=torch.bfloat16) for size in (m, n))
            replays[line] = graph_of(lambda x=x_MK, w=w_NK: torch.nn.functional.linear(x, w))
        print(replays[line](), flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
