"""Where the time of generation goes on one GPU: the kernels of the aligned engine and of the ordinary one, by what they take.

    python ci/decode_cuda.py --profile glm5.2-6layer-128e --kv-gib 2 --requests 1 --tokens 64 --out OUT/decode.json

Each engine runs in a process of its own, one after the other, with weights that it draws itself, and generates once to warm up, once
for its time and once under torch's profiler; graphs are replayed as in service. Microseconds are a sampled token's. This explains a cost that
``ci/cost_cuda.py`` measured; it judges nothing.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMITS = {"max_model_len": 1024, "max_num_seqs": 256, "max_num_batched_tokens": 2048}
SIDES = ("aligned", "stock")


def prompts(args: argparse.Namespace) -> list[list[int]]:
    """Token ids of the prompts: 64 of each."""
    return [[3 + (31 * i + 17 * j) % 200 for j in range(64)] for i in range(args.requests)]


def aligned(args: argparse.Namespace) -> Callable[[], object]:
    """Generate once with the engine as the loop runs it, without its server."""
    from vime.vllm.config import EngineConfig
    from vime.vllm.engine import Engine
    from vime.vllm.protocol import Request

    engine = Engine(EngineConfig(model=args.hf_checkpoint, device=args.device, dtype="bfloat16", load_format="dummy",
                                 kv_cache_bytes=int(args.kv_gib * (1 << 30)), cuda_graphs=not args.enforce_eager, **LIMITS))

    def once() -> object:
        engine.reset_prefix_cache()
        engine.add([Request(request_id=f"r{i}", prompt_token_ids=p, max_tokens=args.tokens, seed=i) for i, p in enumerate(prompts(args))])
        made = []
        while engine.busy:
            made += engine.step()
        assert sum(len(s.token_ids) for s in made) == args.requests * args.tokens
        return made

    return once


def stock(args: argparse.Namespace) -> Callable[[], object]:
    """Generate once with ``vllm.LLM`` as it comes."""
    from vllm import LLM, SamplingParams

    engine = LLM(model=args.hf_checkpoint, dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, generation_config="vllm",
                 kv_cache_memory_bytes=int(args.kv_gib * (1 << 30)), gpu_memory_utilization=0.4, disable_log_stats=True, **LIMITS)
    params = [SamplingParams(max_tokens=args.tokens, seed=i, ignore_eos=True, detokenize=False, logprobs=0) for i in range(args.requests)]

    def once() -> object:
        engine.reset_prefix_cache()
        return engine.generate([{"prompt_token_ids": p} for p in prompts(args)], params, use_tqdm=False)

    return once


def serve(args: argparse.Namespace) -> None:
    """The child: the last line it prints holds what it found."""
    import torch

    if args.serve == "aligned" and args.device == "cuda":
        import vime.ops.cuda  # noqa: F401  before the engine touches the device: cuBLAS reads its workspace setting once

    once = {"aligned": aligned, "stock": stock}[args.serve](args)
    once()
    started = time.perf_counter()
    once()
    seconds = time.perf_counter() - started
    kind = torch.profiler.ProfilerActivity.CUDA if args.device == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profiler:
        once()
    time_of = "self_device_time_total" if args.device == "cuda" else "self_cpu_time_total"
    rows = sorted(((e.key, e.count, float(getattr(e, time_of))) for e in profiler.key_averages()), key=lambda row: -row[2])
    print(json.dumps({"seconds": seconds, "kernels": rows}), flush=True)


def found(side: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one side in a child and return what it printed."""
    env = {k: v for k, v in os.environ.items() if k not in ("VIME_PLUGIN", "TORCHDYNAMO_DISABLE")} | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if side == "aligned":
        from vime.vllm.plugin import ENV, ROUTED, settings

        env |= {ENV: settings(list(ROUTED), args.fp8), "TORCHDYNAMO_DISABLE": "1"}
    flags = [f for name in ("hf_checkpoint", "kv_gib", "requests", "tokens", "device", "fp8") if getattr(args, name) != ""
             for f in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    log = args.logs / f"{side}.log"
    with open(log, "w") as errors:
        child = subprocess.run([sys.executable, __file__, "--serve", side, *flags, *(["--enforce-eager"] if args.enforce_eager else [])],
                               env=env, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
    for line in reversed(child.stdout.splitlines()):
        with contextlib.suppress(ValueError):
            if isinstance(value := json.loads(line), dict):
                return value
    raise SystemExit(f"the {side} engine ended with exit code {child.returncode} and found nothing; see {log}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="glm5.2-6layer-128e", help="a profile of the gates")
    parser.add_argument("--hf-checkpoint", default="", help="a folder instead; its config is all that is read")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64, help="sampled by each request")
    parser.add_argument("--kv-gib", type=float, default=2.0)
    parser.add_argument("--fp8", default="", choices=("", "blockwise"), help="of the aligned engine")
    parser.add_argument("--enforce-eager", action="store_true", help="the aligned engine without CUDA graphs")
    parser.add_argument("--side", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--top", type=int, default=30)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path, default=Path("."))
    parser.add_argument("--serve", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return 0
    if not args.hf_checkpoint:
        from gates.profiles import find

        args.hf_checkpoint = str(find(args.profile).checkpoint())
    args.logs.mkdir(parents=True, exist_ok=True)
    numbers = {}
    for side in args.side:
        numbers[side] = one = found(side, args)
        steps = args.tokens  # requests run together: a step samples one token of each
        total = sum(us for _, _, us in one["kernels"])
        print(f"--- {side}: {1e6 * one['seconds'] / steps:.0f} us a step, of which kernels {total / steps:.0f} us in {sum(c for _, c, _ in one['kernels']) / steps:.0f}")
        for kernel, calls, us in one["kernels"][:args.top]:
            print(f"{us / steps:9.1f} us {calls / steps:7.1f} calls  {kernel[:120]}")
        if args.out is not None:
            args.out.write_text(json.dumps({"requests": args.requests, "tokens": args.tokens, **numbers}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
