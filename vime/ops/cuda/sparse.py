"""Attention over listed rows (sparse and dense MLA) on CUDA, and the score functions of a router, in Triton.

One program serves one token and a block of heads and walks over the token's own list in tiles from its start, so nothing
depends on how long other lists are or on where rows lie. The backward is deterministic: a share for each (token, entry)
is computed alone, and the shares of a row are added in (token, entry) order, in chunks of tokens that bound the memory
and change no bit, since each chunk goes on from the sums of the one before.
"""
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vime.ops.cuda.tensors import dense, next_power_of_2

IMPLEMENTATION = "cuda/moe/triton-grouped@3"  # of all kernels that only models with experts or latent attention use
#: Bytes of shares that the backward holds at a time.
SHARE_BYTES = 1 << 30
_HEADS, _TILE = 16, 32
_LAUNCH = {"num_warps": 8, "enable_fp_fusion": False}


@triton.jit
def _rows(kv_ptr, index_ptr, at, n, first, width, kv_stride, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Columns ``first .. first + width`` of the rows listed at ``at .. at + TILE`` (zeros past ``n``): [TILE, BLOCK]."""
    j = at + tl.arange(0, TILE)
    row = tl.load(index_ptr + j, mask=j < n, other=0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    return tl.load(kv_ptr + row[:, None] * kv_stride + first + d[None, :], mask=(j < n)[:, None] & (d < width)[None, :], other=0.0)


@triton.jit
def _heads(x_ptr, t, h, H, first, width, stride, BLOCK: tl.constexpr):
    """Columns of a block of heads of token ``t`` of a ``[T, H, stride]`` tensor."""
    d = tl.arange(0, BLOCK)
    return tl.load(x_ptr + (t * H + h)[:, None] * stride + first + d[None, :], mask=(h < H)[:, None] & (d < width)[None, :], other=0.0)


@triton.jit
def _forward(q_ptr, kv_ptr, index_ptr, n_ptr, o_ptr, lse_ptr, scale, H, K, kv_stride, D: tl.constexpr, L: tl.constexpr, BL: tl.constexpr,
             BR: tl.constexpr, BH: tl.constexpr, TILE: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    n = tl.load(n_ptr + t)
    ql = _heads(q_ptr, t, h, H, 0, L, D, BL)
    qr = _heads(q_ptr, t, h, H, L, D - L, D, BR)
    top = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    acc = tl.zeros([BH, BL], tl.float32)
    list_ptr = index_ptr + t * K
    for at in range(0, n, TILE):
        vl = _rows(kv_ptr, list_ptr, at, n, 0, L, kv_stride, BL, TILE)
        vr = _rows(kv_ptr, list_ptr, at, n, L, D - L, kv_stride, BR, TILE)
        s = (tl.dot(ql, tl.trans(vl), input_precision="ieee") + tl.dot(qr, tl.trans(vr), input_precision="ieee")) * scale
        s = tl.where((at + tl.arange(0, TILE) < n)[None, :], s, float("-inf"))
        now = tl.maximum(top, tl.max(s, axis=1))
        alpha = tl.exp(top - now)
        p = tl.exp(s - now[:, None])
        total = total * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None] + tl.dot(p.to(vl.dtype), vl, input_precision="ieee")
        top = now
    some = n > 0
    o = tl.where(some, tl.div_rn(acc, tl.broadcast_to(tl.where(some, total, 1.0)[:, None], [BH, BL])), 0.0)
    d = tl.arange(0, BL)
    tl.store(o_ptr + (t * H + h)[:, None] * L + d[None, :], o.to(o_ptr.dtype.element_ty), mask=(h < H)[:, None] & (d < L)[None, :])
    tl.store(lse_ptr + t * H + h, tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf")), mask=h < H)


@triton.jit
def _weights(ql, qr, gl, delta, lse, vl, vr, at, n, scale, TILE: tl.constexpr):
    """``P`` and ``dS`` of a block of heads and a tile of rows, fp32 [BH, TILE]; zeros past the list."""
    s = (tl.dot(ql, tl.trans(vl), input_precision="ieee") + tl.dot(qr, tl.trans(vr), input_precision="ieee")) * scale
    seen = (at + tl.arange(0, TILE) < n)[None, :]
    p = tl.where(seen, tl.exp(tl.where(seen, s, 0.0) - tl.where(seen, lse[:, None], 0.0)), 0.0)
    dp = tl.dot(gl, tl.trans(vl), input_precision="ieee")
    return p, p * (dp - delta[:, None]) * scale


@triton.jit
def _backward_q(q_ptr, kv_ptr, index_ptr, n_ptr, o_ptr, do_ptr, lse_ptr, dq_ptr, delta_ptr, scale, H, K, D: tl.constexpr,
                L: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr, TILE: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    n = tl.load(n_ptr + t)
    ql = _heads(q_ptr, t, h, H, 0, L, D, BL)
    qr = _heads(q_ptr, t, h, H, L, D - L, D, BR)
    gl = _heads(do_ptr, t, h, H, 0, L, L, BL)
    delta = tl.sum(gl.to(tl.float32) * _heads(o_ptr, t, h, H, 0, L, L, BL).to(tl.float32), axis=1)
    lse = tl.load(lse_ptr + t * H + h, mask=h < H, other=0.0)
    dql = tl.zeros([BH, BL], tl.float32)
    dqr = tl.zeros([BH, BR], tl.float32)
    list_ptr = index_ptr + t * K
    for at in range(0, n, TILE):
        vl = _rows(kv_ptr, list_ptr, at, n, 0, L, D, BL, TILE)
        vr = _rows(kv_ptr, list_ptr, at, n, L, D - L, D, BR, TILE)
        _, ds = _weights(ql, qr, gl, delta, lse, vl, vr, at, n, scale, TILE)
        dql += tl.dot(ds.to(vl.dtype), vl, input_precision="ieee")
        dqr += tl.dot(ds.to(vr.dtype), vr, input_precision="ieee")
    dl, dr = tl.arange(0, BL), tl.arange(0, BR)
    to = dq_ptr + (t * H + h)[:, None] * D
    tl.store(to + dl[None, :], dql.to(dq_ptr.dtype.element_ty), mask=(h < H)[:, None] & (dl < L)[None, :])
    tl.store(to + L + dr[None, :], dqr.to(dq_ptr.dtype.element_ty), mask=(h < H)[:, None] & (dr < D - L)[None, :])
    tl.store(delta_ptr + t * H + h, delta, mask=h < H)


@triton.jit
def _backward_rows(q_ptr, kv_ptr, index_ptr, n_ptr, do_ptr, lse_ptr, delta_ptr, share_ptr, first, scale, H, K, D: tl.constexpr,
                   L: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr, TILE: tl.constexpr):
    """The share of each entry of token ``first + program`` in the gradient of its row, heads in rising order."""
    t = first + tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE
    n = tl.load(n_ptr + t)
    list_ptr = index_ptr + t * K
    vl = _rows(kv_ptr, list_ptr, at, n, 0, L, D, BL, TILE)
    vr = _rows(kv_ptr, list_ptr, at, n, L, D - L, D, BR, TILE)
    dvl = tl.zeros([TILE, BL], tl.float32)
    dvr = tl.zeros([TILE, BR], tl.float32)
    for start in range(0, H, BH):
        h = start + tl.arange(0, BH)
        ql = _heads(q_ptr, t, h, H, 0, L, D, BL)
        qr = _heads(q_ptr, t, h, H, L, D - L, D, BR)
        gl = _heads(do_ptr, t, h, H, 0, L, L, BL)
        delta = tl.load(delta_ptr + t * H + h, mask=h < H, other=0.0)
        lse = tl.load(lse_ptr + t * H + h, mask=h < H, other=0.0)
        p, ds = _weights(ql, qr, gl, delta, lse, vl, vr, at, n, scale, TILE)
        dvl += tl.dot(tl.trans(ds.to(ql.dtype)), ql, input_precision="ieee") + tl.dot(tl.trans(p.to(gl.dtype)), gl, input_precision="ieee")
        dvr += tl.dot(tl.trans(ds.to(qr.dtype)), qr, input_precision="ieee")
    j = at + tl.arange(0, TILE)
    dl, dr = tl.arange(0, BL), tl.arange(0, BR)
    to = share_ptr + (tl.program_id(0).to(tl.int64) * K + j)[:, None] * D
    tl.store(to + dl[None, :], dvl, mask=(j < n)[:, None] & (dl < L)[None, :])
    tl.store(to + L + dr[None, :], dvr, mask=(j < n)[:, None] & (dr < D - L)[None, :])


@triton.jit
def _add_shares(share_ptr, entry_ptr, start_ptr, row_ptr, out_ptr, D: tl.constexpr, BD: tl.constexpr):
    """``out[row]`` and then its shares, one after the other in the order of the entries."""
    segment = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    row = tl.load(row_ptr + segment)
    total = tl.load(out_ptr + row * D + d, mask=d < D, other=0.0)
    for i in range(tl.load(start_ptr + segment), tl.load(start_ptr + segment + 1)):
        total += tl.load(share_ptr + tl.load(entry_ptr + i) * D + d, mask=d < D, other=0.0)
    tl.store(out_ptr + row * D + d, total, mask=d < D)


def _shape(q_THD: torch.Tensor, value_dim: int) -> dict[str, int]:
    D = q_THD.shape[2]
    return {"D": D, "L": value_dim, "BL": max(16, next_power_of_2(value_dim)), "BR": max(16, next_power_of_2(D - value_dim)),
            "BH": _HEADS, "TILE": _TILE}


def lengths(index_TK: torch.Tensor, rows: int) -> torch.Tensor:
    """Entries of each list, int32 ``[T]``. One beyond ``rows`` is a device-side assertion: it would be read from somebody else's
    memory."""
    if index_TK.numel():
        torch._assert_async((index_TK < rows).all(), "sparse_attention: an index lies beyond the rows")
    # a list ends at its first -1
    return (index_TK >= 0).to(torch.int32).cumprod(1).sum(1).to(torch.int32)


def rows_of_lists(q_THD: torch.Tensor, kv_SD: torch.Tensor, index_TK: torch.Tensor, n_T: torch.Tensor, value_dim: int,
                  scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`sparse_attention` gives, and the log of each sum, fp32 ``[T, H]``. No gradient.

    ``q`` and ``index`` (int32) are dense; ``kv`` has inner stride 1 and any outer one, so the cells of a cache will do: their first
    ``D`` elements are read. ``n_T`` are the :func:`lengths`.
    """
    T, H, _ = q_THD.shape
    o_THL = torch.empty(T, H, value_dim, dtype=q_THD.dtype, device=q_THD.device)
    lse_TH = torch.empty(T, H, dtype=torch.float32, device=q_THD.device)
    if T:
        _forward[(T, triton.cdiv(H, _HEADS))](q_THD, kv_SD, index_TK, n_T, o_THL, lse_TH, scale, H, index_TK.shape[1], kv_SD.stride(0),
                                              **_shape(q_THD, value_dim), **_LAUNCH)
    return o_THL, lse_TH


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_THD: torch.Tensor, kv_SD: torch.Tensor, index_TK: torch.Tensor, value_dim: int, scale: float) -> torch.Tensor:
        q_THD, kv_SD, index_TK = dense(q_THD), dense(kv_SD), dense(index_TK.to(torch.int32))
        n_T = lengths(index_TK, kv_SD.shape[0])
        o_THL, lse_TH = rows_of_lists(q_THD, kv_SD, index_TK, n_T, value_dim, scale)
        ctx.save_for_backward(q_THD, kv_SD, index_TK, n_T, o_THL, lse_TH)
        ctx.scale = scale
        return o_THL

    @staticmethod
    def backward(ctx: Any, do_THL: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q_THD, kv_SD, index_TK, n_T, o_THL, lse_TH = ctx.saved_tensors
        (T, H, D), K = q_THD.shape, index_TK.shape[1]
        shape, do_THL = _shape(q_THD, o_THL.shape[2]), dense(do_THL)
        dq_THD, delta_TH = torch.empty_like(q_THD), torch.empty_like(lse_TH)
        dkv_SD = torch.zeros(kv_SD.shape, dtype=torch.float32, device=kv_SD.device)
        if not T or not K:
            return dq_THD.zero_(), dkv_SD.to(kv_SD.dtype), None, None, None
        _backward_q[(T, triton.cdiv(H, _HEADS))](q_THD, kv_SD, index_TK, n_T, o_THL, do_THL, lse_TH, dq_THD, delta_TH, ctx.scale, H, K,
                                                 **shape, **_LAUNCH)
        tokens = max(1, SHARE_BYTES // (K * D * 4))
        shares = torch.empty(min(tokens, T) * K, D, dtype=torch.float32, device=q_THD.device)
        for first in range(0, T, tokens):
            count = min(tokens, T - first)
            _backward_rows[(count, triton.cdiv(K, _TILE))](q_THD, kv_SD, index_TK, n_T, do_THL, lse_TH, delta_TH, shares, first, ctx.scale,
                                                           H, K, **shape, **_LAUNCH)
            listed = torch.arange(K, device=n_T.device)[None] < n_T[first:first + count, None]
            entries = listed.reshape(-1).nonzero()[:, 0]
            rows, order = torch.sort(index_TK[first:first + count].reshape(-1)[entries], stable=True)
            present, counts = torch.unique_consecutive(rows, return_counts=True)
            starts = torch.zeros(len(counts) + 1, dtype=torch.int64, device=rows.device)
            torch.cumsum(counts, 0, out=starts[1:])
            if len(present):
                _add_shares[(len(present), triton.cdiv(D, 128))](shares, entries[order], starts, present.to(torch.int64), dkv_SD, D=D, BD=128)
        return dq_THD, dkv_SD.to(kv_SD.dtype), None, None, None


def sparse_attention(q_THD: torch.Tensor, kv_SD: torch.Tensor, index_TK: torch.Tensor, value_dim: int, scale: float) -> torch.Tensor:
    """As :func:`vime.ops.sparse_attention`; an index beyond the rows is a device-side assertion."""
    return _SparseAttention.apply(q_THD, kv_SD, index_TK, value_dim, scale)


@triton.jit
def _map(x_ptr, y_ptr, n, SIGMOID: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    if SIGMOID:
        y = tl.div_rn(tl.full([BLOCK], 1.0, tl.float32), 1.0 + tl.exp(-x))
    else:
        y = tl.exp(x)
    tl.store(y_ptr + i, y, mask=i < n)


class _Map(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sigmoid: bool) -> torch.Tensor:
        x = dense(x)
        y = torch.empty_like(x)
        if x.numel():
            _map[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), SIGMOID=sigmoid, BLOCK=1024, enable_fp_fusion=False)
        ctx.save_for_backward(y)
        ctx.sigmoid = sigmoid
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return dy * (y * (1 - y) if ctx.sigmoid else y), None


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """``1 / (1 + exp(-x))``, fp32, elementwise."""
    return _Map.apply(x, True)


def exp(x: torch.Tensor) -> torch.Tensor:
    """fp32, elementwise."""
    return _Map.apply(x, False)
