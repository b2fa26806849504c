"""Many small products in one launch on CUDA, in Triton: one per attention head, or one per expert.

A loop on the host over 64 heads or 256 experts costs more than the products. Here a program makes one tile of one of them. Tile
and order along K (blocks of 64, first to last, accumulated in fp32 by the tensor cores, rounded once) are the same for every
number of rows, so a row does not see how many rows its expert got, nor where in a tile it lies; ``tests/cuda/test_grouped.py``
asks the device. Which rows an expert has is read on the device: nothing waits for the host.

Where an expert gets few rows on average, smaller tiles read its weight faster. They are taken where this device was seen to give the
same bits with them, so that choice shows in no bit either.
"""
from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from vime.ops.cuda import gemm
from vime.ops.cuda.tensors import dense, next_power_of_2

_TILE = {torch.bfloat16: {"BM": 64, "BN": 128, "BK": 64, "PRECISION": "tf32", "num_warps": 4, "num_stages": 4},
         torch.float32: {"BM": 64, "BN": 64, "BK": 32, "PRECISION": "ieee", "num_warps": 4, "num_stages": 2}}

#: For at most so many rows an expert on average.
_FEW = {torch.bfloat16: {"BM": 16, "BN": 128, "BK": 64, "PRECISION": "tf32", "num_warps": 4, "num_stages": 5}}
_FEW_ROWS = 8
#: Rows up to which a plan is made by counting instead of by a sort.
_COUNTED = 2048


@triton.jit
def _product(x_ptr, row_M, w_ptr, col_N, SXR: tl.constexpr, SWN: tl.constexpr, SWK: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
             BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        k_K = k * BK + tl.arange(0, BK)
        x = tl.load(x_ptr + row_M[:, None] * SXR + k_K[None, :], mask=k_K[None, :] < K, other=0.0)
        w = tl.load(w_ptr + k_K[:, None] * SWK + col_N[None, :] * SWN, mask=k_K[:, None] < K, other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["T"])
def _heads(x_ptr, w_ptr, y_ptr, T, H: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SWH: tl.constexpr, SWN: tl.constexpr,
           SWK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    h = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    t = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    acc = _product(x_ptr + h * K, tl.where(t < T, t, 0), w_ptr + h * SWH, (n % N).to(tl.int64), H * K, SWN, SWK, K, BM, BN, BK, PRECISION)
    tl.store(y_ptr + (t[:, None] * H + h) * N + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=(t[:, None] < T) & (n[None, :] < N))


@triton.jit
def rows_of_tile(source_ptr, target_ptr, row_end_ptr, tile_end_ptr, tile, E, BE: tl.constexpr, BM: tl.constexpr):
    """The expert of a tile (``E`` past the last one), where its rows are read and written, and which of them there are."""
    e_B = tl.arange(0, BE)
    tile_end_B = tl.load(tile_end_ptr + e_B, mask=e_B < E, other=2147483647)
    e = tl.sum((tile_end_B <= tile).to(tl.int32))
    first_tile = tl.max(tl.where(e_B < e, tile_end_B, 0))
    first_row = tl.load(row_end_ptr + e - 1, mask=e > 0, other=0)
    r = first_row + (tile - first_tile) * BM + tl.arange(0, BM)
    mine = r < tl.load(row_end_ptr + e, mask=e < E, other=0)
    return e, tl.load(source_ptr + r, mask=mine, other=0), tl.load(target_ptr + r, mask=mine, other=0), mine


@triton.jit
def _tile(x_ptr, w_ptr, y_ptr, source_M, target_M, mine_M, N: tl.constexpr, K: tl.constexpr, SWN: tl.constexpr, SWK: tl.constexpr,
          BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = _product(x_ptr, source_M, w_ptr, (n % N).to(tl.int64), K, SWN, SWK, K, BM, BN, BK, PRECISION)
    tl.store(y_ptr + target_M[:, None] * N + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=mine_M[:, None] & (n[None, :] < N))


@triton.jit(do_not_specialize=["E"])
def _experts(x_ptr, w_ptr, y_ptr, source_ptr, target_ptr, row_end_ptr, tile_end_ptr, E, N: tl.constexpr, K: tl.constexpr, SWE: tl.constexpr,
             SWN: tl.constexpr, SWK: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
             PRECISION: tl.constexpr):
    e, source, target, mine = rows_of_tile(source_ptr, target_ptr, row_end_ptr, tile_end_ptr, tl.program_id(1), E, BE, BM)
    if e < E:
        _tile(x_ptr, w_ptr + e.to(tl.int64) * SWE, y_ptr, source, target, mine, N, K, SWN, SWK, BM, BN, BK, PRECISION)


@triton.jit(do_not_specialize=["R"])
def _one(x_ptr, w_ptr, y_ptr, R, N: tl.constexpr, K: tl.constexpr, SWN: tl.constexpr, SWK: tl.constexpr, BM: tl.constexpr,
         BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    """All rows are one expert's, in order: the same tile, without a table to read."""
    r = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    _tile(x_ptr, w_ptr, y_ptr, tl.where(r < R, r, 0), r, r < R, N, K, SWN, SWK, BM, BN, BK, PRECISION)


def _weight(weight_GNK: torch.Tensor) -> torch.Tensor:
    """As it lies where kernels read it: one of the inner strides 1, aligned."""
    inner_is_1 = 1 in weight_GNK.stride()[1:]
    return weight_GNK if inner_is_1 and weight_GNK.data_ptr() % 16 == 0 else weight_GNK.contiguous().clone()


def _multiply_heads(x_THK: torch.Tensor, weight_HNK: torch.Tensor) -> torch.Tensor:
    (tokens, heads, width), rows = x_THK.shape, weight_HNK.shape[1]
    y_THN = torch.empty(tokens, heads, rows, dtype=x_THK.dtype, device=x_THK.device)
    if y_THN.numel():
        tile: dict[str, Any] = _TILE[x_THK.dtype]
        weight = _weight(weight_HNK)
        _heads[(triton.cdiv(rows, tile["BN"]), triton.cdiv(tokens, tile["BM"]), heads)](
            dense(x_THK), weight, y_THN, tokens, H=heads, N=rows, K=width, SWH=weight.stride(0), SWN=weight.stride(1), SWK=weight.stride(2),
            **tile)
    return y_THN


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_THK, weight_HNK):
        ctx.save_for_backward(x_THK, weight_HNK)
        return _multiply_heads(x_THK, weight_HNK)

    @staticmethod
    def backward(ctx, dy_THN):
        x_THK, weight_HNK = ctx.saved_tensors
        dx_THK = _multiply_heads(dy_THN, weight_HNK.transpose(1, 2)) if ctx.needs_input_grad[0] else None
        dweight_HNK = None
        if ctx.needs_input_grad[1]:  # as the weight gradient of a linear layer: one order for one number of tokens
            dweight_HNK = torch.bmm(dense(dy_THN).permute(1, 2, 0), dense(x_THK).permute(1, 0, 2))
        return dx_THK, dweight_HNK


def linear_heads(x_THK: torch.Tensor, weight_HNK: torch.Tensor) -> torch.Tensor:
    """As :func:`vime.ops.linear_heads`; the weight may be a transposed view."""
    return _Heads.apply(x_THK, weight_HNK)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which rows belong to which expert, all on the device: rows in the order of their experts.

    ``place_R``: of each such row, its number in ``ids_TK`` read row by row. ``row_end_E``: where each expert's rows end.
    """

    place_R: torch.Tensor
    row_end_E: torch.Tensor
    slots: int

    @property
    def token_R(self) -> torch.Tensor:
        return self.place_R // self.slots


@triton.jit(do_not_specialize=["R"])
def _place(id_ptr, place_ptr, R, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Each row's number among all, by expert and then by place."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(id_ptr + r, mask=r < R, other=0)
    before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, R, CHUNK):
        j = first + tl.arange(0, CHUNK)
        other = tl.load(id_ptr + j, mask=j < R, other=9223372036854775807)
        earlier = (other[None, :] < own[:, None]) | ((other[None, :] == own[:, None]) & (j[None, :] < r[:, None]))
        before += tl.sum(earlier.to(tl.int32), axis=1)
    tl.store(place_ptr + before, r.to(tl.int64), mask=r < R)


@triton.jit(do_not_specialize=["R", "E"])
def _row_ends(id_ptr, row_end_ptr, R, E, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end = tl.zeros([BLOCK], tl.int32)
    for first in range(0, R, CHUNK):
        j = first + tl.arange(0, CHUNK)
        other = tl.load(id_ptr + j, mask=j < R, other=9223372036854775807)
        end += tl.sum((other[None, :] <= e[:, None]).to(tl.int32), axis=1)
    tl.store(row_end_ptr + e, end.to(tl.int64), mask=e < E)


@triton.jit(do_not_specialize=["E"])
def _tile_ends(row_end_ptr, tile_end_ptr, E, BE: tl.constexpr, BM: tl.constexpr):
    e = tl.arange(0, BE)
    end = tl.load(row_end_ptr + e, mask=e < E, other=0)
    count = end - tl.load(row_end_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
    tiles = tl.where(e < E, (count + BM - 1) // BM, 0).to(tl.int32)
    tl.store(tile_end_ptr + e, tl.cumsum(tiles, 0), mask=e < E)


def tile_ends(row_end_E: torch.Tensor, rows: int) -> torch.Tensor:
    """Where each expert's tiles of ``rows`` rows end, int32."""
    tile_end_E = torch.empty(row_end_E.shape, dtype=torch.int32, device=row_end_E.device)
    _tile_ends[(1,)](row_end_E, tile_end_E, row_end_E.shape[0], BE=max(16, next_power_of_2(row_end_E.shape[0])), BM=rows, num_warps=4)
    return tile_end_E


def plan(ids_TK: torch.Tensor, experts: int) -> Plan:
    """Sort ``ids_TK``, int64 ``[T, K]``, by expert; a token's place decides among rows of one expert."""
    count = ids_TK.numel()
    if 0 < count <= _COUNTED:  # each row counts those before it: two launches, where a sort takes about ten
        ids_R = dense(ids_TK).view(-1)
        place_R, ends_E = torch.empty_like(ids_R), torch.empty(experts, dtype=torch.int64, device=ids_R.device)
        _place[(triton.cdiv(count, 16),)](ids_R, place_R, count, BLOCK=16, CHUNK=128, num_warps=4)
        _row_ends[(triton.cdiv(experts, 16),)](ids_R, ends_E, count, experts, BLOCK=16, CHUNK=128, num_warps=4)
        return Plan(place_R, ends_E, ids_TK.shape[1])
    chosen_R, place_R = torch.sort(ids_TK.reshape(-1), stable=True)
    ends_E = torch.searchsorted(chosen_R, torch.arange(experts, device=ids_TK.device, dtype=chosen_R.dtype), right=True)
    return Plan(place_R, ends_E, ids_TK.shape[1])


def grouped_linear(x_SK: torch.Tensor, weight_ENK: torch.Tensor, source_R: torch.Tensor, target_R: torch.Tensor,
                   row_end_E: torch.Tensor) -> torch.Tensor:
    """``y[target[r]] = weight[e] x[source[r]]``, ``e`` the expert whose rows hold ``r``. ``[R, N]``; no gradient."""
    weight = _weight(weight_ENK)
    tile = _FEW[x_SK.dtype] if _few_rows(weight, source_R.shape[0]) else _TILE[x_SK.dtype]
    return _multiply_experts(x_SK, weight, source_R, target_R, row_end_E, tile)


def _multiply_experts(x_SK: torch.Tensor, weight_ENK: torch.Tensor, source_R: torch.Tensor, target_R: torch.Tensor, row_end_E: torch.Tensor,
                      tile: dict[str, Any]) -> torch.Tensor:
    (experts, rows, width), count = weight_ENK.shape, source_R.shape[0]
    y_RN = torch.empty(count, rows, dtype=x_SK.dtype, device=x_SK.device)
    if y_RN.numel():
        tile_end_E = tile_ends(row_end_E, tile["BM"])
        most = triton.cdiv(count, tile["BM"]) + min(experts, count)  # every expert may leave a tile unfilled
        _experts[(triton.cdiv(rows, tile["BN"]), most)](
            dense(x_SK), weight_ENK, y_RN, source_R, target_R, row_end_E, tile_end_E, experts, N=rows, K=width, SWE=weight_ENK.stride(0),
            SWN=weight_ENK.stride(1), SWK=weight_ENK.stride(2), BE=max(16, next_power_of_2(experts)), **tile)
    return y_RN


_same_bits: dict[tuple[Any, ...], bool] = {}


def _few_rows(weight_ENK: torch.Tensor, count: int) -> bool:
    """Whether ``count`` rows take the small tile: few of them, and its bits are those of the other one on this device."""
    (experts, rows, width), dtype = weight_ENK.shape, weight_ENK.dtype
    if dtype not in _FEW or count > _FEW_ROWS * experts:
        return False
    key = (rows, width, dtype, weight_ENK.stride(2) == 1, weight_ENK.device)
    if key not in _same_bits:
        if weight_ENK.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        _same_bits[key] = _small_tiles_agree(rows, width, dtype, weight_ENK.stride(2) == 1, weight_ENK.device)
    return _same_bits[key]


def _small_tiles_agree(rows: int, width: int, dtype: torch.dtype, inner: bool, device: torch.device) -> bool:
    """Of three experts with 1, 0 and 511 rows, data that cancel."""
    generator = torch.Generator(device=device).manual_seed(20255)
    x_RK, weight_NK = gemm.cancelling(512, torch.randn(rows, width, dtype=dtype, device=device, generator=generator), 20256)
    weight = weight_NK.expand(3, -1, -1).contiguous() if inner else weight_NK.t().expand(3, -1, -1).contiguous().transpose(1, 2)
    each_R, end_E = torch.arange(512, device=device), torch.tensor([1, 1, 512], device=device)
    one, other = (_multiply_experts(x_RK, weight, each_R, each_R, end_E, tile[dtype]) for tile in (_TILE, _FEW))
    return torch.equal(one, other)


def _one_expert(x_RK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    (rows, width), columns = x_RK.shape, weight_NK.shape[0]
    y_RN = torch.empty(rows, columns, dtype=x_RK.dtype, device=x_RK.device)
    if y_RN.numel():
        tile: dict[str, Any] = _TILE[x_RK.dtype]
        weight = _weight(weight_NK[None])[0]
        _one[(triton.cdiv(columns, tile["BN"]), triton.cdiv(rows, tile["BM"]))](
            dense(x_RK), weight, y_RN, rows, N=columns, K=width, SWN=weight.stride(0), SWK=weight.stride(1), **tile)
    return y_RN


class _Expert(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RK, weight_NK):
        ctx.save_for_backward(x_RK, weight_NK)
        return _one_expert(x_RK, weight_NK)

    @staticmethod
    def backward(ctx, dy_RN):
        x_RK, weight_NK = ctx.saved_tensors
        dx_RK = _one_expert(dy_RN, weight_NK.t()) if ctx.needs_input_grad[0] else None
        return dx_RK, dense(dy_RN).t() @ dense(x_RK) if ctx.needs_input_grad[1] else None


def expert_linear(x_RK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """As :func:`vime.ops.expert_linear`: the rows of one expert by the kernel of all."""
    return _Expert.apply(x_RK, weight_NK)
