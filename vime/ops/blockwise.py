"""Linear layers with a block-FP8 forward and the ordinary backward (DeepSeek-V3, arXiv:2412.19437, section 3.3).

The blocks and the order are those of DeepGEMM, so that its kernel on Hopper can serve the same equation: activations in
blocks of 1x128 along K, weights in blocks of 128x128, E4M3 with an fp32 scale of ``amax / 448`` each, one fp32 product per
block of K, and the blocks of K added with their scales by rising K.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vime.ops import registry
from vime.ops.fp8 import BLOCK, FP8_MAX, scale_of

#: For the contract.
FORMAT = "e4m3_x1x128_w128x128_amax/448_rising_k_fp32"


def row_blocks(sizes: Sequence[int]) -> torch.Tensor:
    """Number of the block of each row, int64 ``[sum(sizes)]``, of tensors of so many rows that lie one after the other.

    The blocks of each tensor start at its own first row, so they do not depend on what a side has fused it with.
    """
    parts, first = [], 0
    for size in sizes:
        parts.append(first + torch.arange(size) // BLOCK)
        first += -(-size // BLOCK)
    return torch.cat(parts)


def quantise_weight_blocks(weight_NK: torch.Tensor, block_N: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``scale = max|w| / 448`` per block of rows and 128 columns (a block of zeros: 1), ``q = e4m3(w / scale)``.

    Args:
        weight_NK: fp32 or bf16; the last block of columns may be narrower.
        block_N: int64, the block that each row belongs to; default: every 128 rows are one.

    Returns:
        ``q_NK`` float8_e4m3fn and ``scale_NB`` fp32, for each row the scales of its block along K.
    """
    rows, columns = weight_NK.shape
    if block_N is None:
        block_N = row_blocks([rows]).to(weight_NK.device)
    blocks = -(-columns // BLOCK)
    w_NBC = torch.nn.functional.pad(weight_NK.detach().float(), (0, blocks * BLOCK - columns)).view(rows, blocks, BLOCK)
    peak_NB = w_NBC.abs().amax(dim=2)
    index_NB = block_N[:, None].expand(rows, blocks)
    most_RB = torch.zeros(int(block_N.max()) + 1 if rows else 0, blocks, device=weight_NK.device)
    most_RB.scatter_reduce_(0, index_NB, peak_NB, "amax")
    scale_NB = scale_of(most_RB.gather(0, index_NB))
    q = (w_NBC / scale_NB[:, :, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return q.view(rows, blocks * BLOCK)[:, :columns], scale_NB


def linear_fp8(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None,
               block_N: torch.Tensor | None = None) -> torch.Tensor:
    """``y[t, n] = round(sum_b sx[t, b] * sw[n, b] * sum_{k in b} xq[t, k] * wq[n, k]) (+ bias[n])`` over blocks ``b`` of 128 along K.

    ``xq, sx`` are :func:`vime.ops.quantise_blocks` of x, ``wq, sw`` :func:`quantise_weight_blocks` of the weight. The inner sum is
    a product in fp32; then ``total = total + inner * (sx * sw)`` by rising ``b``, each operation rounded to fp32 on a CPU, and on CUDA the outer
    multiplication and the addition by one fused multiply-add, as in DeepGEMM; one rounding to the model dtype. The bias is added after that, as in :func:`vime.ops.linear`.

    Args:
        x_TK, weight_NK, bias_N: as of :func:`vime.ops.linear`. A device that keeps the quantised weight by itself compares the
            weight on every call: an optimizer and an update write through ``.data``, which no version counter shows. Only what was
            given to :func:`keep_quantised` is served without a look.
        block_N: as of :func:`quantise_weight_blocks`, where the weight is several tensors fused or permuted.

    Returns:
        ``y_TN`` in the model dtype. Differentiable in all three: the backward passes straight through the quantisation and is,
        bit for bit, that of :func:`vime.ops.linear`. NaN and infinity in x come out as NaN.
    """
    if weight_NK.dim() != 2 or x_TK.shape[-1] != weight_NK.shape[1] or weight_NK.dtype != x_TK.dtype:
        raise ValueError(f"linear_fp8: x {tuple(x_TK.shape)} {x_TK.dtype} and weight {tuple(weight_NK.shape)} {weight_NK.dtype} do not "
                         "fit; expected one model dtype and weight [N, K]")
    if bias_N is not None and (bias_N.shape != weight_NK.shape[:1] or bias_N.dtype != x_TK.dtype):
        raise ValueError(f"linear_fp8: bias {tuple(bias_N.shape)} {bias_N.dtype} does not fit "
                         f"weight {tuple(weight_NK.shape)} {weight_NK.dtype}")
    if block_N is not None and (block_N.shape != weight_NK.shape[:1] or block_N.dtype != torch.int64):
        raise ValueError(f"linear_fp8: block_N {tuple(block_N.shape)} {block_N.dtype} does not name a block for each of "
                         f"{weight_NK.shape[0]} rows; expected int64 [{weight_NK.shape[0]}]")
    y_TN = registry.call("linear", "linear_fp8", x_TK, x_TK, weight_NK, block_N)
    return y_TN if bias_N is None else y_TN + bias_N


def keep_quantised(name: str, weight: torch.Tensor, block_N: torch.Tensor) -> bool:
    """Serve a weight from its quantised form from now on, where the device has a use for that (CUDA): half the weight's memory again.

    Whoever writes to the weight calls :func:`refresh_quantised` before the next product; a CUDA graph that was captured in between goes on
    reading the same memory. Products have the same bits as without.

    Args:
        name: for messages.
        weight: a parameter ``[N, K]``, or ``[E, N, K]`` of experts; held weakly.
        block_N: the very tensor that later products come with.

    Returns:
        Whether it is kept: on a CPU nothing is.
    """
    keep = _kept_by(weight.device, weight.dtype, "keep_fp8")
    if keep is not None:
        keep(name, weight, block_N)
    return keep is not None


def refresh_quantised(device: torch.device | str) -> list[str]:
    """Quantise again, in place, every weight that is kept on the device; their names. One whose parameter is gone or was moved is let go."""
    refresh = _kept_by(device, torch.bfloat16, "refresh_fp8")
    return [] if refresh is None else list(refresh())


def stale_quantised(device: torch.device | str) -> list[str]:
    """Names of the kept weights of the device whose quantised form is not that of the weight as it is now: all of it is compared."""
    stale = _kept_by(device, torch.bfloat16, "stale_fp8")
    return [] if stale is None else list(stale())


def _kept_by(device: torch.device | str, dtype: torch.dtype, function: str) -> Callable[..., Any] | None:
    return registry.resolve("linear", device, dtype).functions.get(function)


def contract_id(device: torch.device | str) -> str:
    """What the contract says of a model in FP8: the equation, and the kernel of the products."""
    found = registry.resolve("linear", device, torch.float32)
    return f"{FORMAT}, {getattr(found.functions['linear_fp8'], 'vime_id', found.id)}"
