"""A router's choice, and the sum over its slots, on CUDA in Triton: one launch each, where torch's operations take about thirty.

Same equations and same roundings as the composite forms of :mod:`vime.ops.moe`, which a GPU runs as well where gradients of the
choice are wanted: comparisons, and products and sums that are rounded one by one (no fused multiply-add), in slot order.
"""
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vime.ops.cuda.tensors import dense, next_power_of_2

_COLUMNS = 1024


@triton.jit
def _route(score_ptr, bias_ptr, id_ptr, weight_ptr, nan_ptr, scaling, E: tl.constexpr, K: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
           BIAS: tl.constexpr, NORMALISE: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BE)
    score = tl.load(score_ptr + t * E + e, mask=e < E, other=0.0)
    bits = score.to(tl.int32, bitcast=True)
    choice = score
    if BIAS:
        choice = score + tl.load(bias_ptr + e, mask=e < E, other=0.0)
    tl.store(nan_ptr + t, tl.max(((choice != choice) & (e < E)).to(tl.int32)))
    slot = tl.arange(0, BK)
    ids = tl.zeros([BK], tl.int64)
    weights = tl.zeros([BK], tl.float32)
    total = tl.full([], 0.0, tl.float32)
    left = e < E
    for k in tl.static_range(K):
        best = tl.max(tl.where(left, choice, float("-inf")))
        one = tl.min(tl.where(left & (choice == best), e, BE - 1))  # the lowest id of equals; none if there is a NaN, which is refused
        weight = tl.sum(tl.where(e == one, bits, 0)).to(tl.float32, bitcast=True)
        total = weight if k == 0 else total + weight
        ids = tl.where(slot == k, one.to(tl.int64), ids)
        weights = tl.where(slot == k, weight, weights)
        left = left & (e != one)
    if NORMALISE:
        weights = tl.div_rn(weights, tl.zeros([BK], tl.float32) + (total + 1e-20))
    tl.store(id_ptr + t * K + slot, ids, mask=slot < K)
    tl.store(weight_ptr + t * K + slot, weights * scaling, mask=slot < K)


def route(scores_TE: torch.Tensor, top_k: int, bias_E: torch.Tensor | None, normalise: bool,
          scaling: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`vime.ops.route` without groups and without gradient: ``ids_TK``, ``weights_TK``, and of each token whether what it
    chose by holds NaN (int32; its ids and weights mean nothing then)."""
    (tokens, experts), device = scores_TE.shape, scores_TE.device
    ids_TK = torch.empty(tokens, top_k, dtype=torch.int64, device=device)
    weights_TK = torch.empty(tokens, top_k, dtype=torch.float32, device=device)
    nan_T = torch.empty(tokens, dtype=torch.int32, device=device)
    if tokens:
        scores = dense(scores_TE.detach())
        bias = scores if bias_E is None else dense(bias_E.detach().float())
        _route[(tokens,)](scores, bias, ids_TK, weights_TK, nan_T, float(scaling), E=experts, K=top_k, BE=max(16, next_power_of_2(experts)),
                          BK=max(2, next_power_of_2(top_k)), BIAS=bias_E is not None, NORMALISE=normalise, num_warps=1 if experts <= 128 else 4,
                          enable_fp_fusion=False)
    return ids_TK, weights_TK, nan_T


@triton.jit
def _combine(row_ptr, weight_ptr, y_ptr, H, K: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_ptr + (t * K + k) * H + h, mask=h < H, other=0.0).to(tl.float32)
        term = row * tl.load(weight_ptr + t * K + k)
        total = term if k == 0 else total + term
    tl.store(y_ptr + t * H + h, total.to(y_ptr.dtype.element_ty), mask=h < H)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_TKH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        rows_TKH, weights_TK = dense(rows_TKH), dense(weights_TK)
        tokens, slots, hidden = rows_TKH.shape
        y_TH = torch.empty(tokens, hidden, dtype=rows_TKH.dtype, device=rows_TKH.device)
        if y_TH.numel():
            _combine[(tokens, triton.cdiv(hidden, _COLUMNS))](rows_TKH, weights_TK, y_TH, hidden, K=slots, BLOCK=_COLUMNS, num_warps=4,
                                                              enable_fp_fusion=False)
        ctx.save_for_backward(rows_TKH, weights_TK)
        return y_TH

    @staticmethod
    def backward(ctx: Any, dy_TH: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # type: ignore[override]
        rows_TKH, weights_TK = ctx.saved_tensors
        dy, slots = dy_TH.float(), range(rows_TKH.shape[1])
        drows = torch.stack([(dy * weights_TK[:, k, None]).to(rows_TKH.dtype) for k in slots], 1) if ctx.needs_input_grad[0] else None
        dweights = torch.cat([(dy * rows_TKH[:, k].float()).sum(1, keepdim=True) for k in slots], 1) if ctx.needs_input_grad[1] else None
        return drows, dweights


def combine_slots(rows_TKH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """As :func:`vime.ops.combine_slots`."""
    return _Combine.apply(rows_TKH, weights_TK)
