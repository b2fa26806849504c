"""What gradients cost whose bits do not show the topology, against Megatron's own: alternating pairs on gloo ranks.

    python tools/bench_gradients.py [--profile glm5.2-6layer-tiny] [--ranks 8] [--pairs 9] [--elements 4194304]

Prints the median of the pairs' ratios, and the times, of: forward and backward (an expert's weight gradient by source rank
against one product), the reduction over ranks after it, both together, and of the reduction alone of one long gradient. Megatron's
own is its ``DistributedDataParallel`` with gloo's all-reduce, and one weight gradient an expert; the rest of the step is the
same.
"""
from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any


def stock(gradients: Any) -> Callable[[], None]:
    """Megatron's own way in this process; returns what takes it back."""
    before = gradients.linear, gradients.finish

    def finish(ddp: Any, by_source: bool) -> None:
        del by_source
        for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
            group.finish_grad_sync()

    gradients.linear, gradients.finish = gradients._forward, finish

    def undo() -> None:
        gradients.linear, gradients.finish = before

    return undo


def rank_main(rank: int, ranks: int, store: str, folder: str, pairs: int, elements: int, microbatches: int | None, out: Any) -> None:
    import torch
    import torch.distributed as dist

    import vime
    from vime.megatron import forward, gradients, parallel
    from vime.megatron import model as models
    from vime.megatron.optim import Optimizer
    from vime.weights.checkpoint import HfCheckpoint

    torch.set_num_threads(1)
    parallel.initialize(rank, ranks, dist.FileStore(store, ranks), expert_parallel=ranks)
    vime.enable()
    held = HfCheckpoint(folder)
    model = models.build_model(held.config, torch.bfloat16, recompute=True, initialize=False)
    models.load_weights(model, held, held.config)
    optimizer = Optimizer(model, 1e-3)
    g = torch.Generator().manual_seed(rank)
    sequence = torch.randint(0, held.config["vocab_size"], (88,), generator=g).tolist()
    long_L, times = torch.randn(elements, generator=g), []

    def took(work: Callable[[], Any]) -> float:
        dist.barrier()
        start = time.perf_counter()
        work()
        dist.barrier()
        return time.perf_counter() - start

    def backward() -> None:
        optimizer.zero_grad(microbatches)
        torch.cat(forward.token_logprobs_of(optimizer.ddp, [sequence], grad=True)).mean().backward()

    for pair in range(pairs + 1):
        row = {}
        for way in (("ours", "stock") if pair % 2 else ("stock", "ours")):
            undo = stock(gradients) if way == "stock" else (lambda: None)
            alone = ((lambda: gradients.reduce_in_order(long_L[None], dist.group.WORLD)) if way == "ours"
                     else (lambda: dist.all_reduce(long_L.clone())))
            row[way] = {"forward and backward": took(backward), "reduction": took(optimizer.ddp.finish_grad_sync),
                        f"reduction of {elements} fp32": took(alone)}
            undo()
        if pair:  # the first warms up
            times.append(row)
    if rank == 0:
        out.put(times)
    dist.barrier()


def main() -> None:
    from gates.profiles import find

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="glm5.2-6layer-tiny")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--elements", type=int, default=1 << 22)
    parser.add_argument("--keep-partials", action="store_true", help="partial sums are kept, as with several microbatches")
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
    folder, context = str(find(args.profile).checkpoint()), multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        out = context.Queue()
        given = (args.ranks, f"{scratch}/store", folder, args.pairs, args.elements, None if args.keep_partials else 1, out)
        processes = [context.Process(target=rank_main, args=(rank, *given)) for rank in range(args.ranks)]
        for process in processes:
            process.start()
        times = out.get(timeout=600)
        for process in processes:
            process.join()
    for part in times[0]["ours"]:
        ours, theirs = ([row[way][part] for row in times] for way in ("ours", "stock"))
        print_line(part, ours, theirs)
    both = [[row[way]["forward and backward"] + row[way]["reduction"] for row in times] for way in ("ours", "stock")]
    print_line("both", *both)


def print_line(part: str, ours: list[float], theirs: list[float]) -> None:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    print(f"{part:32} {statistics.median(ratios):5.2f}x ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} pairs): "
          f"{1e3 * statistics.median(ours):7.1f} ms against {1e3 * statistics.median(theirs):7.1f} ms")


if __name__ == "__main__":
    main()
