"""Models with latent and sparse attention and experts on one GPU: trainer against engine, by token and by layer.

    VIME_COMMIT=$(git rev-parse HEAD) python ci/experts_cuda.py --out OUT/experts.json [--profile NAME ...] [--updates N] [--fp8 blockwise]

For each profile: rollout, the same tokens in the trainer, every layer's output, each request alone, then a step and an online
update and the log-probabilities again; each has a verdict. Every number is printed as it comes. A profile that fails does not stop the next one;
its logs are shown and kept beside ``--out``. Exit codes are those of the worst verdict. ``vime gate ep1 --profile NAME --device
cuda`` is the gate itself, with its control.
"""
from __future__ import annotations

import argparse
import shutil
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from alignment import evidence
from alignment.verdict import Coverage, Status, Verdict, worst
from gates.experts import SAMPLES, settings
from gates.harness import Harness
from gates.judging import same_layers, same_logprobs, same_weights
from gates.profiles import find

PROFILES = ("glm5.2-6layer-tiny", "deepseek-v3-tiny", "qwen3-moe-tiny")
LOG_LINES = 60


def gap(left: list[Any], right: list[Any]) -> dict[str, Any]:
    """Differing log-probabilities and the largest difference of two lists of fp32 arrays, in order."""
    a, b = (np.concatenate([np.asarray(x, np.float32) for x in side]) for side in (left, right))
    return {"tokens": len(a), "differing": int((a.view(np.int32) != b.view(np.int32)).sum()), "max": float(np.abs(a - b).max(initial=0.0))}


def differing_elements(engine: Any, trainer: Any) -> dict[str, str]:
    """Layer -> elements that differ, of how many."""
    place = {row: i for i, row in enumerate(engine.rows)}
    both = [(place[row], i) for i, row in enumerate(trainer.rows) if row in place]
    ours, theirs = ([pair[k] for pair in both] for k in (0, 1))
    out = {}
    for name, x in trainer.outputs.items():
        a, b = engine.outputs[name][ours], x[theirs]
        out[name] = f"{int((a != b).sum())} of {a.numel()}" if a.dtype == b.dtype else f"{a.dtype} against {b.dtype}"
    return out


def alone(harness: Harness, together: list[Any]) -> dict[str, Any]:
    """Each request by itself against the same requests together."""
    asked = harness.requests(harness.profile.prompts, SAMPLES, tag="alone-")
    single = [harness.generate([request])[0] for request in asked]
    other_tokens = sum(a.token_ids != b.token_ids for a, b in zip(single, together, strict=True))
    same = [(a, b) for a, b in zip(single, together, strict=True) if a.token_ids == b.token_ids]
    return {"requests": len(single), "with other tokens": other_tokens, **gap([a.logprobs for a, _ in same], [b.logprobs for _, b in same])}


def told(name: str, bad: int, of: int, what: str) -> Verdict:
    """FAIL if any of ``of`` tokens is bad."""
    return Verdict(name, Status.FAIL if bad else Status.PASS, f"{bad} of {of} {what}" if bad else "", coverage={"tokens": Coverage(of, of)})


def happened(name: str, count: int, unit: str) -> Verdict:
    """NOT_RUN if it did not: what comes behind shows nothing then."""
    return Verdict(name, Status.PASS if count else Status.NOT_RUN, "" if count else "this did not happen", coverage={unit: Coverage(count, count)})


def run(harness: Harness, name: str, updates: int, numbers: dict[str, Any]) -> list[Verdict]:
    """The steps of the module's docstring on a harness that is up."""
    verdicts: list[Verdict] = []

    def note(what: str, value: Any) -> None:
        numbers[what] = value
        print(f"{name}: {what}: {value}", flush=True)

    def judged(verdict: Verdict) -> None:
        verdicts.append(verdict)
        print(f"{name}: {verdict.name}: {verdict.status} {verdict.reason} {verdict.first_bad or ''}", flush=True)

    note("eager", harness.session.client.info().get("eager"))
    for step in range(updates + 1):
        started = time.perf_counter()
        samples = harness.generate(harness.requests(harness.profile.prompts, SAMPLES, tag=f"s{step}-"))
        trainer = harness.logprobs(samples)
        note(f"after {step} update(s)", gap([s.logprobs for s in samples], [t["logprobs"] for t in trainer]))
        judged(same_logprobs(samples, trainer, f"log-probabilities after {step} update(s)"))
        if step == 0:
            found = alone(harness, samples)
            note("alone against together", found)
            judged(told("alone against together", found["with other tokens"] + found["differing"], sum(len(s.token_ids) for s in samples),
                        "log-probabilities (or requests, by their tokens) differ"))
            recorded, engine = harness.engine_layers(harness.requests(harness.profile.prompts, tag="layers"))
            layers = harness.trainer_layers(recorded)
            note("differing elements by layer", differing_elements(engine, layers))
            judged(same_layers(engine, layers))
        if step < updates:
            stats = harness.train(samples, SAMPLES)
            note(f"step {step}", {"ratio_off": stats.ratio_off, "grad_norm": stats.grad_norm, "without gradient": len(stats.without_gradient)})
            judged(told(f"training forward of step {step}", stats.ratio_off, stats.tokens, "are not those of the no-grad pass"))
            update = harness.update()
            note(f"update {update.version}: tensors changed", update.changed)
            judged(happened(f"weights changed by update {update.version}", update.changed, "tensors"))
            judged(same_weights(update.trainer, update.engine, f"weights of version {update.version}"))
        note(f"seconds of turn {step}", round(time.perf_counter() - started, 1))
    stats = harness.session.client.stats()
    note("keys seen and dropped", [stats["keys_seen"], stats["keys_dropped"]])
    if stats["keys_seen"]:
        judged(happened("keys dropped by the indexer", stats["keys_dropped"], "keys"))
    note("kernels of the engine", stats["kernels"])
    note("kernels of the trainer", harness.session.pool.counters())
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", nargs="+", default=list(PROFILES))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8_e4m3"))
    parser.add_argument("--fp8", default="", choices=("", "blockwise"))
    parser.add_argument("--graphs", action="store_true", help="decode in CUDA graphs; default: the engine runs eager")
    parser.add_argument("--ranks", type=int, default=1, help="trainer ranks that share the experts, and ranks of the engine; a GPU each")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds that one command may take, a start included")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    claims, numbers, codes = [], {}, []
    for name in args.profile:
        profile, started = find(name), time.perf_counter()
        numbers[name] = found = {"kv_cache_dtype": args.kv_cache_dtype, "fp8": args.fp8, "graphs": args.graphs, "ranks": args.ranks}
        harness = Harness(profile, args.device, "bfloat16",
                          **{**settings(args.ranks, profile.checkpoint(), profile, args.device), "kv_cache_dtype": args.kv_cache_dtype,
                             "fp8": args.fp8, "enforce_eager": not args.graphs, "timeout_s": args.timeout})
        try:
            with harness:
                print(f"{name}: both sides are up after {time.perf_counter() - started:.1f} s", flush=True)
                verdicts = run(harness, name, args.updates, found)
        except Exception as error:
            traceback.print_exc()
            verdicts = [Verdict(name, Status.INVALID, f"{type(error).__name__}: {str(error)[:500]}")]
            for log in sorted(harness.logs.rglob("*.log")):
                print(f"--- end of {log.name}", *log.read_text(errors="replace").splitlines()[-LOG_LINES:], sep="\n", flush=True)
        shutil.copytree(harness.logs, args.out.parent / f"logs-{name}", dirs_exist_ok=True)
        claims += [evidence.claim(v, model=name, device=args.device, dtype="bfloat16") for v in verdicts]
        codes += [v.status for v in verdicts]
        evidence.write(args.out, evidence.build(claims, kind="train", numbers=numbers))
        print(f"{name}: {worst(codes)} after {time.perf_counter() - started:.1f} s", flush=True)
    return Status(worst(codes)).exit_code


if __name__ == "__main__":
    raise SystemExit(main())
