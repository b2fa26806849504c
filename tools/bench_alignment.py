"""How long the comparison of two dumps takes against just reading them, and in how much memory.

    python tools/bench_alignment.py --gib 1 --dtype bfloat16 --pairs 5

Reading and comparing alternate, each in a fresh process; medians and ratios are printed. There are two baselines: "buffer"
reads both files through one buffer of 1 MiB that is used again and again, which is the least anything could do and leaves
nothing to compare; "memory" reads both into memory of their own (numpy.fromfile), as a program does that holds two dumps to
compare them. Files lie in the page cache.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

READ = """
import os, sys, time
t = time.perf_counter()
buffer = bytearray(1 << 20)
for path in sys.argv[1:]:
    fd = os.open(path, os.O_RDONLY)
    while os.readv(fd, [buffer]):
        pass
    os.close(fd)
print(time.perf_counter() - t, 0, "READ")
"""
MEMORY = """
import sys, time
import numpy as np
t = time.perf_counter()
held = [np.fromfile(path, np.uint8) for path in sys.argv[1:]]
print(time.perf_counter() - t, 0, "READ")
"""
COMPARE = """
import sys, time
from alignment.compare import compare_runs
t = time.perf_counter()
verdict = compare_runs(sys.argv[1], sys.argv[2])
seconds = time.perf_counter() - t
# Of this program alone: the maximum that getrusage tells is inherited from the process that started it.
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(seconds, peak / 1024, verdict.status)
"""


def write(folder: Path, gib: float, dtype: str) -> dict[str, Path]:
    """Three dumps: ``a``, its equal ``b``, and ``c``, which differs in every element."""
    import torch
    from safetensors.torch import save_file

    kind = getattr(torch, dtype)
    count = int(gib * (1 << 30)) // kind.itemsize
    size = max(1, min(count, 16 << 20))
    base = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(kind)
    tensors = {f"layers.{i}.output": base + i for i in range(-(-count // size))}
    save_file(tensors, folder / "a.safetensors")
    save_file(tensors, folder / "b.safetensors")
    save_file({n: t * 1.01 + 0.01 for n, t in tensors.items()}, folder / "c.safetensors")
    return {x: folder / f"{x}.safetensors" for x in "abc"}


def once(code: str, *paths: Path) -> tuple[float, float, str]:
    out = subprocess.run([sys.executable, "-c", code, *map(str, paths)], capture_output=True, text=True, check=True)
    seconds, mib, status = out.stdout.split()
    return float(seconds), float(mib), status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of each dump")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32", "float64"])
    parser.add_argument("--pairs", type=int, default=5, help="how often reading and comparing alternate")
    parser.add_argument("--dir", type=Path, help="where to write the dumps (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        start = time.perf_counter()
        f = write(Path(folder), args.gib, args.dtype)
        print(f"wrote {sum(p.stat().st_size for p in f.values()) / (1 << 30):.2f} GiB in {time.perf_counter() - start:.1f} s", file=sys.stderr)
        once(READ, *f.values())
        rows: dict[str, list[tuple[float, float, str]]] = {"buffer": [], "memory": [], "equal": [], "differing": []}
        for _ in range(args.pairs):
            for kind, other in (("equal", f["b"]), ("differing", f["c"])):
                rows["buffer"].append(once(READ, f["a"], other))
                rows["memory"].append(once(MEMORY, f["a"], other))
                rows[kind].append(once(COMPARE, f["a"], other))
    median = {k: statistics.median(r[0] for r in v) for k, v in rows.items()}
    print(json.dumps({
        "gib": args.gib, "dtype": args.dtype, "pairs": args.pairs, "cores": os.cpu_count(),
        "seconds": {k: round(v, 3) for k, v in median.items()},
        "ratio": {f"{k} to {base}": round(median[k] / median[base], 2) for k in ("equal", "differing") for base in ("buffer", "memory")},
        "verdicts": {k: sorted({r[2] for r in rows[k]}) for k in ("equal", "differing")},
        "peak_mib": round(max(r[1] for k in ("equal", "differing") for r in rows[k])),
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
