"""Block-FP8 products on one GPU beside DeepGEMM: the same bits or not, and what they cost.

    VIME_COMMIT=$(git rev-parse HEAD) python ci/fp8_cuda.py --out ci/evidence/h200-fp8.json

Shapes are those of GLM-5.2. For each number of rows: how many elements of what serves the shape (:func:`vime.ops.cuda.blockwise.route`), and
of the Triton kernel, differ from DeepGEMM's ``fp8_gemm_nt`` on the same quantised tensors, how far that is from a float64 sum, and ratios of
medians of alternating pairs timed in CUDA graphs: the product alone; the layer as an engine runs it, with a weight that is kept quantised,
against vLLM's own quantisation of x and DeepGEMM; the same layer against bf16; and what it is where the weight is quantised in the call, as
in the trainer. The verdicts are on bits, on the layer of an engine, and on the product where another kernel serves it. DeepGEMM compiles with
nvcc, some seconds a shape.
"""
from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from alignment import evidence
from alignment.verdict import Coverage, Status, Verdict
from gates.costs import ratio_of, within
from vime import ops
from vime.ops.cuda import blockwise, quantise
from vime.ops.cuda.stock_gemm import graph_of
from vime.ops.fp8 import BLOCK
from vime.ops.providers import deep_gemm

#: (N, K) of linear layers of GLM-5.2: query down, query up, output, gate and up of a dense layer, down of one.
SHAPES = {"q_a": (2048, 6144), "q_b": (16384, 2048), "o_proj": (6144, 16384), "gate_up": (24576, 6144), "down": (6144, 12288)}
ROWS = (1, 8, 64, 128, 256, 1024, 4096)
#: Rows and first row of the batches that are held against a large one.
SMALLER = ((1, 5), (2, 77), (8, 0), (17, 1000), (64, 3), (128, 128), (333, 2000), (1024, 3000))
TRIED = sum(m for m, _ in SMALLER)
PAIRS = 7


def pairs(ours: Any, other: Any) -> dict[str, Any]:
    """Ratio of two callables in alternating pairs, with microseconds of each."""
    a, b = graph_of(ours), graph_of(other)
    a(), b()
    times = [(a(), b()) for _ in range(PAIRS)]
    mine, theirs = zip(*times, strict=True)
    return ratio_of(mine, theirs) | {"ours_us": round(statistics.median(mine), 2), "other_us": round(statistics.median(theirs), 2)}


def float64(x: tuple[torch.Tensor, torch.Tensor], w: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The product of what is quantised, ``[M, N]``, in float64."""
    def whole(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return q.double() * scale.double().repeat_interleave(BLOCK, 1)[:, :q.shape[1]]

    return whole(*x) @ whole(w[0], w[1].repeat_interleave(BLOCK, 0)[:w[0].shape[0]]).t()


def one(n: int, k: int, m: int, weight: torch.Tensor, blocks_N: torch.Tensor) -> dict[str, Any]:
    """Bits and times of one shape with ``m`` rows."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    xq, sx = quantise.quantise_rows(x)
    quantised = quantise.quantise_weights(weight[None], None)
    q_NK, scale_RB = quantised[0][0], quantised[1][:-(-n // BLOCK)]
    every, end = torch.arange(m, device="cuda"), torch.full((1,), m, device="cuda")

    def deep() -> torch.Tensor:
        return deep_gemm.multiply(xq, sx, q_NK, scale_RB, torch.bfloat16)

    def in_triton() -> torch.Tensor:
        return blockwise.multiply((xq, sx), quantised, every, every, end, torch.bfloat16)

    def stock_layer() -> torch.Tensor:
        return deep_gemm.multiply(*per_token_group_quant_fp8(x, BLOCK, column_major_scales=True, tma_aligned_scales=True, use_ue8m0=False),
                                  q_NK, scale_RB, torch.bfloat16)

    def layer() -> torch.Tensor:
        return ops.linear_fp8(x, weight, None, blocks_N)

    def trainer_layer() -> torch.Tensor:
        return ops.linear_fp8(x, weight)

    theirs, served = deep(), blockwise.route(weight)
    ours = deep if served.kernel == "deep_gemm" else in_triton
    found: dict[str, Any] = {"served_by": served.kernel, "why": served.reason, "of": theirs.numel(),
                             "differing": int((layer() != theirs).sum()) + int((trainer_layer() != theirs).sum()),
                             "differing_triton": int((in_triton() != theirs).sum())}
    if m <= 256:
        want = float64((xq, sx), (q_NK, scale_RB))
        found["error"] = float((theirs.double() - want).norm() / want.norm())
    return found | {"product": pairs(ours, deep), "product_triton": pairs(in_triton, deep), "layer": pairs(layer, stock_layer),
                    "layer_against_bf16": pairs(layer, lambda: ops.linear(x, weight)), "layer_of_the_trainer": pairs(trainer_layer, stock_layer)}


def invariant(n: int, k: int, weight: torch.Tensor) -> int:
    """Rows of DeepGEMM's product that differ between a batch of 4096 and smaller ones."""
    quantised = quantise.quantise_weights(weight[None], None)
    x = torch.randn(4096, k, device="cuda", dtype=torch.bfloat16)

    def product(rows: torch.Tensor) -> torch.Tensor:
        return deep_gemm.multiply(*quantise.quantise_rows(rows), quantised[0][0], quantised[1][:-(-n // BLOCK)], torch.bfloat16)

    whole = product(x)
    return sum(int((product(x[first:first + m]) != whole[first:first + m]).any(1).sum()) for m, first in SMALLER)


def said(verdict: Verdict) -> dict[str, Any]:
    return evidence.claim(verdict, model="glm5.2-6layer", device="cuda", dtype="bfloat16", topology="one GPU")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--budget", type=float, default=1.15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began, numbers, claims = time.time(), dict[str, Any](), []
    for name in args.shape:
        n, k = SHAPES[name]
        weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / 64
        ops.keep_quantised(name, weight, blocks := ops.row_blocks([n]).cuda())
        different = invariant(n, k, weight)
        print(f"{name}: rows of DeepGEMM that depend on the batch: {different}", flush=True)
        numbers[f"{name} deepgemm rows that depend on the batch"] = different
        for m in args.rows:
            numbers[f"{name} M={m}"] = found = one(n, k, m, weight, blocks)
            print(f"{name} N={n} K={k} M={m}: {found}", flush=True)
            claims.append(said(within(f"cost of an FP8 layer, {name}, {m} rows", found["layer"], args.budget, "vLLM's quantisation of x and DeepGEMM")))
            if found["served_by"] != "deep_gemm":  # else one kernel on both sides, and nothing to judge
                claims.append(said(within(f"cost of an FP8 product, {name}, {m} rows", found["product"], args.budget, "DeepGEMM")))
        each = [found for key, found in numbers.items() if key.startswith(f"{name} M=")]
        count = sum(found["of"] for found in each)
        for what, wrong in (("the layer", sum(f["differing"] for f in each)), ("the Triton kernel", sum(f["differing_triton"] for f in each))):
            claims.append(said(Verdict(f"{what} has DeepGEMM's bits, {name}", Status.FAIL if wrong else Status.PASS,
                                       f"{wrong} of {count} elements differ" if wrong else "", coverage={"elements": Coverage(count, count)})))
        claims.append(said(Verdict(f"DeepGEMM's rows do not depend on the batch, {name}", Status.FAIL if different else Status.PASS,
                                   f"{different} rows do" if different else "", coverage={"rows": Coverage(TRIED, TRIED)})))
    if args.out is not None:
        evidence.write(args.out, evidence.build(claims, kind="bench", numbers=numbers, seconds=time.time() - began))
    return 0 if all(c["verdict"] == "PASS" for c in claims) else 1


if __name__ == "__main__":
    raise SystemExit(main())
