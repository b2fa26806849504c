"""Sweep every operation on this GPU, time it against stock, and write one evidence file.

    VIME_COMMIT=$(git rev-parse HEAD) python ci/prove_cuda.py --out ci/evidence/h200-prove.json

Exit codes are those of the verdict: 0 PASS, 1 FAIL, 10 INVALID, 11 NOT_RUN.
"""
from __future__ import annotations

import argparse
from pathlib import Path

from alignment import evidence
from alignment.verdict import Status, combine
from vime.commands.prove import verdict_of
from vime.ops import prove
from vime.ops.cuda import gemm


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ops", nargs="*")
    args = parser.parse_args()
    report = prove.run("cuda", ops=args.ops, quick=args.quick, progress=lambda line: print(line, flush=True))
    whole = verdict_of(report)
    groups: dict[tuple[str, str], list] = {}
    for case, verdict in zip(report.cases, whole.children, strict=True):
        groups.setdefault((case.op, case.shape.split()[0]), []).append(verdict)
    claims = [evidence.claim(combine(f"prove {op}", verdicts), model=model, device="cuda", dtype="bfloat16", topology="one GPU")
              for (op, model), verdicts in groups.items()]
    numbers = {
        "geomean_ratio": report.geomean_ratio, "op_ratio": report.op_ratio, "gemm_routes": gemm.routes(),
        "cases": [{"op": c.op, "function": c.function, "shape": c.shape, "rows": c.rows_compared, "differing": c.differing_rows,
                   "error": c.error, "timings": [[t.rows, t.ours_us, t.stock_us, t.ratio, t.stock_route] for t in c.timings]}
                  for c in report.cases],
    }
    evidence.write(args.out, evidence.build(claims, kind="prove", seconds=report.seconds, numbers=numbers))
    for function, ratio in report.op_ratio.get("bfloat16", {}).items():
        print(f"{ratio:.3f}x {function}")
    print(whole.status, f"{report.differing_rows} of {report.rows_compared} rows differ, first at {report.first_bad},",
          f"geometric mean {report.geomean_ratio}, {report.seconds:.0f} s")
    return Status(whole.status).exit_code


if __name__ == "__main__":
    raise SystemExit(main())
