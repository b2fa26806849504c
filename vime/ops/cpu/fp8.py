"""The block-FP8 linear layer on a CPU: quantised values are exact in fp32, so the blocks go through the fp32 kernel.

Quantising a weight costs far more than a product with few rows, so the result is kept as long as the weight has the same bits.
They are compared on every call, all of them: writes through ``.data`` show in no version counter.
"""
from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from vime.ops import blockwise, registry
from vime.ops.cpu import functions
from vime.ops.fp8 import BLOCK, quantise_blocks

#: Bytes of kept weights; beyond that the longest unused go. Each takes 4 bytes an element, and its own bits.
KEPT_BYTES = 2 << 30


class _Kept(NamedTuple):
    bits_NK: torch.Tensor
    block_N: torch.Tensor | None
    parts: list[torch.Tensor]  # per block of K: [N, <= 128] in fp32
    scale_BN: torch.Tensor
    nbytes: int


_kept: collections.OrderedDict[tuple[Any, ...], _Kept] = collections.OrderedDict()


def _bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().view(torch.int32 if weight.dtype is torch.float32 else torch.int16)


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _quantised(weight: torch.Tensor, block_N: torch.Tensor | None) -> _Kept:
    quantise: Callable[..., Any] = blockwise.quantise_weight_blocks
    key = (quantise, weight.data_ptr(), tuple(weight.shape), weight.stride(), weight.dtype)
    found = _kept.pop(key, None)
    if found is None or not _same(found.block_N, block_N) or not torch.equal(found.bits_NK, _bits(weight)):
        bits_NK = _bits(weight).clone()
        q_NK, scale_NB = quantise(weight, block_N)
        parts = [part.float().contiguous() for part in q_NK.split(BLOCK, dim=1)]
        found = _Kept(bits_NK, None if block_N is None else block_N.clone(), parts, scale_NB.t().contiguous(),
                      bits_NK.nbytes + 4 * q_NK.numel())
    _kept[key] = found  # as the last used
    total = sum(kept.nbytes for kept in _kept.values())
    while total > KEPT_BYTES and len(_kept) > 1:
        total -= _kept.popitem(last=False)[1].nbytes
    return found


def _product(x: torch.Tensor, weight: torch.Tensor, block_N: torch.Tensor | None) -> torch.Tensor:
    xq_TK, sx_TB = quantise_blocks(x.detach().reshape(-1, x.shape[-1]))
    w = _quantised(weight, block_N)
    total_TN = torch.zeros(xq_TK.shape[0], weight.shape[0])
    for b, (xq_TC, wq_NC) in enumerate(zip(xq_TK.float().split(BLOCK, dim=1), w.parts, strict=True)):
        inner_TN = functions.K.linear(xq_TC.contiguous(), wq_NC)
        # two operations and not one fused: a vector's remainder would otherwise round elsewhere
        total_TN += inner_TN.mul_(sx_TB[:, b, None] * w.scale_BN[b])
    return total_TN.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


class _LinearFp8(functions._Linear):
    """The backward is that of the ordinary linear layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, block_N: torch.Tensor | None) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return _product(x, weight, block_N)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:  # type: ignore[override]
        return *functions._Linear.backward(ctx, dy), None


def linear_fp8(x: torch.Tensor, weight: torch.Tensor, block_N: torch.Tensor | None) -> torch.Tensor:
    registry.count("linear", registry.implementation("linear", "cpu", torch.float32), -(-weight.shape[1] // BLOCK))
    if functions._tracked(x, weight):
        return _LinearFp8.apply(x, weight, block_N)
    return _product(x, weight, block_N)
