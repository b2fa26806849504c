"""Block-FP8 values on CUDA: rows of activations, and weights, which an engine may keep quantised.

The values are those of :func:`vime.ops.quantise_blocks` and :func:`vime.ops.quantise_weight_blocks`, bit for bit. A weight that nobody
keeps is quantised on every call, from the bits that are there: whether a copy is still right could only be told by reading the
weight. An engine knows when its weights change, so it keeps them (:func:`keep`) and renews them after each update in the same memory
(:func:`refresh`), where captured CUDA graphs read it; :func:`stale` compares all of what is kept with the weights.
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


#: Elements of a weight that are quantised at a time to be kept or compared: what that takes besides the weight stays small.
_AT_ONCE = 1 << 27


@dataclasses.dataclass(frozen=True)
class Kept:
    """A weight's quantised form. ``weight`` is the parameter, held weakly: where it is gone, its memory may be another's."""

    name: str
    weight: weakref.ref[torch.Tensor]
    address: int
    values: Quantised

    @property
    def lives(self) -> bool:
        """Whether the parameter is still there, at the memory that it had."""
        weight = self.weight()
        return weight is not None and weight.data_ptr() == self.address

    def renew(self, weight: torch.Tensor) -> None:
        """Quantise the weight as it is now, in place."""
        q, scale, block_N = self.values
        for first, last in _cuts(weight):
            rows = slice(first * weight.shape[-2], last * weight.shape[-2])
            quantise_weights(_experts(weight)[first:last], block_N, q.dtype, (q[first:last], scale[rows]))

    def differs(self, weight: torch.Tensor) -> bool:
        """Whether that would change a bit."""
        q, scale, block_N = self.values
        for first, last in _cuts(weight):
            now = quantise_weights(_experts(weight)[first:last], block_N, q.dtype)
            rows = slice(first * weight.shape[-2], last * weight.shape[-2])
            if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in ((now[0], q[first:last]), (now[1], scale[rows]))):
                return True
        return False


#: By place, shape and dtype of the weight: what reaches a kernel is a view of the parameter.
_kept: dict[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype], Kept] = {}


def _key(weight: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    return weight.data_ptr(), tuple(weight.shape), weight.stride(), weight.dtype


def _experts(weight: torch.Tensor) -> torch.Tensor:
    """``[E, N, K]`` of a weight of experts, or of one that is ``[N, K]``."""
    return weight.detach() if weight.dim() == 3 else weight.detach()[None]


def _cuts(weight: torch.Tensor) -> list[tuple[int, int]]:
    """First and last expert of each part."""
    experts = _experts(weight).shape[0]
    step = max(1, _AT_ONCE // max(1, weight.shape[-2] * weight.shape[-1]))
    return [(first, min(first + step, experts)) for first in range(0, experts, step)]


def keep(name: str, weight: torch.Tensor, block_N: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
    """Quantise ``weight`` (``[N, K]``, or ``[E, N, K]`` of experts) and serve it so from now on; who writes to it calls :func:`refresh`."""
    if not weight.is_contiguous() or dense(weight.detach()).data_ptr() != weight.data_ptr():
        raise ValueError(f"{name}: a weight that is kept has to be contiguous and aligned, found strides {weight.stride()}")
    experts, rows, width = _experts(weight).shape
    values = (torch.empty(experts, rows, width, dtype=dtype, device=weight.device),
              torch.empty(experts * rows, -(-width // BLOCK), dtype=torch.float32, device=weight.device), block_N)
    one = Kept(name, weakref.ref(weight), weight.data_ptr(), values)
    one.renew(weight)
    _kept[_key(weight)] = one


def kept(weight: torch.Tensor, block_N: torch.Tensor | None) -> Quantised | None:
    """What :func:`keep` made of this very memory with these very blocks, or None."""
    found = _kept.get(_key(weight)) if _kept else None
    return found.values if found is not None and found.values[2] is block_N and found.lives else None


def refresh() -> list[str]:
    """Quantise every kept weight again, in place; their names. Weights that are gone, or lie elsewhere now, are forgotten."""
    for key, one in list(_kept.items()):
        weight = one.weight()
        if weight is None or not one.lives:
            del _kept[key]
        else:
            one.renew(weight)
    return [one.name for one in _kept.values()]


def stale() -> list[str]:
    """Names of the kept weights whose quantised form is not that of the weight as it is now, read back from the device; so too those
    that lie elsewhere now, which a captured graph would not see. Weights that are gone are none of them."""
    return [one.name for one in _kept.values() if (weight := one.weight()) is not None and (not one.lives or one.differs(weight))]
