"""The choice of keys on CUDA, in Triton: one program for a token, in one launch and without a sort.

The ``k``-th best score is found bit by bit, as a number whose order is that of the scores; everything above it is taken, and of
its equals the first ones. So the chosen positions come out in rising order by themselves. Integers only: there is nothing to round.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from vime.ops.cuda.tensors import dense, next_power_of_2


@triton.jit(do_not_specialize=["S", "K"])
def _select(score_ptr, count_ptr, out_ptr, S, K, BS: tl.constexpr, BK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BS)
    n = tl.minimum(tl.load(count_ptr + t), S)
    seen = s < n
    x = tl.load(score_ptr + t * S + s, mask=seen, other=0.0) + 0.0  # -0 is +0
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648  # rises with the score, from 0 below 2**32
    wanted = tl.minimum(tl.maximum(n, 0), K)
    least = tl.full([], 0, tl.int64)
    for i in range(32):
        candidate = least + (tl.full([], 1, tl.int64) << (31 - i))
        least = tl.where(tl.sum((seen & (key >= candidate)).to(tl.int32)) >= wanted, candidate, least)
    above = seen & (key > least)
    equal = (seen & (key == least)).to(tl.int32)
    room = wanted - tl.sum(above.to(tl.int32))
    chosen = above | ((equal > 0) & (tl.cumsum(equal, 0) <= room))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(out_ptr + t * K + place, s, mask=chosen)
    k = tl.arange(0, BK)
    tl.store(out_ptr + t * K + k, tl.full([BK], -1, tl.int32), mask=(k >= wanted) & (k < K))


def select(scores_TS: torch.Tensor, counts_T: torch.Tensor, top_k: int) -> torch.Tensor:
    """As :func:`vime.ops.select`, of scores that are numbers, in at most :data:`vime.ops.paged.MOST` columns, which one program holds; a count below 0 is 0."""
    tokens, width = scores_TS.shape
    k = min(top_k, width)
    out_TK = torch.empty(tokens, k, dtype=torch.int32, device=scores_TS.device)
    if out_TK.numel():
        block = max(16, next_power_of_2(width))
        _select[(tokens,)](dense(scores_TS), counts_T.to(torch.int64), out_TK, width, k, BS=block, BK=max(16, next_power_of_2(k)),
                           num_warps=4 if block <= 2048 else 8 if block <= 8192 else 16)
    return out_TK
