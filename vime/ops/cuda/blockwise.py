"""Block-FP8 products on CUDA: one linear layer by DeepGEMM or in Triton, or all experts of a layer in one launch of Triton's.

The equation is that of :mod:`vime.ops.blockwise`. A block of 128 along K is one product of E4M3 tensor cores into registers that
start at zero; it is multiplied by its scales and added in fp32 by one fused multiply-add, block after block, as DeepGEMM does it: on a
H200 both gave the same bits, and each process proves a shape again (:func:`route`) before DeepGEMM, which is faster, serves it.
What the tensor cores keep of a sum of 128 products is the chip's own (fewer bits than fp32 on Hopper), hence an id of its own in the
contract. One tile serves every number of rows. Where the quantised values come from: :mod:`vime.ops.cuda.quantise`.
"""
from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch.utils.weak import WeakIdKeyDictionary

from vime.ops import registry
from vime.ops.cuda import gemm
from vime.ops.cuda.grouped import rows_of_tile, tile_ends
from vime.ops.cuda.quantise import Quantised, kept, quantise_rows, quantise_weights
from vime.ops.cuda.tensors import dense, next_power_of_2
from vime.ops.fp8 import BLOCK
from vime.ops.providers import deep_gemm

IMPLEMENTATION = "cuda/linear_fp8/fused@2"
_TILE = {"BM": 64, "BN": 128, "num_warps": 4, "num_stages": 4, "enable_fp_fusion": True}
#: Elements of a weight from which DeepGEMM is considered: it compiles for seconds, and a small product gains nothing.
_LARGE = 1 << 22
#: Rows that DeepGEMM is proven with, and the most that it serves.
PROOF_ROWS = (1, 2, 7, 16, 33, 64, 65, 127, 128, 129, 256, 333, 512, 1024, 2048, 3001, 4096, 8192)


@triton.jit(do_not_specialize=["E", "sx_row", "sx_block"])
def _products(x_ptr, sx_ptr, w_ptr, sw_ptr, block_ptr, y_ptr, source_ptr, target_ptr, row_end_ptr, tile_end_ptr, E, sx_row, sx_block,
              N: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
              PRECISION: tl.constexpr):
    e, source, target, mine = rows_of_tile(source_ptr, target_ptr, row_end_ptr, tile_end_ptr, tl.program_id(1), E, BE, BM)
    if e < E:
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        row_N = (n % N).to(tl.int64) + e.to(tl.int64) * N
        block_N = tl.load(block_ptr + n % N) + e.to(tl.int64) * N
        total = tl.zeros([BM, BN], dtype=tl.float32)
        for b in range(0, KB):
            k = b * C + tl.arange(0, C)
            x = tl.load(x_ptr + source[:, None] * K + k[None, :], mask=k[None, :] < K, other=0.0)
            w = tl.load(w_ptr + k[:, None] + row_N[None, :] * K, mask=k[:, None] < K, other=0.0)
            inner = tl.dot(x, w, input_precision=PRECISION)
            sx = tl.load(sx_ptr + source * sx_row + b * sx_block)
            sw = tl.load(sw_ptr + block_N * KB + b)
            total = total + inner * (sx[:, None] * sw[None, :])
        tl.store(y_ptr + target[:, None] * N + n[None, :], total.to(y_ptr.dtype.element_ty), mask=mine[:, None] & (n[None, :] < N))


def multiply(x: tuple[torch.Tensor, torch.Tensor], weight: Quantised, source_R: torch.Tensor,
             target_R: torch.Tensor, row_end_E: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``y[target[r]]`` of what is quantised already, ``[R, N]`` in ``dtype``; arguments as of :func:`grouped_linear_fp8`."""
    (xq_SK, sx_SB), (wq_ENK, sw_RB, block_N) = x, weight
    (experts, rows, width), count = wq_ENK.shape, source_R.shape[0]
    y_RN = torch.empty(count, rows, dtype=dtype, device=xq_SK.device)
    tile: dict[str, Any] = _TILE
    tile_end_E = tile_ends(row_end_E, tile["BM"])
    most = triton.cdiv(count, tile["BM"]) + min(experts, count)
    _products[(triton.cdiv(rows, tile["BN"]), most)](
        dense(xq_SK), sx_SB, wq_ENK, sw_RB, block_N, y_RN, source_R, target_R, row_end_E, tile_end_E, experts, *sx_SB.stride(), N=rows, K=width,
        KB=sx_SB.shape[1], C=BLOCK, BE=max(16, next_power_of_2(experts)), PRECISION="ieee" if xq_SK.dtype == torch.float32 else "tf32",
        **tile)
    return y_RN


def grouped_linear_fp8(x_SK: torch.Tensor, weight_ENK: torch.Tensor, block_N: torch.Tensor | None, source_R: torch.Tensor,
                       target_R: torch.Tensor, row_end_E: torch.Tensor) -> torch.Tensor:
    """:func:`vime.ops.linear_fp8` of each row with its expert's weight, rows as of
    :func:`vime.ops.cuda.grouped.grouped_linear`. No gradient."""
    if not source_R.shape[0]:
        return x_SK.new_empty(0, weight_ENK.shape[1])
    registry.count("linear", IMPLEMENTATION)
    weight = kept(weight_ENK, block_N) or quantise_weights(dense(weight_ENK.detach()), block_N)
    return multiply(quantise_rows(x_SK.detach()), weight, source_R, target_R, row_end_E, x_SK.dtype)


@dataclasses.dataclass(frozen=True)
class Route:
    """What serves a shape, ``"deep_gemm"`` or ``"triton"``, and why."""

    kernel: str
    reason: str


_routes: dict[tuple[int, int, torch.dtype, int], Route] = {}


def route(weight_NK: torch.Tensor) -> Route:
    """DeepGEMM where it was proven here, over :data:`PROOF_ROWS`, to give the bits of the Triton kernel.

    The proof is of this process: it takes less than a second, and what DeepGEMM makes of a shape depends on its own version, on
    nvcc and on its switches, which no file of proofs knows.
    """
    N, K = weight_NK.shape
    key = (N, K, weight_NK.dtype, weight_NK.device.index or 0)
    found = _routes.get(key)
    if found is None:
        found = _small(weight_NK)
        if found is None:
            if torch.cuda.is_current_stream_capturing():  # the bits are the same, so this one may wait
                return Route("triton", "first met inside the capture of a CUDA graph")
            found = _prove(N, K, weight_NK.device)
        _routes[key] = found
    return found


def _small(weight_NK: torch.Tensor) -> Route | None:
    """Why DeepGEMM is not considered; None where it is."""
    N, K = weight_NK.shape
    if weight_NK.dtype != torch.bfloat16 or K % BLOCK or N % 64:
        return Route("triton", f"DeepGEMM takes bfloat16, N in multiples of 64 and K of {BLOCK}")
    return Route("triton", f"fewer than {_LARGE} elements") if N * K < _LARGE else None


def _prove(N: int, K: int, device: torch.device) -> Route:
    generator = torch.Generator(device=device).manual_seed(20254)
    try:
        x, w = (torch.randn(size, K, dtype=torch.bfloat16, device=device, generator=generator) for size in (PROOF_ROWS[-1], N))
        weight = quantise_weights(w[None], None)
        whole = _by_triton(x, weight)
        wrong = [m for m in PROOF_ROWS for first in {0, (len(x) - m) // 3} if not torch.equal(_by_deep_gemm(x[first:first + m], weight), whole[first:first + m])]
    except Exception as error:  # not installed, no nvcc, another chip, no memory: whatever it is, the other kernel is there
        return Route("triton", f"{type(error).__name__}: {error}"[:500])
    return Route("triton", f"DeepGEMM gives other bits at M = {wrong}") if wrong else Route("deep_gemm", "")


def _by_triton(x_TK: torch.Tensor, weight: Quantised) -> torch.Tensor:
    rows = x_TK.shape[0]
    every_R = torch.arange(rows, device=x_TK.device)
    return multiply(quantise_rows(x_TK), weight, every_R, every_R, torch.full((1,), rows, device=x_TK.device), x_TK.dtype)


def _by_deep_gemm(x_TK: torch.Tensor, weight: Quantised) -> torch.Tensor:
    (q_1NK, scale_RB, _), rows = weight, weight[0].shape[1]
    return deep_gemm.multiply(*quantise_rows(x_TK), q_1NK[0], scale_RB[:-(-rows // BLOCK)], x_TK.dtype)


_plain = WeakIdKeyDictionary()


def _plain_blocks(block_N: torch.Tensor | None) -> bool:
    """Whether every 128 rows are a block. Read once for a tensor; where that can't be read now, no."""
    if block_N is None:
        return True
    known = _plain.get(block_N)
    if known is None:
        if torch.cuda.is_current_stream_capturing():
            return False
        known = _plain[block_N] = torch.equal(block_N, torch.arange(len(block_N), device=block_N.device) // BLOCK)
    return known


class _LinearFp8(gemm._Linear):
    """The backward is that of the ordinary linear layer."""

    @staticmethod
    def forward(ctx, x_TK, weight_NK, block_N):
        ctx.save_for_backward(x_TK, weight_NK)
        registry.count("linear", IMPLEMENTATION)
        weight = kept(weight_NK, block_N) or quantise_weights(dense(weight_NK.detach())[None], block_N)
        proven = x_TK.shape[0] <= PROOF_ROWS[-1] and _plain_blocks(block_N) and route(weight_NK).kernel == "deep_gemm"
        return (_by_deep_gemm if proven else _by_triton)(x_TK.detach(), weight)

    @staticmethod
    def backward(ctx, dy_TN):
        return *gemm._Linear.backward(ctx, dy_TN), None


def linear_fp8(x_TK: torch.Tensor, weight_NK: torch.Tensor, block_N: torch.Tensor | None) -> torch.Tensor:
    """As :func:`vime.ops.linear_fp8`, without the bias."""
    x2_TK = dense(x_TK.reshape(-1, x_TK.shape[-1]))
    y_TN = _LinearFp8.apply(x2_TK, weight_NK, block_N) if x2_TK.shape[0] else x2_TK @ weight_NK.t()
    return y_TN.reshape(*x_TK.shape[:-1], weight_NK.shape[0])


linear_fp8.vime_id = IMPLEMENTATION  # type: ignore[attr-defined]  # for the contract
