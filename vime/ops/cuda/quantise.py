"""Block-FP8 values on CUDA: rows of activations, and weights, which an engine may keep quantised.

The values are those of :func:`vime.ops.quantise_blocks` and :func:`vime.ops.quantise_weight_blocks`, bit for bit. A weight that nobody
keeps is quantised on every call, from the bits that are there: whether a copy is still right could only be told by reading the
weight. An engine knows when its weights change, so it keeps them (:func:`keep`) and renews them after each update in the same memory
(:func:`refresh`), where captured CUDA graphs read it; :func:`stale` reads everything back.
"""
from __future__ import annotations

import dataclasses
import weakref

import torch
import triton
import triton.language as tl

from vime.ops.cuda.tensors import dense
from vime.ops.fp8 import BLOCK, FP8_MAX, scale_of

#: ``q_ENK``, the scale of every block ``[E * N, KB]`` (those that are used), and the block of each row of an expert.
Quantised = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_ROWS = 32  # of a weight, in a program that quantises
_X_ROWS = 8  # of x


@triton.jit
def _peaks(w_ptr, block_ptr, most_ptr, R, N: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr):
    """The largest magnitude of each block: a maximum of non-negative numbers, in whatever order."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * C + tl.arange(0, C)
    w = tl.load(w_ptr + r[:, None] * K + k[None, :], mask=(r < R)[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
    block = tl.load(block_ptr + r % N, mask=r < R, other=0) + (r // N) * N
    tl.atomic_max(most_ptr + block * KB + tl.program_id(1), tl.max(tl.abs(w), axis=1), mask=r < R)


@triton.jit
def _quantise(w_ptr, block_ptr, scale_ptr, q_ptr, R, LARGEST: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KB: tl.constexpr,
              C: tl.constexpr, ROWS: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * C + tl.arange(0, C)
    mask = (r < R)[:, None] & (k < K)[None, :]
    w = tl.load(w_ptr + r[:, None] * K + k[None, :], mask=mask, other=0.0).to(tl.float32)
    block = tl.load(block_ptr + r % N, mask=r < R, other=0) + (r // N) * N
    scale = tl.load(scale_ptr + block * KB + tl.program_id(1), mask=r < R, other=1.0)
    q = tl.math.div_rn(w, tl.broadcast_to(scale[:, None], w.shape))
    # a NaN stays one, as on a CPU; by default a maximum would make -LARGEST of it, on both sides alike
    q = tl.maximum(q, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    q = tl.minimum(q, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(q_ptr + r[:, None] * K + k[None, :], q.to(q_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R", "row_stride", "block_stride"])
def _quantise_rows(x_ptr, q_ptr, scale_ptr, R, row_stride, block_stride, LARGEST: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
                   ROWS: tl.constexpr):
    """A block of 128 of some rows, as :func:`vime.ops.quantise_blocks`."""
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    k = tl.program_id(1) * C + tl.arange(0, C)
    mask = (r < R)[:, None] & (k < K)[None, :]
    x = tl.load(x_ptr + r[:, None] * K + k[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.math.div_rn(tl.max(tl.abs(x), axis=1), tl.zeros([ROWS], tl.float32) + LARGEST)
    nan = tl.max((x != x).to(tl.int32), axis=1) > 0
    scale = tl.where((scale > 0) & (nan == 0), scale, 1.0)
    q = tl.math.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    q = tl.maximum(q, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    q = tl.minimum(q, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(scale_ptr + r * row_stride + tl.program_id(1) * block_stride, scale, mask=r < R)
    tl.store(q_ptr + r[:, None] * K + k[None, :], q.to(q_ptr.dtype.element_ty), mask=mask)


def quantise_rows(x_TK: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`vime.ops.quantise_blocks` in one launch; the scales ``[T, KB]`` lie block by block, as DeepGEMM reads them."""
    (tokens, width), blocks = x_TK.shape, -(-x_TK.shape[1] // BLOCK)
    q_TK = torch.empty(x_TK.shape, dtype=dtype, device=x_TK.device)
    scale_TB = torch.empty(blocks, -(-tokens // 4) * 4, dtype=torch.float32, device=x_TK.device).t()[:tokens]
    _quantise_rows[(triton.cdiv(tokens, _X_ROWS), blocks)](dense(x_TK), q_TK, scale_TB, tokens, *scale_TB.stride(), LARGEST=FP8_MAX, K=width,
                                                           C=BLOCK, ROWS=_X_ROWS, enable_fp_fusion=False)
    return q_TK, scale_TB


def quantise_weights(weight_ENK: torch.Tensor, block_N: torch.Tensor | None, dtype: torch.dtype = torch.float8_e4m3fn,
                     into: tuple[torch.Tensor, torch.Tensor] | None = None) -> Quantised:
    """Quantise the weights of all experts, with ``into`` in the memory of an earlier ``q_ENK`` and its scales."""
    experts, rows, width = weight_ENK.shape
    blocks = -(-width // BLOCK)
    if block_N is None:
        block_N = torch.arange(rows, device=weight_ENK.device) // BLOCK
    most = torch.zeros(experts * rows, blocks, dtype=torch.float32, device=weight_ENK.device)  # the default is the model's while it is loaded
    q_ENK = torch.empty(weight_ENK.shape, dtype=dtype, device=weight_ENK.device) if into is None else into[0]
    grid = (triton.cdiv(experts * rows, _ROWS), blocks)
    shape = {"N": rows, "K": width, "KB": blocks, "C": BLOCK, "ROWS": _ROWS}
    _peaks[grid](weight_ENK, block_N, most, experts * rows, **shape)
    scale = scale_of(most) if into is None else into[1].copy_(scale_of(most))
    _quantise[grid](weight_ENK, block_N, scale, q_ENK, experts * rows, LARGEST=FP8_MAX, **shape, enable_fp_fusion=False)
    return q_ENK, scale, block_N


@dataclasses.dataclass(frozen=True)
class Kept:
    """A weight's quantised form. ``weight`` is the parameter, held weakly: where it is gone, its memory may be another's."""

    name: str
    weight: weakref.ref[torch.Tensor]
    block_N: torch.Tensor
    values: Quantised

    def now(self, into: tuple[torch.Tensor, torch.Tensor] | None = None) -> Quantised | None:
        """The weight as it is now, quantised; None where it is gone."""
        weight = self.weight()
        return None if weight is None else quantise_weights(_experts(weight), self.block_N, into=into)


#: By address, shape and dtype of the weight: what reaches a kernel is a view of the parameter.
_kept: dict[tuple[int, tuple[int, ...], torch.dtype], Kept] = {}


def _key(weight: torch.Tensor) -> tuple[int, tuple[int, ...], torch.dtype]:
    return weight.data_ptr(), tuple(weight.shape), weight.dtype


def _experts(weight: torch.Tensor) -> torch.Tensor:
    """``[E, N, K]`` of a weight of experts, or of one that is ``[N, K]``."""
    return weight.detach() if weight.dim() == 3 else weight.detach()[None]


def keep(name: str, weight: torch.Tensor, block_N: torch.Tensor) -> None:
    """Quantise ``weight`` (``[N, K]``, or ``[E, N, K]`` of experts) and serve it so from now on; who writes to it calls :func:`refresh`."""
    if not weight.is_contiguous() or dense(weight.detach()).data_ptr() != weight.data_ptr():
        raise ValueError(f"{name}: a weight that is kept has to be contiguous and aligned, found strides {weight.stride()}")
    _kept[_key(weight)] = Kept(name, weakref.ref(weight), block_N, quantise_weights(_experts(weight), block_N))


def kept(weight: torch.Tensor, block_N: torch.Tensor | None) -> Quantised | None:
    """What :func:`keep` made of this very memory with these very blocks, or None."""
    found = _kept.get(_key(weight)) if _kept else None
    if found is None or found.block_N is not block_N:
        return None
    owner = found.weight()
    return found.values if owner is not None and owner.data_ptr() == weight.data_ptr() else None


def refresh() -> int:
    """Quantise every kept weight again, in place; how many there are. Weights that are gone are forgotten."""
    for key, one in list(_kept.items()):
        if one.now(into=one.values[:2]) is None:
            del _kept[key]
    return len(_kept)


def stale() -> list[str]:
    """Names of the kept weights whose quantised form is not that of the weight as it is now, read back from the device."""
    return [one.name for one in _kept.values() if (now := one.now()) is not None and not _same(now, one)]


def _same(now: Quantised, one: Kept) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(now[:2], one.values[:2], strict=True))
