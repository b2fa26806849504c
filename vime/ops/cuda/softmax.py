"""Log-softmax and the log-probability of selected tokens on CUDA, over vocabularies of any size.

    lp[v] = (x[v] - max x) - log(sum_v exp(x[v] - max x)),    x = float32(logits) / temperature

The vocabulary is cut into chunks of 4096 columns, one program each, so that a single row fills the chip as well as a
batch does. A chunk leaves its maximum and its sum; one kernel combines the chunks. Inlined into its readers the same
lines gave other bits (another layout adds in another order), so it stands alone, and the selected log-probability is
bit for bit the entry of the full row.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from vime.ops.cuda.tensors import dense, next_power_of_2

IMPLEMENTATION = "cuda/logprob/triton-chunk4096@1"
CHUNK = 4096
_LAUNCH = {"num_warps": 8, "enable_fp_fusion": False}


@triton.jit
def _chunks(x_ptr, temperature_ptr, part_ptr, V: tl.constexpr, S: tl.constexpr, CHUNK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1)
    cols = s * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + t * V + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
    x = tl.div_rn(x, tl.load(temperature_ptr + t))
    top = tl.max(x, axis=0)
    shifted = x - tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(shifted)
    tl.store(part_ptr + (t * 3 + 0) * S + s, top)
    tl.store(part_ptr + (t * 3 + 1) * S + s, tl.sum(weight, axis=0))
    tl.store(part_ptr + (t * 3 + 2) * S + s, tl.sum(tl.where(shifted == float("-inf"), 0.0, weight * shifted), axis=0))


@triton.jit
def _combine(part_ptr, row_ptr, S: tl.constexpr, BS: tl.constexpr):
    """Per row: maximum, log of the sum, entropy. The only place where chunks are added up."""
    t = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BS)
    top_s = tl.load(part_ptr + (t * 3 + 0) * S + s, mask=s < S, other=float("-inf"))
    sum_s = tl.load(part_ptr + (t * 3 + 1) * S + s, mask=s < S, other=0.0)
    dot_s = tl.load(part_ptr + (t * 3 + 2) * S + s, mask=s < S, other=0.0)
    top = tl.max(top_s, axis=0)
    gap_s = tl.where(top_s == float("-inf"), 0.0, top_s - top)
    scale_s = tl.where(top_s == float("-inf"), 0.0, tl.exp(gap_s))
    total = tl.sum(sum_s * scale_s, axis=0)
    dot = tl.sum((dot_s + sum_s * gap_s) * scale_s, axis=0)
    logsum = tl.log(total)
    tl.store(row_ptr + 3 * t, top)
    tl.store(row_ptr + 3 * t + 1, logsum)
    tl.store(row_ptr + 3 * t + 2, logsum - tl.div_rn(dot, total))


@triton.jit
def _select(x_ptr, ids_ptr, temperature_ptr, row_ptr, lp_ptr, V: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + t * V + tl.load(ids_ptr + t)).to(tl.float32)
    x = tl.div_rn(x, tl.load(temperature_ptr + t))
    tl.store(lp_ptr + t, (x - tl.load(row_ptr + 3 * t)) - tl.load(row_ptr + 3 * t + 1))


@triton.jit
def _full(x_ptr, temperature_ptr, row_ptr, lp_ptr, V: tl.constexpr, CHUNK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = cols < V
    x = tl.load(x_ptr + t * V + cols, mask=mask, other=0.0).to(tl.float32)
    x = tl.div_rn(x, tl.load(temperature_ptr + t))
    tl.store(lp_ptr + t * V + cols, (x - tl.load(row_ptr + 3 * t)) - tl.load(row_ptr + 3 * t + 1), mask=mask)


@triton.jit
def _select_backward(
    dlp_ptr, x_ptr, ids_ptr, temperature_ptr, row_ptr, dx_ptr, V: tl.constexpr, CHUNK: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = cols < V
    temperature = tl.load(temperature_ptr + t)
    x = tl.load(x_ptr + t * V + cols, mask=mask, other=0.0).to(tl.float32)
    lp = (tl.div_rn(x, temperature) - tl.load(row_ptr + 3 * t)) - tl.load(row_ptr + 3 * t + 1)
    hit = tl.where(cols == tl.load(ids_ptr + t), 1.0, 0.0)
    dx = tl.div_rn((hit - tl.exp(lp)) * tl.load(dlp_ptr + t), temperature)
    tl.store(dx_ptr + t * V + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def _statistics(logits_TV: torch.Tensor, temperature_T: torch.Tensor) -> torch.Tensor:
    """Maximum, log of the sum, entropy of every row: fp32 [T, 3]."""
    T, V = logits_TV.shape
    S = triton.cdiv(V, CHUNK)
    part_T3S = torch.empty(T, 3, S, dtype=torch.float32, device=logits_TV.device)
    row_T3 = torch.empty(T, 3, dtype=torch.float32, device=logits_TV.device)
    _chunks[(T, S)](logits_TV, temperature_T, part_T3S, V=V, S=S, CHUNK=CHUNK, **_LAUNCH)
    _combine[(T,)](part_T3S, row_T3, S=S, BS=next_power_of_2(S), num_warps=1, enable_fp_fusion=False)
    return row_T3


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TV, ids_T, temperature_T):
        T, V = logits_TV.shape
        lp_T = torch.empty(T, dtype=torch.float32, device=logits_TV.device)
        row_T3 = torch.empty(0, 3, dtype=torch.float32, device=logits_TV.device)
        if T:
            row_T3 = _statistics(logits_TV, temperature_T)
            _select[(T,)](logits_TV, ids_T, temperature_T, row_T3, lp_T, V=V, num_warps=1, enable_fp_fusion=False)
        entropy_T = row_T3[:, 2]
        ctx.save_for_backward(logits_TV, ids_T, temperature_T, row_T3)
        ctx.mark_non_differentiable(entropy_T)
        return lp_T, entropy_T

    @staticmethod
    def backward(ctx, dlp_T, _):
        logits_TV, ids_T, temperature_T, row_T3 = ctx.saved_tensors
        T, V = logits_TV.shape
        dx_TV = torch.empty_like(logits_TV)
        if T:
            _select_backward[(T, triton.cdiv(V, CHUNK))](
                dense(dlp_T.float()), logits_TV, ids_T, temperature_T, row_T3, dx_TV, V=V, CHUNK=CHUNK, **_LAUNCH
            )
        return dx_TV, None, None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TV, temperature_T):
        T, V = logits_TV.shape
        lp_TV = torch.empty(T, V, dtype=torch.float32, device=logits_TV.device)
        if T:
            row_T3 = _statistics(logits_TV, temperature_T)
            _full[(T, triton.cdiv(V, CHUNK))](logits_TV, temperature_T, row_T3, lp_TV, V=V, CHUNK=CHUNK, **_LAUNCH)
        ctx.save_for_backward(lp_TV, temperature_T)
        ctx.dtype = logits_TV.dtype
        return lp_TV

    @staticmethod
    def backward(ctx, dlp_TV):
        lp_TV, temperature_T = ctx.saved_tensors
        dx_TV = (dlp_TV - lp_TV.exp() * dlp_TV.sum(-1, keepdim=True)) / temperature_T[:, None]
        return dx_TV.to(ctx.dtype), None


def token_logprob(
    logits_TV: torch.Tensor, ids_T: torch.Tensor, temperature_T: torch.Tensor, return_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(log-probability of ``ids``, entropy or None), fp32 [T]. logits: fp32 or bf16 [T, V]; temperature: fp32 [T]."""
    lp_T, entropy_T = _TokenLogprob.apply(dense(logits_TV), dense(ids_T.to(torch.int64)), dense(temperature_T))
    return lp_T, entropy_T if return_entropy else None


def log_softmax(logits_TV: torch.Tensor, temperature_T: torch.Tensor) -> torch.Tensor:
    """fp32 [T, V]; the rows that :func:`token_logprob` selects from."""
    return _LogSoftmax.apply(dense(logits_TV), dense(temperature_T))
