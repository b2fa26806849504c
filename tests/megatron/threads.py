"""Several ranks as threads of one process, with transports that move tensors through a shared table.

Real process groups are tested with real ranks (test_experts.py); here hypothesis needs hundreds of small exchanges.
"""
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class Meeting:
    """An all-to-all of Python objects between ``size`` threads."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.table = size, threading.Barrier(size, timeout=30), {}

    def exchange(self, rank: int, to_each: list[Any]) -> list[Any]:
        for other, thing in enumerate(to_each):
            self.table[rank, other] = thing
        self.barrier.wait()
        got = [self.table[other, rank] for other in range(self.size)]
        self.barrier.wait()
        return got


def on_ranks(size: int, work: Callable[[int, Meeting], Any]) -> list[Any]:
    """``work(rank, meeting)`` in ``size`` threads; results in rank order. The first error of any is raised."""
    meeting, results, errors = Meeting(size), [None] * size, []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, meeting)
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return results


class TableTransport:
    """The plain transport, for what does not depend on a process group."""

    def __init__(self, meeting: Meeting, rank: int, damage: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self.meeting, self.rank, self.size, self.damage = meeting, rank, meeting.size, damage

    def dispatch(self, x, to):
        rows = self.again(x, to)
        counts = self.meeting.exchange(self.rank, [int(to[:, r].sum()) for r in range(self.size)])
        return rows, torch.tensor(counts), to

    def again(self, x, handle):
        x = self.damage(x) if self.damage else x
        return torch.cat(self.meeting.exchange(self.rank, [x[handle[:, r]].clone() for r in range(self.size)]))

    def combine(self, y, handle):
        counts = self.meeting.exchange(self.rank, [int(handle[:, r].sum()) for r in range(self.size)])
        back = self.meeting.exchange(self.rank, list(y.split(counts)))
        out = y.new_empty(handle.shape[0], *y.shape[1:])
        for r, rows in enumerate(back):
            out[handle[:, r]] = rows
        return out


class StandInBuffer:
    """``deep_ep.Buffer`` by its signatures. Rows arrive shuffled, since their order is not promised."""

    def __init__(self, meeting: Meeting, rank: int, seed: int = 0) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size
        self.generator = torch.Generator().manual_seed(seed * 131 + rank)

    def get_dispatch_layout(self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False):
        assert num_experts == self.size and topk_idx.dtype == torch.int64
        in_rank = (topk_idx[:, :, None] == torch.arange(self.size)).any(1)
        return in_rank.sum(0), None, in_rank.sum(0), in_rank, None

    def _move(self, x, in_rank):
        assert x.dtype == torch.bfloat16 and x.shape[1] % 8 == 0 and x.is_contiguous()
        rows = torch.cat(self.meeting.exchange(self.rank, [x[in_rank[:, r]].clone() for r in range(self.size)]))
        return rows[torch.randperm(len(rows), generator=self.generator)]

    def dispatch(self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None,
                 num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, num_worst_tokens=0,
                 config=None, previous_event=None, async_finish=False, allocate_on_comm_stream=False):
        assert torch.equal(num_tokens_per_rank, is_token_in_rank.sum(0)) and topk_weights.dtype == torch.float32
        return self._move(x, is_token_in_rank), topk_idx, topk_weights, [], ("opaque",), None

    def combine(self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None, async_finish=False,
                allocate_on_comm_stream=False):
        raise AssertionError("combine adds rows on the way; slot-order dispatch must not call it")

    def low_latency_dispatch(self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts,
                             cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None, use_fp8=True,
                             round_scale=False, use_ue8m0=False, async_finish=False, return_recv_hook=False):
        assert not use_fp8 and return_recv_hook and len(x) <= num_max_dispatch_tokens_per_rank and num_experts == self.size
        rows = self._move(x, (topk_idx[:, :, None] == torch.arange(self.size)).any(1))
        room = torch.full((1, num_max_dispatch_tokens_per_rank * self.size, x.shape[1]), 7.0, dtype=torch.bfloat16)
        filled = []

        def hook():
            room[0, :len(rows)] = rows
            filled.append(True)

        return room, torch.tensor([len(rows)]), ("opaque",), None, hook

    low_latency_combine = combine
