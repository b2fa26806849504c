"""What travels with each (token, slot) route, and its check on arrival.

A record is eight int32: source rank, token, slot, expert, the bits of the fp32 weight, nothing, and a 64-bit fingerprint over
all of these and over the bits of the token's hidden state. So a route that was paired with another token's row, an expert that sits
on another rank, a changed weight and a changed row are all caught before an expert runs.
"""
from __future__ import annotations

import functools

import torch

from vime.errors import VimeError

WIDTH = 8
_MASK = (1 << 64) - 1
_ROWS = 1 << 14  # rows that are wide integers at once: those of a whole step at full width would take as much memory as the weights


class RouteDamaged(VimeError):
    """A route arrived that is not what its owner sent. The message names token, slot, expert and both ranks."""


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _splitmix(seed: int) -> int:
    """One step of SplitMix64 (Steele, Lea and Flood, 2014): a well-mixed odd constant for each seed."""
    z = (seed * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return _signed((z ^ (z >> 31)) | 1)


@functools.lru_cache(maxsize=16)
def _multipliers(width: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([_splitmix(i + 1) for i in range(width)], dtype=torch.int64, device=device)


def _integers(x: torch.Tensor) -> torch.Tensor:
    """The bits of every element, as int64."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()]).to(torch.int64)


def row_hash(x_ND: torch.Tensor) -> torch.Tensor:
    """64 bits over the bits of each row, int64 ``[N]``: exact integer arithmetic, the same on any device."""
    factors_D = _multipliers(x_ND.shape[1], x_ND.device)
    return torch.cat([(_integers(part) * factors_D).sum(1) for part in x_ND.split(_ROWS)])


def _fingerprint(fields_R5: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
    mixed = (fields_R5.to(torch.int64) * _multipliers(4096 + 5, fields_R5.device)[4096:]).sum(1) + rows_R
    mixed = (mixed ^ (mixed >> 29)) * _splitmix(0x5EED)
    return mixed ^ (mixed >> 32)


def records(x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, rank: int) -> torch.Tensor:
    """The records of all routes of this rank's tokens, token by token and slot by slot, int32 ``[T * K, 8]``."""
    tokens, slots = ids_TK.shape
    fields = torch.empty(tokens * slots, 5, dtype=torch.int32, device=x_TH.device)
    fields[:, 0] = rank
    fields[:, 1] = torch.arange(tokens, device=x_TH.device).repeat_interleave(slots)
    fields[:, 2] = torch.arange(slots, device=x_TH.device).repeat(tokens)
    fields[:, 3] = ids_TK.reshape(-1)
    fields[:, 4] = weights_TK.detach().contiguous().view(torch.int32).reshape(-1)
    prints_R = _fingerprint(fields, row_hash(x_TH.detach()).repeat_interleave(slots))
    out = torch.zeros(tokens * slots, WIDTH, dtype=torch.int32, device=x_TH.device)
    out[:, :5] = fields
    out[:, 6:8] = prints_R.contiguous().view(torch.int32).view(-1, 2)
    return out


def pair(records_R: torch.Tensor, from_rank_R: torch.Tensor, rows_M: int) -> torch.Tensor:
    """Which of the received token rows each route belongs to, int64 ``[routes]``.

    Both dispatches are ordered by (source rank, token), and a rank gets a token once if any route of it comes here; so the
    distinct (source, token) pairs of the routes are the token rows, in order.

    Raises:
        RouteDamaged: not as many distinct tokens as rows.
    """
    key_R = from_rank_R.to(torch.int64) * (1 << 32) + records_R[:, 1].to(torch.int64)
    distinct, row_R = torch.unique(key_R, return_inverse=True)
    if len(distinct) != rows_M:
        raise RouteDamaged(f"{rows_M} token rows arrived for the routes of {len(distinct)} different tokens; every token that has a "
                           "route here must come exactly once")
    return row_R


def check(records_R: torch.Tensor, from_rank_R: torch.Tensor, rows_RH: torch.Tensor, rank: int, first_expert: int,
          experts: int) -> None:
    """Check every route that arrived against the token row it was paired with.

    Args:
        records_R: int32 ``[routes, 8]``.
        from_rank_R: the rank each came from, as the transport says.
        rows_RH: the token row of each.
        rank, first_expert, experts: this rank and the experts it holds.

    Raises:
        RouteDamaged: naming the first bad route and what is wrong with it.
    """
    hashes_R = row_hash(rows_RH)
    prints_R = _fingerprint(records_R[:, :5], hashes_R)
    sent_R = records_R[:, 6:8].clone().view(torch.int64).view(-1)
    local_R = records_R[:, 3] - first_expert
    wrong_source = records_R[:, 0] != from_rank_R
    wrong_print = prints_R != sent_R
    wrong_rank = (local_R < 0) | (local_R >= experts)
    bad = (wrong_source | wrong_print | wrong_rank).nonzero()
    if not len(bad):
        return
    at = int(bad[0])
    source, token, slot, expert = records_R[at, :4].tolist()
    reasons = []
    if wrong_rank[at]:
        reasons.append(f"expert {expert} is not here: rank {rank} holds {first_expert} to {first_expert + experts - 1}")
    if wrong_source[at]:
        reasons.append(f"it says rank {source} and came from rank {int(from_rank_R[at])}")
    if wrong_print[at]:
        reasons.append(f"its fingerprint is {int(sent_R[at]) & _MASK:016x}, what arrived gives {int(prints_R[at]) & _MASK:016x}")
    raise RouteDamaged(f"the route of token {token}, slot {slot}, expert {expert} from rank {int(from_rank_R[at])} to rank {rank} "
                       f"(ranks of the expert-parallel group) was damaged on its way ({len(bad)} of {len(records_R)}): "
                       + "; ".join(reasons))
