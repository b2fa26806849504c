"""Moving rows between the ranks of an expert-parallel group.

A transport moves bytes and adds nothing. ``dispatch`` sends each row to any number of ranks; ``combine`` is its inverse
for rows that went to exactly one rank; ``again`` repeats a ``dispatch`` with other rows of the same plan (the backward of
``combine``).
"""
from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Transport(Protocol):
    """What the dispatcher needs of a way between ranks. Every call is collective in the group."""

    size: int
    rank: int

    def dispatch(self, x_ND: torch.Tensor, to_NR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Send row ``n`` to every rank ``r`` with ``to[n, r]``.

        Returns:
            the rows received ``[M, D]``, ordered by (source rank, row there); how many came from each rank, int64 ``[R]``
            on the CPU; and a handle for :meth:`combine` and :meth:`again`.
        """

    def combine(self, y_MD: torch.Tensor, handle: Any) -> torch.Tensor:
        """Rows back to where they came from, ``[N, D]`` in the sender's order. Each must have gone to one rank."""

    def again(self, x_ND: torch.Tensor, handle: Any) -> torch.Tensor:
        """The rows of :meth:`dispatch` for another ``x`` of the same plan, ``[M, D]``."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    order_P: torch.Tensor  # the sender's row of each (rank, row) pair, by rank
    send: list[int]
    receive: list[int]
    rows: int


class ProcessGroupTransport:
    """Over ``torch.distributed.all_to_all_single`` (gloo, NCCL). A group of one rank moves nothing."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0

    def dispatch(self, x_ND: torch.Tensor, to_NR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, _Plan]:
        send_R = to_NR.sum(0).to("cpu", torch.int64)
        receive_R = self._counts(send_R, x_ND.device)
        order_P = to_NR.t().nonzero()[:, 1]
        plan = _Plan(order_P, send_R.tolist(), receive_R.tolist(), x_ND.shape[0])
        return self.again(x_ND, plan), receive_R, plan

    def again(self, x_ND: torch.Tensor, handle: _Plan) -> torch.Tensor:
        return self._exchange(x_ND[handle.order_P], handle.send, handle.receive)

    def combine(self, y_MD: torch.Tensor, handle: _Plan) -> torch.Tensor:
        if len(handle.order_P) != handle.rows:
            raise ValueError(f"combine: {handle.rows} rows went to {len(handle.order_P)} places; only rows that went to exactly one "
                             "rank come back")
        back_PD = self._exchange(y_MD, handle.receive, handle.send)
        out_ND = torch.empty_like(back_PD)
        out_ND[handle.order_P] = back_PD
        return out_ND

    def _counts(self, send_R: torch.Tensor, device: torch.device) -> torch.Tensor:
        if self.size == 1:
            return send_R
        received_R = torch.empty_like(send_R, device=device)
        dist.all_to_all_single(received_R, send_R.to(device), group=self.group)
        return received_R.cpu()

    def _exchange(self, rows_PD: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        if self.size == 1:
            return rows_PD
        out_MD = rows_PD.new_empty(sum(receive), *rows_PD.shape[1:])
        # as bytes: gloo does not know every dtype
        dist.all_to_all_single(out_MD.view(torch.uint8), rows_PD.contiguous().view(torch.uint8), receive, send, group=self.group)
        return out_MD
