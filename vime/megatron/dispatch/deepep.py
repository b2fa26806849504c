"""The transport over DeepEP's ``Buffer``: normal mode for training, low latency for generation.

**Not proven.** It has run against a stand-in with the signatures of ``Buffer`` (as megatron-core 0.19 and vLLM call it),
never on a GPU.

DeepEP's own ``combine`` adds what comes back for a token, per rank and then across ranks, so the terms of a slot-order sum
are gone by then. Here rows only ever go through ``dispatch``, which copies: the way back is a dispatch of its own. Rows
arrive in an order that is DeepEP's affair, so each carries the rank and the number it had there and is sorted by these.
"""
from __future__ import annotations

import dataclasses
from typing import Any

import torch

_HEADER = 4  # int32: source rank, row there, two unused; 16 bytes, the unit in which DeepEP moves rows
#: Row widths (in bf16) that the low-latency kernels are compiled for.
LOW_LATENCY_WIDTHS = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)


@dataclasses.dataclass(frozen=True)
class _Handle:
    to_NR: torch.Tensor
    source_M: torch.Tensor
    row_M: torch.Tensor


class DeepEpTransport:
    """A :class:`vime.megatron.dispatch.transport.Transport` over an open ``deep_ep.Buffer``.

    Args:
        buffer: made for the expert-parallel group.
        rank, size: this rank in that group, and its size.
        low_latency_tokens: None for normal mode; else the most rows any rank sends at once, for the low-latency kernels.
    """

    def __init__(self, buffer: Any, rank: int, size: int, low_latency_tokens: int | None = None) -> None:
        self.buffer, self.rank, self.size, self.low_latency_tokens = buffer, rank, size, low_latency_tokens

    def dispatch(self, x_ND: torch.Tensor, to_NR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, _Handle]:
        header_N4 = torch.zeros(x_ND.shape[0], _HEADER, dtype=torch.int32, device=x_ND.device)
        header_N4[:, 0] = self.rank
        header_N4[:, 1] = torch.arange(x_ND.shape[0], device=x_ND.device)
        rows_MD, source_M, row_M = self._move(x_ND, header_N4, to_NR)
        order_M = torch.argsort(source_M.long() * (1 << 32) + row_M.long(), stable=True)
        counts_R = torch.bincount(source_M.long(), minlength=self.size).cpu()
        return rows_MD[order_M], counts_R, _Handle(to_NR, source_M[order_M], row_M[order_M])

    def again(self, x_ND: torch.Tensor, handle: _Handle) -> torch.Tensor:
        return self.dispatch(x_ND, handle.to_NR)[0]

    def combine(self, y_MD: torch.Tensor, handle: _Handle) -> torch.Tensor:
        rows = handle.to_NR.shape[0]
        if not bool((handle.to_NR.sum(1) == 1).all()):
            raise ValueError(f"combine: not every one of the {rows} rows went to exactly one rank; only such rows come back")
        header_M4 = torch.zeros(y_MD.shape[0], _HEADER, dtype=torch.int32, device=y_MD.device)
        header_M4[:, 0], header_M4[:, 1] = self.rank, handle.row_M
        to_MR = torch.nn.functional.one_hot(handle.source_M.long(), self.size).bool()
        back_ND, _, row_N = self._move(y_MD, header_M4, to_MR)
        out_ND = torch.empty_like(back_ND)
        out_ND[row_N.long()] = back_ND
        return out_ND

    def _move(self, x_ND: torch.Tensor, header_N4: torch.Tensor,
              to_NR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows that arrived with the source rank and number of each, in any order."""
        body = x_ND.contiguous().view(torch.uint8)
        width = -(-(16 + body.shape[1]) // 16) * 8
        if self.low_latency_tokens is not None:
            width = next((w for w in LOW_LATENCY_WIDTHS if w >= width), 0)
            if not width:
                raise ValueError(f"rows of {body.shape[1]} bytes are wider than DeepEP's low-latency kernels move "
                                 f"({2 * LOW_LATENCY_WIDTHS[-1]} bytes with a header of 16); use normal mode")
        packed = torch.zeros(x_ND.shape[0], 2 * width, dtype=torch.uint8, device=x_ND.device)
        packed[:, :16] = header_N4.view(torch.uint8)
        packed[:, 16:16 + body.shape[1]] = body
        ranks_R = torch.arange(self.size, device=x_ND.device)
        # each rank counts as one expert here, so a row goes once to each rank that it names
        topk_NR = torch.where(to_NR, ranks_R, -1)
        arrived = self._send(packed.view(torch.bfloat16), topk_NR).contiguous().view(torch.uint8)
        header_M4 = arrived[:, :16].contiguous().view(torch.int32)
        rows_MD = arrived[:, 16:16 + body.shape[1]].contiguous().view(x_ND.dtype)
        return rows_MD, header_M4[:, 0], header_M4[:, 1]

    def _send(self, packed: torch.Tensor, topk_NR: torch.Tensor) -> torch.Tensor:
        if self.low_latency_tokens is not None:
            if packed.shape[0] > self.low_latency_tokens:
                raise ValueError(f"{packed.shape[0]} rows are more than the {self.low_latency_tokens} that the low-latency buffer was "
                                 "made for; raise low_latency_tokens on every rank")
            received, counts, _, _, hook = self.buffer.low_latency_dispatch(
                packed, topk_NR, self.low_latency_tokens, self.size, use_fp8=False, async_finish=False, return_recv_hook=True)
            hook()
            return received[0, :int(counts[0])]
        per_rank, per_rdma_rank, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(topk_NR, self.size)
        received, _, _, _, _, _ = self.buffer.dispatch(
            packed, topk_idx=topk_NR, topk_weights=torch.ones(topk_NR.shape, dtype=torch.float32, device=packed.device),
            num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_rdma_rank, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert)
        return received
