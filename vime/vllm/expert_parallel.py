"""Experts spread over the ranks of an engine: tokens go to the ranks, rows come back, and no bit depends on it.

Each rank runs its own sequences (data parallel), on a GPU of its own where there are GPUs, and holds a share of the experts of
every layer. Ranks move tensors and add nothing: a (token, slot) row is computed where its expert is, from the token's own hidden
state, comes back unchanged, and the token's owner adds its slots in router order, as without ranks. Everything is sent to
everybody, padded to the largest: simple, and exact at any size; it is meant for a few ranks of one machine.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist


def _gather(x: torch.Tensor, counts: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """The first ``counts[r]`` rows of every rank ``r``, end to end."""
    most = max(counts)
    mine = torch.cat([x, x.new_zeros(most - x.shape[0], *x.shape[1:])]).contiguous()
    parts = [torch.empty_like(mine) for _ in counts]
    # Bytes: gloo moves no bf16 on some builds, and a copy has no dtype.
    dist.all_gather([part.view(torch.uint8) for part in parts], mine.view(torch.uint8), group=group)
    return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])


def spread_rows(x_TH: torch.Tensor, ids_TK: torch.Tensor, local: torch.Tensor, group: dist.ProcessGroup,
                compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The rows of this rank's routes, each computed by the rank that holds the expert. Every rank of ``group`` must call it.

    Args:
        x_TH: this rank's tokens, maybe none.
        ids_TK: their experts, global ids.
        local: ``[ranks, E]`` int64, the id of an expert within a rank, ``-1`` where it does not hold it; each expert is
            held once. All tensors lie where ``group`` moves them: on the CPU (gloo) or on this rank's GPU (NCCL).
        compute: ``(x_RH, local_ids_R) -> rows_RH``.

    Returns:
        ``rows_TKH`` in the dtype of ``x_TH``.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    slots = ids_TK.shape[1]
    mine_1 = torch.tensor([x_TH.shape[0]], device=x_TH.device)
    lengths = [torch.zeros_like(mine_1) for _ in range(size)]
    dist.all_gather(lengths, mine_1, group=group)
    counts = torch.cat(lengths).tolist()
    if not sum(counts):
        return x_TH.new_zeros(0, slots, x_TH.shape[1])
    all_x_AH, all_ids_A = _gather(x_TH, counts, group), _gather(ids_TK, counts, group).reshape(-1)
    holder_A = (local >= 0).int().argmax(dim=0)[all_ids_A]
    places = [torch.nonzero(holder_A == r)[:, 0] for r in range(size)]
    mine = places[rank]
    rows_RH = compute(all_x_AH[mine // slots], local[rank][all_ids_A[mine]])
    back_AH = _gather(rows_RH, [len(p) for p in places], group)
    out_AH = torch.empty(all_ids_A.shape[0], x_TH.shape[1], dtype=x_TH.dtype, device=x_TH.device)
    out_AH[torch.cat(places)] = back_AH
    begin = sum(counts[:rank]) * slots
    return out_AH[begin:begin + ids_TK.numel()].view(x_TH.shape[0], slots, x_TH.shape[1])
