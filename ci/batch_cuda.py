"""vLLM on one GPU: a request's tokens and log-probabilities against the same request alone, and what that costs.

    VIME_COMMIT=$(git rev-parse HEAD) python ci/batch_cuda.py --hf-checkpoint DIR --out ci/evidence/h200-batch.json

64 prompts of 3 to 300 tokens, 64 sampled tokens each, seeded: all together, one by one, on a warm prefix cache, with a
prefill in small chunks, with CUDA graphs and without. The stock engine takes the same requests for the contrast; its
generation time is the base of the cost, in alternating pairs.
"""
from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from alignment import evidence
from alignment.logprobs import judge
from alignment.verdict import Coverage, Status, Verdict, combine
from vime.rl.config import TrainConfig, engine_env
from vime.vllm.client import EngineClient
from vime.vllm.launch import launch_engine
from vime.vllm.plugin import ROUTED
from vime.vllm.protocol import Request, Sample


def requests(count: int, length: int, tag: str, vocab: int = 49000) -> list[Request]:
    """The same prompts and seeds for every ``tag``."""
    random = np.random.default_rng(0)
    return [Request(request_id=f"{tag}.{i}", prompt_token_ids=random.integers(3, vocab, int(n)).tolist(), max_tokens=length, seed=7 * i + 1)
            for i, n in enumerate(random.integers(3, 300, count))]


def records(samples: list[Sample]) -> dict[str, dict[str, Any]]:
    return {s.request_id.split(".")[1]: {"token_ids": s.token_ids, "prompt_token_ids": s.prompt_token_ids,
                                         "logprobs": np.array(s.logprobs, dtype=np.float32)} for s in samples}


def cold(client: EngineClient, batch: list[Request]) -> list[Sample]:
    client.reset_prefix_cache()
    return client.generate(batch)


def differing(a: list[Sample], b: list[Sample]) -> dict[str, Any]:
    """How far two runs of one engine are apart, each sequence up to its first different token."""
    left, right = records(a), records(b)
    count, largest = 0, 0.0
    for key, one in left.items():
        other = right[key]
        same = next((i for i, (x, y) in enumerate(zip(one["token_ids"], other["token_ids"], strict=True)) if x != y), len(one["token_ids"]))
        gap = np.abs(one["logprobs"][:same] - other["logprobs"][:same])
        count, largest = count + int((gap > 0).sum()), max(largest, float(gap.max(initial=0.0)))
    return {"logprobs_differing": count, "max": largest, "sequences_with_other_tokens":
            sum(left[k]["token_ids"] != right[k]["token_ids"] for k in left)}


def seconds(client: EngineClient, batch: list[Request]) -> float:
    client.reset_prefix_cache()
    started = time.perf_counter()
    client.generate(batch)
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-checkpoint", required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    config = TrainConfig(hf_checkpoint=args.hf_checkpoint, device="cuda", dtype="bfloat16", vllm_enable_deterministic_inference=False)
    verdicts: list[Verdict] = []
    numbers: dict[str, Any] = {}

    def engine(name: str, ops: tuple[str, ...], **options: Any) -> Any:
        started = time.perf_counter()
        process = launch_engine(args.hf_checkpoint, device="cuda", dtype="bfloat16", ops=ops, log_path=args.logs / f"{name}.log",
                                env=engine_env(config.replace(ops=ops)), max_model_len=1024, kv_cache_bytes=4 << 30, start_timeout=200, **options)
        numbers.setdefault("start_s", {})[name] = time.perf_counter() - started
        return process

    def check(name: str, samples: list[Sample]) -> None:
        verdict = judge(records(alone), records(samples), name=name, temperature=1.0, top_p=1.0, top_k=-1)
        verdicts.append(verdict)
        print(name, verdict.status, verdict.coverage, verdict.first_bad or "", flush=True)

    def write() -> Verdict:
        claims = [evidence.claim(v, model=args.model, device="cuda", dtype="bfloat16", topology="one GPU") for v in verdicts]
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(evidence.text(evidence.build(claims, kind="gates", numbers=numbers)))
        return combine("batch", verdicts)

    with contextlib.ExitStack() as stack:
        aligned = stack.enter_context(engine("graphs", ROUTED, max_num_seqs=256, max_num_batched_tokens=2048)).client
        started = time.perf_counter()
        alone = [cold(aligned, [r])[0] for r in requests(args.count, args.length, "alone")]
        numbers["alone_s"] = time.perf_counter() - started
        check(f"batch of {args.count} against alone, CUDA graphs", cold(aligned, requests(args.count, args.length, "batch")))
        warm = aligned.generate(requests(args.count, args.length, "warm"))
        check("warm prefix cache", warm)
        hits = sum(s.num_cached_tokens for s in warm)
        verdicts.append(Verdict("the prefix cache was hit", Status.PASS if hits else Status.NOT_RUN, coverage={"tokens": Coverage(hits, hits)}))
        with engine("eager", ROUTED, max_num_seqs=16, max_num_batched_tokens=48, cuda_graphs=False) as process:
            check("chunks of at most 48 tokens, without graphs", process.client.generate(requests(args.count, args.length, "eager")))
        whole = write()
        print(whole.status, whole.reason, whole.coverage, flush=True)
        stock = stack.enter_context(engine("stock", (), max_num_seqs=256, max_num_batched_tokens=2048)).client
        few = requests(12, args.length, "one")
        together = [s for s in cold(stock, requests(args.count, args.length, "all")) if int(s.request_id.split(".")[1]) < len(few)]
        numbers["stock"] = differing([cold(stock, [r])[0] for r in few], together)
        print("stock", numbers["stock"], flush=True)
        numbers["cost"] = {}
        for concurrency in (64, 256, 1):
            batch = requests(concurrency, 128, f"cost{concurrency}")
            times = [(seconds(aligned, batch), seconds(stock, batch)) for _ in range(args.pairs + 1)][1:]
            numbers["cost"][str(concurrency)] = {"ratio": statistics.median(a / b for a, b in times), "aligned_s": statistics.median(a for a, _ in times),
                                                 "stock_s": statistics.median(b for _, b in times)}
            print("cost at", concurrency, numbers["cost"][str(concurrency)], flush=True)
    write()
    return Status(whole.status).exit_code


if __name__ == "__main__":
    raise SystemExit(main())
