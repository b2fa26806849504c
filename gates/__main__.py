"""``python -m gates NAME...``: what ``vime gate`` does, for a machine that has only this package on its path."""
from __future__ import annotations

import argparse
import sys

from gates.markers import DEVICES, GATES, TIERS
from gates.runner import GateUsageError, run


def main() -> int:
    """Exit code: 0 PASS, 1 FAIL, 2 wrong usage, 10 INVALID, 11 NOT_RUN."""
    parser = argparse.ArgumentParser(prog="python -m gates", description="Run gates and say what they found.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(GATES)}; every dense gate by default")
    parser.add_argument("--profile")
    parser.add_argument("--device", choices=DEVICES)
    parser.add_argument("--tier", choices=TIERS)
    parser.add_argument("--report", metavar="DIR")
    parser.add_argument("--cost-max", type=float, metavar="RATIO")
    parser.add_argument("--control", action="store_true", help="plant each gate's own fault: FAIL at its place")
    parser.add_argument("--timeout", type=float, metavar="SECONDS")
    try:
        verdict = run(**vars(parser.parse_args()))
    except GateUsageError as err:
        print(err, file=sys.stderr)
        return 2
    print(verdict.summary())
    return verdict.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
