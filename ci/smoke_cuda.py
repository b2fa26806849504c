"""The whole loop on one GPU: rollout in vLLM, training in Megatron, online update, and every log-probability compared.

    VIME_COMMIT=$(git rev-parse HEAD) python ci/smoke_cuda.py --hf-checkpoint DIR --out ci/evidence/h200-smoke.json

The same input runs with vime on and, for the contrast, one turn with both sides stock. Exit codes are those of the
verdict of the aligned run.
"""
from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from alignment import evidence
from alignment.verdict import Status
from vime.commands.train import describe
from vime.rl import judge
from vime.rl.config import TrainConfig
from vime.rl.loop import Loop, StepResult, load_problems
from vime.rl.session import Session


def train(name: str, config: TrainConfig, layers_at: tuple[int, ...] = ()) -> list[StepResult]:
    """The loop of one configuration, with a line a turn and the seconds of each of its parts."""
    started, steps = time.perf_counter(), []
    with Session(config, Path(config.output_dir)) as session:
        print(f"{name}: both sides are up after {time.perf_counter() - started:.1f} s, contract {session.fingerprint or 'none'}", flush=True)
        for step in Loop(config, session, load_problems(config), record_layers_at=layers_at).run():
            steps.append(step)
            print(f"{name}: {describe(step)} {step.metrics['seconds']}", flush=True)
    return steps


def summary(steps: list[StepResult]) -> dict[str, Any]:
    """What a run found, over all its turns."""
    return {
        "tokens": sum(s.metrics["tokens"] for s in steps), "differing": sum(s.metrics["differing"] for s in steps),
        "train_rollout_logprob_abs_diff_max": max(s.metrics["train_rollout_logprob_abs_diff_max"] for s in steps),
        "updates": sum(s.trained for s in steps), "steps": [{"step": s.step, **s.metrics} for s in steps],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-checkpoint", required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--response", type=int, default=128)
    parser.add_argument("--no-stock", action="store_true")
    args = parser.parse_args()
    config = TrainConfig(
        hf_checkpoint=args.hf_checkpoint, device="cuda", dtype="bfloat16", num_rollout=args.updates, rollout_batch_size=args.prompts,
        n_samples_per_prompt=args.samples, rollout_max_response_len=args.response, reward="gate", lr=1e-5, max_tokens_per_gpu=8192,
        max_num_batched_tokens=512, kv_cache_gib=4.0, update_weight_transport="ipc", output_dir=str(args.logs / "aligned"), timeout_s=300.0,
        vllm_enable_deterministic_inference=False)
    aligned = train("aligned", config, layers_at=(args.updates,))
    verdict = judge.run("train", [v for s in aligned for v in s.verdicts])
    claims = [evidence.claim(v, model=args.model, device="cuda", dtype="bfloat16") for s in aligned for v in s.verdicts]
    numbers: dict[str, Any] = {"aligned": summary(aligned)}
    evidence.write(args.out, evidence.build(claims, kind="train", numbers=numbers))
    print(verdict.status, verdict.reason, verdict.coverage, verdict.first_bad or "", flush=True)
    if not args.no_stock:
        numbers["stock"] = summary(train("stock", config.replace(ops=(), output_dir=str(args.logs / "stock"), num_rollout=1, check_last_update=False)))
        evidence.write(args.out, evidence.build(claims, kind="train", numbers=numbers))
    return Status(verdict.status).exit_code


if __name__ == "__main__":
    raise SystemExit(main())
