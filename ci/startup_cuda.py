"""What the plugin and its proofs add to the start of an engine on one GPU.

    VIME_COMMIT=$(git rev-parse HEAD) python ci/startup_cuda.py --profile dense-7b --out ci/evidence/h200-startup-dense-7b.json --logs DIR

The same engine process, with weights that it draws itself, until it can generate: aligned (contract built, proofs read, every layer
checked) and without the plugin, in fresh processes, in turn. One aligned start before that makes the proofs if they are missing, and is
told apart. The exit code is 1 where the difference of the medians is over the budget.
"""
from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from alignment import evidence
from alignment.verdict import Coverage, Status, Verdict


def start(args: argparse.Namespace, folder: str, aligned: bool, log: str) -> float:
    """Seconds until an engine answers."""
    from vime.rl.config import TrainConfig, engine_env
    from vime.vllm.launch import launch_engine
    from vime.vllm.plugin import ROUTED

    config = TrainConfig(hf_checkpoint=folder, device=args.device, dtype="bfloat16", vllm_enable_deterministic_inference=False)
    began = time.perf_counter()
    with launch_engine(folder, device=args.device, dtype="bfloat16", ops=ROUTED if aligned else (), log_path=args.logs / f"{log}.log",
                       env=engine_env(config), kv_cache_bytes=int(args.kv_gib * (1 << 30)), gpu_memory_utilization=0.4, start_timeout=400,
                       load_format="dummy", max_model_len=1024, cuda_graphs=not args.enforce_eager) as engine:
        seconds = time.perf_counter() - began
        assert engine.client.info()["config"]["device"] == args.device
    print(f"{log}: {seconds:.1f} s", flush=True)
    return seconds


def judge(args: argparse.Namespace, first: float, times: list[tuple[float, float]]) -> Verdict:
    """PASS where the median of the aligned starts is no more than the budget above that of the others."""
    aligned, plain = (statistics.median(side) for side in zip(*times, strict=True))
    added = aligned - plain
    return Verdict(f"what alignment adds to the start of an engine, {args.profile}", Status.FAIL if added > args.budget else Status.PASS,
                   f"{added:.1f} s, {args.budget:g} s asked" if added > args.budget else "", coverage={"pairs": Coverage(len(times), len(times))},
                   info={"added_s": round(added, 2), "aligned_s": round(aligned, 2), "plain_s": round(plain, 2), "first_s": round(first, 2)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="dense-7b")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--budget", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--kv-gib", type=float, default=2.0)
    parser.add_argument("--enforce-eager", action="store_true", help="neither side captures CUDA graphs")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--logs", type=Path, default=Path("."))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from gates.profiles import find

    args.logs.mkdir(parents=True, exist_ok=True)
    folder, began = str(find(args.profile).checkpoint()), time.time()
    first = start(args, folder, True, "first")
    times = [(start(args, folder, True, f"aligned-{i}"), start(args, folder, False, f"plain-{i}")) for i in range(args.pairs)]
    verdict = judge(args, first, times)
    print(verdict.status, verdict.reason, verdict.info, flush=True)
    if args.out is not None:
        claim = evidence.claim(verdict, model=args.profile, device=args.device, dtype="bfloat16", topology="one GPU")
        evidence.write(args.out, evidence.build([claim], kind="bench", numbers={"pairs_s": times, **verdict.info}, seconds=time.time() - began))
    return verdict.status.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
