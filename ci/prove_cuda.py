"""Sweep every operation on this GPU, time it against stock, and write one evidence file.

    python ci/prove_cuda.py --out ci/evidence/h200-ops.json --commit "$(git rev-parse HEAD)"

Exits 1 when a row differs, 10 when a sweep could not run.
"""
from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import time
import traceback
from pathlib import Path

import torch

from vime.ops.cuda import bench, gemm, proof, proof_attention
from vime.ops.cuda.shapes import MODELS


def machine() -> dict[str, object]:
    """Chip, driver and library versions: what a proof is a property of."""
    versions = {}
    for name in ("torch", "triton", "vllm", "megatron-core", "nvidia-cublas", "transformers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name, "capability": f"{properties.major}.{properties.minor}", "sms": properties.multi_processor_count,
        "driver": Path("/proc/driver/nvidia/version").read_text().split("\n")[0] if Path("/proc/driver/nvidia/version").exists() else None,
        "cuda": torch.version.cuda, "versions": versions,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--no-cost", action="store_true")
    args = parser.parse_args()
    findings: list[proof.Finding] = []
    costs: list[bench.Cost] = []
    failures: list[str] = []
    sweeps = [proof.elementwise, proof.vocabulary, proof_attention.attention, proof_attention.attention_backward, proof.linears]
    timings = [] if args.no_cost else [bench.elementwise, bench.vocabulary, bench.attention, bench.linears]
    for kind, into in ((sweeps, findings), (timings, costs)):
        for run in kind:
            for model in args.models:
                started = time.perf_counter()
                torch.manual_seed(0)
                try:
                    with torch.set_grad_enabled(run is proof_attention.attention_backward):
                        into.extend(run(MODELS[model]))
                except Exception:
                    failures.append(f"{run.__module__}.{run.__name__} {model}: {traceback.format_exc()}")
                torch.cuda.empty_cache()
                print(f"{run.__module__}.{run.__name__} {model}: {time.perf_counter() - started:.1f} s", flush=True)
    by_op: dict[str, list[float]] = {}
    for cost in costs:
        by_op.setdefault(cost.op, []).append(cost.ratio)
    geomean = {op: math.exp(sum(map(math.log, ratios)) / len(ratios)) for op, ratios in by_op.items()}
    differing = sum(f.differing for f in findings)
    verdict = "INVALID" if failures else "FAIL" if differing else "PASS"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({
        "what": "row invariance, error and cost of vime.ops on CUDA", "verdict": verdict, "commit": args.commit,
        "machine": machine(), "rows_compared": sum(f.rows for f in findings), "rows_differing": differing,
        "geomean_ratio": geomean, "routes": gemm.routes(), "failures": failures,
        "findings": [dataclasses.asdict(f) for f in findings], "costs": [dataclasses.asdict(c) for c in costs],
    }, indent=1))
    for cost in costs:
        print(f"{cost.ratio:5.2f}x {cost.ours_us:9.1f} us {cost.stock_us:9.1f} us  {cost.op} {cost.case} [{cost.stock}]")
    for f in findings:
        flag = "ok " if not f.differing else "BAD"
        error = "" if f.error is None else f"err {f.error:.1e}"
        print(f"{flag} {f.op:10} {f.case:60} {f.differing}/{f.rows} {error} {f.first_bad or ''} {f.note}")
    for failure in failures:
        print("COULD NOT RUN", failure[-1500:])
    print(verdict, {op: round(r, 3) for op, r in geomean.items()}, sum(f.rows for f in findings), "rows,", differing, "differ")
    return 10 if failures else 1 if differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
