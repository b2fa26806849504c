"""vLLM on one GPU: a request's tokens and log-probabilities against the same request alone, at full size.

    VIME_COMMIT=$(git rev-parse HEAD) python ci/batch_cuda.py --hf-checkpoint DIR --out ci/evidence/h200-batch.json --logs DIR
    VIME_COMMIT=$(git rev-parse HEAD) python ci/batch_cuda.py --profile glm5.2-6layer-128e --prompt-tokens 6000 --longest 2048 --out OUT --logs DIR

With ``--profile`` a model whose weights lie in no file is taken as well: a trainer makes them and sends them to every engine by the
online update. 64 prompts of 3 to 300 tokens, seeded: one by one, all together, on a warm prefix cache, in small chunks without CUDA graphs;
then 256 longer ones in two different batches, and a few responses of 4096 tokens in two different batches. Controls: a seed
that follows the place in the batch has to be found, and stock vLLM, plain and in its own batch-invariant mode, takes the same
requests for the contrast. What it costs is measured by ``ci/cost_cuda.py``.
"""
from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.progress import Progress

from alignment import evidence
from alignment.logprobs import judge
from alignment.verdict import Coverage, Status, Verdict, combine
from gates.harness import run_settings
from gates.profiles import find
from vime.rl.config import TrainConfig, engine_env, read_hf_config
from vime.rl.pool import TrainerPool
from vime.rl.ranks import TrainerFailed
from vime.rl.sync import fill
from vime.vllm.client import EngineClient
from vime.vllm.launch import launch_engine
from vime.vllm.plugin import ROUTED
from vime.vllm.protocol import EngineError, Request, Sample
from vime.weights.counted import is_counted

STOCK_INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
VOCAB = 30000  # token ids that prompts are drawn of, at most


def requests(count: int, length: int, tag: str, most: int, vocab: int) -> list[Request]:
    """The same prompts and seeds for every ``tag``; prompts have 3 to ``most`` tokens."""
    draw = np.random.default_rng(0)
    return [Request(request_id=f"{tag}.{i}", prompt_token_ids=draw.integers(3, vocab, int(n)).tolist(), max_tokens=length, seed=7 * i + 1)
            for i, n in enumerate(draw.integers(3, most, count))]


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


class Run:
    """Engines, verdicts and numbers of one run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.verdicts, self.numbers = args, list[Verdict](), dict[str, Any]()
        train: dict[str, Any] = {}
        if args.profile:
            profile = find(args.profile)
            args.hf_checkpoint, args.model, train = str(profile.checkpoint()), args.profile, run_settings(profile, args.device)
        self.config = TrainConfig(**{**train, "hf_checkpoint": args.hf_checkpoint, "device": args.device, "dtype": "bfloat16",
                                     "vllm_enable_deterministic_inference": False})
        self.vocab = min(VOCAB, int(read_hf_config(args.hf_checkpoint)["vocab_size"]))
        self.pool: TrainerPool | None = None
        self.stack = contextlib.ExitStack()
        self.began = time.time()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)

    @contextlib.contextmanager
    def engine(self, name: str, ops: tuple[str, ...], env: dict[str, str] | None = None, **options: Any) -> Iterator[EngineClient]:
        """A running engine with ``ops`` aligned; its start is timed and its log lies under ``name``."""
        started = time.perf_counter()
        longest = self.args.longest + max(512, self.args.prompt_tokens)
        with launch_engine(
                self.args.hf_checkpoint, device=self.args.device, dtype="bfloat16", ops=ops, log_path=self.args.logs / f"{name}.log",
                env={**engine_env(self.config.replace(ops=ops)), **(env or {})}, start_timeout=200,
                **{"max_model_len": longest, "kv_cache_bytes": self.args.kv_gib << 30, **options}) as process:
            self.numbers.setdefault("start_s", {})[name] = round(time.perf_counter() - started, 1)
            if process.client.health()["state"] == "empty":
                fill(self.config, self._trainer(), process.client, (process.url, process.token))
            yield process.client

    def _trainer(self) -> TrainerPool:
        """It makes the weights that lie in no file; started once, and kept for the next engine."""
        if self.pool is None:
            self.pool = self.stack.enter_context(TrainerPool(self.config, self.args.logs)).wait_ready()
        return self.pool

    def requests(self, count: int, length: int, tag: str) -> list[Request]:
        return requests(count, length, tag, self.args.prompt_tokens, self.vocab)

    def same(self, name: str, one: list[Sample], other: list[Sample]) -> Verdict:
        return judge(records(one), records(other), name=name, temperature=1.0, top_p=1.0, top_k=-1)

    def check(self, name: str, one: list[Sample], other: list[Sample]) -> None:
        self.add(self.same(name, one, other))

    def add(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        self.write()  # what is known so far, should the run be cut off
        print(verdict.name, verdict.status, verdict.coverage, verdict.first_bad or verdict.reason, flush=True)

    def write(self, done: bool = False) -> Verdict:
        """The evidence, as far as it goes; under another name until all of it is there, so that a run that was cut off is none."""
        args = self.args
        out = args.out if done else args.out.with_suffix(".unfinished.json")
        claims = [evidence.claim(v, model=args.model, device=args.device, dtype="bfloat16", topology="one GPU") for v in self.verdicts]
        evidence.write(out, evidence.build(claims, kind="gates", numbers=self.numbers, seconds=time.time() - self.began))
        if done:
            args.out.with_suffix(".unfinished.json").unlink(missing_ok=True)
        return combine("batch", self.verdicts)


def aligned(run: Run, client: EngineClient) -> list[Sample]:
    """Everything that the aligned engine has to give twice; the samples that were alone."""
    args = run.args
    with Progress() as progress:
        alone = [cold(client, [r])[0] for r in progress.track(run.requests(args.count, args.length, "alone"), description="one by one")]
    together = cold(client, run.requests(args.count, args.length, "batch"))
    run.check(f"batch of {args.count} against alone, CUDA graphs", alone, together)
    warm = client.generate(run.requests(args.count, args.length, "warm"))
    run.check("warm prefix cache", alone, warm)
    hits = sum(s.num_cached_tokens for s in warm)
    run.add(Verdict("the prefix cache was hit", Status.PASS if hits else Status.NOT_RUN, coverage={"tokens": Coverage(hits, hits)}))
    planted = cold(client, [msgspec.structs.replace(r, seed=5) if i == 5 else r
                            for i, r in enumerate(run.requests(args.count, args.length, "planted"))])
    said = run.same("planted", alone, planted)
    caught = said.status is Status.FAIL and said.first_bad is not None and said.first_bad.request == "5"
    run.add(Verdict("control: a seed by place is found at its request", Status.PASS if caught else Status.INVALID,
                    "" if caught else f"it said {said.status} at {said.first_bad}", coverage={"requests": Coverage(1, 1)}))
    many = run.requests(args.many, args.many_length, "many")
    first = cold(client, many)
    shuffled = random.Random(0).sample(many, len(many))
    half = len(shuffled) // 2 - 7
    second = cold(client, shuffled[:half]) + client.generate(shuffled[half:])
    run.check(f"{args.many} requests together against two other batches", sorted(first, key=_number), sorted(second, key=_number))
    long = run.requests(args.long, args.longest, "long")
    run.check(f"responses of {args.longest} tokens, in another batch", cold(client, long),
              [s for s in cold(client, [*run.requests(24, 40, "company"), *long]) if s.request_id.startswith("long")])
    return alone


def stock_options(run: Run) -> dict[str, Any]:
    """What stock vLLM needs to take this checkpoint at all: its kernels of sparse attention want blocks of 64, and weights that lie in no file
    can't be sent to an engine that takes them apart, so that it draws its own."""
    hf = read_hf_config(run.args.hf_checkpoint)
    return ({"block_size": 64} if hf.get("index_topk") else {}) | ({"load_format": "dummy"} if is_counted(run.args.hf_checkpoint) else {})


def contrast(run: Run, name: str, env: dict[str, str], options: dict[str, Any]) -> dict[str, Any]:
    """How far stock vLLM's batch is from its requests alone, or why it does not run these."""
    try:
        with run.engine(name.replace(", ", "-").replace(" ", "-"), (), env, **options) as client:
            together = cold(client, run.requests(run.args.count, 64, "all"))
            return differing([cold(client, [r])[0] for r in run.requests(run.args.count, 64, "one")], together)
    except (EngineError, TrainerFailed) as error:
        return {"refused": f"{type(error).__name__}: {str(error)[:1500]}"}


def _number(sample: Sample) -> int:
    return int(sample.request_id.split(".")[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-checkpoint")
    parser.add_argument("--profile", help="a profile of the gates instead of a folder")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--length", type=int, default=160, help="sampled tokens of each of them")
    parser.add_argument("--many", type=int, default=256)
    parser.add_argument("--many-length", type=int, default=400)
    parser.add_argument("--long", type=int, default=4)
    parser.add_argument("--chunked", type=int, default=256, help="of the first requests, in small chunks without graphs")
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--prompt-tokens", type=int, default=300, help="of the longest prompt")
    parser.add_argument("--kv-gib", type=int, default=8)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--no-stock", action="store_true")
    args = parser.parse_args()
    if bool(args.hf_checkpoint) == bool(args.profile):
        parser.error("--hf-checkpoint or --profile")
    args.logs.mkdir(parents=True, exist_ok=True)
    big: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
    with Run(args) as run:
        with run.engine("graphs", ROUTED, **big) as client:
            alone = aligned(run, client)
        with run.engine("eager", ROUTED, max_num_seqs=16, max_num_batched_tokens=48, cuda_graphs=False) as client:
            few = run.requests(args.count, args.length, "eager")[:args.chunked]
            run.check("chunks of at most 48 tokens, without graphs", alone[:len(few)], client.generate(few))
        whole = run.write()
        print(whole.status, whole.reason, whole.coverage, flush=True)
        for name, env in {} if args.no_stock else {"stock": {}, "stock, batch invariant": STOCK_INVARIANT}.items():
            run.numbers[name] = contrast(run, name, env, big | stock_options(run))
            print(name, run.numbers[name], flush=True)
            run.write()
        run.write(done=True)
    return Status(whole.status).exit_code


if __name__ == "__main__":
    raise SystemExit(main())
