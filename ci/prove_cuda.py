"""Sweep every operation on this GPU, time it against stock, and write one evidence file.

    python ci/prove_cuda.py --out ci/evidence/h200-ops.json --commit "$(git rev-parse HEAD)"

Exit codes are those of the verdict: 0 PASS, 1 FAIL, 10 INVALID, 11 NOT_RUN.
"""
from __future__ import annotations

import argparse
import importlib.metadata
import json
from pathlib import Path

import torch

from alignment.verdict import Status
from vime.ops import prove
from vime.ops.cuda import gemm


def machine() -> dict[str, object]:
    """Chip, driver and library versions: what a proof is a property of."""
    versions = {}
    for name in ("torch", "triton", "vllm", "megatron-core", "transformer-engine", "nvidia-cublas", "transformers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    properties = torch.cuda.get_device_properties(0)
    driver = Path("/proc/driver/nvidia/version")
    return {
        "gpu": properties.name, "capability": f"{properties.major}.{properties.minor}", "multiprocessors": properties.multi_processor_count,
        "driver": driver.read_text().splitlines()[0] if driver.exists() else None, "cuda": torch.version.cuda, "versions": versions,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ops", nargs="*")
    args = parser.parse_args()
    report = prove.run("cuda", ops=args.ops, quick=args.quick, progress=lambda line: print(line, flush=True))
    status = Status.FAIL if report.differing_rows else Status.PASS if report.rows_compared == report.rows_expected > 0 else Status.INVALID
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({
        "what": "row invariance, error and cost of vime.ops on CUDA", "verdict": str(status), "commit": args.commit,
        "machine": machine(), "routes": gemm.routes(), **report.to_dict(),
    }, indent=1))
    for function, ratio in report.op_ratio.get("bfloat16", {}).items():
        print(f"{ratio:.3f}x {function}")
    print(status, f"{report.differing_rows} of {report.rows_compared} rows differ, first at {report.first_bad},",
          f"geometric mean {report.geomean_ratio}, {report.seconds:.0f} s")
    return status.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
