"""Logits of several sequences from a Megatron model, and the log-probability of each response token.

Aligned, the sequences of a microbatch are packed into one row of tokens with their boundaries beside it, as in
training at scale. Stock Megatron's local attention refuses packed sequences, so the unaligned run (which only shows
what vime changes) takes each sequence alone.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vime.rl.batch import Trajectory


def packed_logits(model: Any, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits ``[T, V]`` of the concatenated ``sequences``, ``T`` tokens in all, each attending to itself only."""
    device = next(model.parameters()).device
    lengths = [len(s) for s in sequences]
    ids_1T = torch.tensor([[t for s in sequences for t in s]], dtype=torch.int64, device=device)
    positions_1T = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    cu_seqlens_B1 = ends.to(device=device, dtype=torch.int32)
    from megatron.core.packed_seq_params import PackedSeqParams

    packing = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens_B1, cu_seqlens_kv=cu_seqlens_B1,
                              max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    return model(ids_1T, positions_1T, None, packed_seq_params=packing)[0]


def single_logits(model: Any, sequence: Sequence[int]) -> torch.Tensor:
    """Logits ``[T, V]`` of one sequence, as stock Megatron takes it."""
    device = next(model.parameters()).device
    ids_1T = torch.tensor([list(sequence)], dtype=torch.int64, device=device)
    return model(ids_1T, torch.arange(len(sequence), device=device)[None], None)[0]


def response_logprobs(model: Any, batch: Sequence[Trajectory], temperature: float, packed: bool) -> torch.Tensor:
    """Log-probability of every response token of ``batch`` under logits / temperature, fp32, one after the other.

    ``packed`` False takes one trajectory only.
    """
    import vime

    sequences = [t.token_ids for t in batch]
    if packed:
        logits_TV = packed_logits(model, sequences)
    else:
        if len(batch) != 1:
            raise ValueError(f"a stock forward takes one sequence, found {len(batch)}")
        logits_TV = single_logits(model, sequences[0])
    rows, ids, start = [], [], 0
    for t in batch:
        # the logits at position p - 1 predict the token at p
        rows.append(torch.arange(start + t.prompt_len - 1, start + len(t.token_ids) - 1))
        ids.extend(t.response_ids)
        start += len(t.token_ids)
    logits_RV = logits_TV.index_select(0, torch.cat(rows).to(logits_TV.device))
    ids_R = torch.tensor(ids, dtype=torch.int64, device=logits_TV.device)
    if vime.is_enabled("logprob"):
        from vime.megatron.hooks import token_logprobs

        return token_logprobs(logits_RV, ids_R, temperature)
    return torch.log_softmax(logits_RV.float() / temperature, -1).gather(1, ids_R[:, None])[:, 0]
