"""Evidence of two runs that ``vime repro run`` made on this machine: what they were, and every digest that they share.

    VIME_COMMIT=$(git rev-parse HEAD) python ci/repro_evidence.py OUT --model qwen2.5-0.5b-random --out ci/evidence/h200-repro-qwen.json

Exit codes are those of the verdict.
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from alignment import evidence, runlog
from alignment.verdict import Status, Verdict


def numbers(folder: Path, report: dict[str, Any]) -> dict[str, Any]:
    """The recipe, and of every step the digest of each quantity, from the ledger of the first run."""
    a = runlog.read(folder / "a")
    return {
        "recipe": a.start["recipe"], "fingerprint": a.start["fingerprint"], "ledger_versions": a.start["versions"],
        "seconds": report["seconds"], "ledger_cost": report["ledger_cost"],
        "steps": [{"step": s["step"], "digests": s["digests"], "metrics": {k: v for k, v in s.get("metrics", {}).items() if k != "seconds"}}
                  for _, s in sorted(a.steps.items())],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="--output-dir of vime repro run")
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    report = json.loads((args.folder / "report.json").read_text(encoding="utf-8"))
    verdict = Verdict.from_dict(report)
    start = runlog.read(args.folder / "a").start
    claims = [evidence.claim(verdict, model=args.model, device=start["topology"]["device"], dtype=start["recipe"]["dtype"])]
    document = evidence.build(claims, kind="train", numbers=numbers(args.folder, report), seconds=sum(report["seconds"].values()))
    evidence.write(args.out, document)
    print(verdict.summary())
    return Status(verdict.status).exit_code


if __name__ == "__main__":
    raise SystemExit(main())
