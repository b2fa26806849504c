"""What alignment costs on one GPU: generation and a training step, against the ordinary stack at its best.

    VIME_COMMIT=$(git rev-parse HEAD) python ci/cost_cuda.py --hf-checkpoint DIR --out ci/evidence/h200-cost.json --logs DIR
    VIME_COMMIT=$(git rev-parse HEAD) python ci/cost_cuda.py --profile glm5.2-6layer-128e --budget 1.15 --kv-gib 2 --out OUT --logs DIR

With ``--profile`` both engines draw weights of their own (time needs no others), so that models fit that lie in no file.
The ordinary engine is ``vllm.LLM`` as it comes: torch.compile, CUDA graphs, asynchronous scheduling, its own sampler. It runs in
a process of its own, and the two take turns on the same requests, all of which the KV cache must hold at once.
Ratios are medians over pairs. Exit codes are those of the worst verdict: 1 where a ratio is over its budget.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from alignment import evidence
from alignment.verdict import Status, worst
from gates.costs import ratio_of, within

#: What is asked of generation, by number of requests at once.
BUDGET = {1: 1.25, 64: 1.10, 256: 1.10}
LIMITS = {"max_model_len": 1024, "max_num_seqs": 256, "max_num_batched_tokens": 2048}


def prompts(count: int, vocab: int) -> list[list[int]]:
    """Token ids of ``count`` prompts of 3 to 300 tokens."""
    draw = np.random.default_rng(0)
    return [draw.integers(3, vocab, int(n)).tolist() for n in draw.integers(3, 300, count)]


def vocab_of(folder: str) -> int:
    """Token ids that prompts are drawn of."""
    return min(30000, int(json.loads((Path(folder) / "config.json").read_text())["vocab_size"]))


def serve_stock(model: str, kv_gib: int, load_format: str, vocab: int) -> None:
    """The child: for each line ``[count, length]`` on stdin, generate and print the seconds."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = LLM(model=model, dtype="bfloat16", load_format=load_format, skip_tokenizer_init=True, enable_prefix_caching=True,
                 generation_config="vllm", kv_cache_memory_bytes=kv_gib << 30, gpu_memory_utilization=0.4, disable_log_stats=True, **LIMITS)
    cache = engine.llm_engine.vllm_config.cache_config
    print(json.dumps({"torch": torch.__version__, "cache": [cache.num_gpu_blocks or 0, cache.block_size]}), flush=True)
    for line in sys.stdin:
        count, length = json.loads(line)
        params = [SamplingParams(max_tokens=length, temperature=1.0, seed=7 * i + 1, ignore_eos=True, detokenize=False, logprobs=0,
                                 output_kind=RequestOutputKind.FINAL_ONLY) for i in range(count)]
        engine.reset_prefix_cache()
        started = time.perf_counter()
        made = engine.generate([{"prompt_token_ids": p} for p in prompts(count, vocab)], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        assert sum(len(m.outputs[0].token_ids) for m in made) == count * length
        print(json.dumps(seconds), flush=True)


@contextlib.contextmanager
def stock_engine(args: argparse.Namespace) -> Iterator[Callable[[int, int], float]]:
    """Seconds of one generation of the ordinary stack, by number of requests and sampled tokens of each."""
    env = {k: v for k, v in os.environ.items() if k not in ("VIME_PLUGIN", "TORCHDYNAMO_DISABLE", "VLLM_USE_FLASHINFER_SAMPLER",
                                                            "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")}
    if not args.flashinfer_sampler:
        env["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    with open(args.logs / "stock.log", "w") as log, subprocess.Popen(
            [sys.executable, __file__, "--serve-stock", "--hf-checkpoint", args.hf_checkpoint, "--kv-gib", str(args.kv_gib),
             "--load-format", args.load_format],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as child:
        assert child.stdin is not None and child.stdout is not None

        def answer() -> Any:
            while line := child.stdout.readline():  # type: ignore[union-attr]
                with contextlib.suppress(ValueError):
                    return json.loads(line)
            raise SystemExit(f"the ordinary engine ended with exit code {child.wait()}; see {args.logs}/stock.log")

        def seconds(count: int, length: int) -> float:
            child.stdin.write(json.dumps([count, length]) + "\n")  # type: ignore[union-attr]
            child.stdin.flush()  # type: ignore[union-attr]
            return float(answer())

        require_room("the ordinary engine", *answer()["cache"], args)
        try:
            yield seconds
        finally:
            child.kill()


def require_room(side: str, blocks: int, block_size: int, args: argparse.Namespace) -> None:
    """Exit where the cache does not hold all requests to their end, each in whole blocks of ``block_size`` tokens: some would wait or be
    computed again, and what is asked for would not be measured."""
    wanted = max(sum(-(-(len(p) + args.length) // block_size) for p in prompts(count, vocab_of(args.hf_checkpoint))) for count in args.concurrency)
    print(f"{side} holds {blocks} blocks of {block_size} tokens, {wanted} of them wanted", flush=True)
    if blocks < wanted:
        raise SystemExit(f"the KV cache of {side} holds {blocks} blocks of {block_size} tokens, and {max(args.concurrency)} requests at once take "
                         f"{wanted}: raise --kv-gib, which is {args.kv_gib}")


@contextlib.contextmanager
def aligned_engine(args: argparse.Namespace) -> Iterator[Callable[[int, int], float]]:
    """As :func:`stock_engine`, of an engine with every operation aligned."""
    from vime.rl.config import TrainConfig, engine_env
    from vime.vllm.launch import launch_engine
    from vime.vllm.plugin import ROUTED
    from vime.vllm.protocol import Request

    config = TrainConfig(hf_checkpoint=args.hf_checkpoint, device="cuda", dtype="bfloat16", vllm_enable_deterministic_inference=False)
    with launch_engine(args.hf_checkpoint, device="cuda", dtype="bfloat16", ops=ROUTED, log_path=args.logs / "aligned.log",
                       env=engine_env(config), kv_cache_bytes=args.kv_gib << 30, gpu_memory_utilization=0.4, start_timeout=250,
                       load_format=args.load_format, cuda_graphs=not args.enforce_eager, fp8=args.fp8, **LIMITS) as engine:
        cache = engine.client.info()["cache"]
        require_room("the aligned engine", cache["num_blocks"], cache["block_size"], args)
        print("the aligned engine runs", engine.client.info()["eager"] or ("eager, as asked" if args.enforce_eager else "in CUDA graphs"), flush=True)

        def seconds(count: int, length: int) -> float:
            batch = [Request(request_id=f"r{i}", prompt_token_ids=p, max_tokens=length, seed=7 * i + 1)
                     for i, p in enumerate(prompts(count, vocab_of(args.hf_checkpoint)))]
            engine.client.reset_prefix_cache()
            started = time.perf_counter()
            engine.client.generate(batch)
            return time.perf_counter() - started

        yield seconds


def pairs(ours: Callable[[], float], stock: Callable[[], float], count: int) -> dict[str, Any]:
    """Alternate the two after one turn each to warm up."""
    ours(), stock()
    times = [(ours(), stock()) for _ in range(count)]
    aligned_s, stock_s = zip(*times, strict=True)
    return ratio_of(aligned_s, stock_s) | {"aligned_s": round(statistics.median(aligned_s), 4), "stock_s": round(statistics.median(stock_s), 4)}


def claims(args: argparse.Namespace, generation: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One claim a concurrency: within its budget or not."""
    found = []
    for count, cost in generation.items():
        budget = getattr(args, "budget", None) or BUDGET.get(int(count), 1.10)
        verdict = within(f"cost of generation, {count} at once", cost, budget, "the ordinary stack")
        found.append(evidence.claim(verdict, model=args.model, device="cuda", dtype="bfloat16", topology="one GPU"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-checkpoint")
    parser.add_argument("--profile", help="a profile of the gates instead of a folder")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--enforce-eager", action="store_true", help="the aligned engine without CUDA graphs")
    parser.add_argument("--fp8", default="", choices=("", "blockwise"), help="of the aligned engine")
    parser.add_argument("--budget", type=float, help="allowed ratio at every concurrency")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path, default=Path("."))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 256, 1])
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--kv-gib", type=int, default=8)
    parser.add_argument("--flashinfer-sampler", action="store_true", help="the ordinary engine samples with FlashInfer")
    parser.add_argument("--serve-stock", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.profile:
        from gates.profiles import find, split

        if split(args.profile)[1]:
            parser.error(f"--profile {args.profile}: a cost is of the profile's checkpoint alone; there are flags for how the engine runs it")
        args.hf_checkpoint, args.model, args.load_format = str(find(args.profile).checkpoint()), f"{args.profile}, drawn weights", "dummy"
    if not args.hf_checkpoint:
        parser.error("--hf-checkpoint or --profile")
    args.model += "".join(f", {word}" for word, on in ((f"fp8 {args.fp8}", args.fp8), ("eager", args.enforce_eager)) if on)
    if args.serve_stock:
        serve_stock(args.hf_checkpoint, args.kv_gib, args.load_format, vocab_of(args.hf_checkpoint))
        return 0
    began, numbers = time.time(), dict[str, Any]()
    args.logs.mkdir(parents=True, exist_ok=True)
    with aligned_engine(args) as ours, stock_engine(args) as stock:
        print(f"both engines are up after {time.time() - began:.0f} s", flush=True)
        for count in args.concurrency:
            found = pairs(lambda c=count: ours(c, args.length), lambda c=count: stock(c, args.length), args.pairs)  # type: ignore[misc]
            numbers.setdefault("generation", {})[str(count)] = found
            print("generation at", count, found, flush=True)
            if args.out is not None:
                evidence.write(args.out, evidence.build(
                    claims(args, numbers["generation"]), kind="bench", numbers=numbers, seconds=time.time() - began))
    return worst(Status(c["verdict"]) for c in claims(args, numbers["generation"])).exit_code


if __name__ == "__main__":
    raise SystemExit(main())
