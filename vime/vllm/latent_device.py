"""One layer of latent attention on a GPU that reads nothing on the host, so that a CUDA graph can repeat it.

Where a token belongs and what it may read is computed on the device from the step's own tensors, which vLLM fills anew before a
replay. A token that only pads a step has no position: it writes nothing, reads nothing and puts out zeros.
"""
from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from vime.ops import paged

if TYPE_CHECKING:
    from vime.vllm.attention import VimeAttentionMetadata
    from vime.vllm.latent import VimeLatentAttention


@dataclasses.dataclass(frozen=True)
class Tokens:
    """``row_T``: each token's sequence, a row of the block table; ``position_T``: its position, ``-1`` for none; both int64.
    ``captured``: computed inside a capture."""

    row_T: torch.Tensor
    position_T: torch.Tensor
    captured: bool


def tokens(metadata: VimeAttentionMetadata, count: int, blocks: int) -> Tokens:
    """Of the step's ``count`` tokens, over a cache of ``blocks`` blocks; the first layer's serves the others. What was computed before a capture does not serve one."""
    starts_B1 = metadata.query_start_loc_B1
    capturing = starts_B1.is_cuda and torch.cuda.is_current_stream_capturing()
    kept: Tokens | None = metadata.tokens
    if kept is None or kept.captured != capturing or kept.row_T.shape[0] != count:
        ends_B = starts_B1[1:]
        t_T = torch.arange(count, dtype=starts_B1.dtype, device=starts_B1.device)
        # a cell beyond the cache would be read from somebody else's memory
        torch._assert_async((metadata.block_table_BM < blocks).all(), "latent attention: a block lies beyond the cache")
        row_T = torch.searchsorted(ends_B.contiguous(), t_T, right=True).clamp(max=ends_B.shape[0] - 1)
        # a sequence's new tokens are its last ones
        position_T = metadata.seq_lens_B[row_T].long() - (ends_B[row_T] - t_T)
        kept = metadata.tokens = Tokens(row_T, torch.where(t_T < ends_B[-1], position_T, -1), capturing)
    return kept


def attend(layer: VimeLatentAttention, metadata: VimeAttentionMetadata, query_THD: torch.Tensor, row_TD: torch.Tensor, index: Any,
           step: Any) -> torch.Tensor:
    """Write this step's cells, choose keys where the layer has an indexer, and attend: ``[T, heads, kv_rank]``."""
    m, form = layer.m, layer.format
    block, cache_SW = layer.kv_cache.shape[1], layer.kv_cache.flatten(0, 1)
    slots_T = metadata.slot_mapping_T[:row_TD.shape[0]]
    paged.write_cells(form.pack(row_TD, None if index is None else index[1]), cache_SW, slots_T)
    at, table_BM = tokens(metadata, row_TD.shape[0], layer.kv_cache.shape[0]), metadata.block_table_BM
    counts_2 = None
    if m.indexer is None:
        chosen_TK = torch.arange(table_BM.shape[1] * block, device=cache_SW.device).expand(row_TD.shape[0], -1)
        chosen_TK = torch.where(chosen_TK <= at.position_T[:, None], chosen_TK, -1)
    else:
        own_TK = None
        if index is not None:
            own_TK = paged.choose(index[0], form.key_view(cache_SW), index[2], table_BM, at.row_T, at.position_T, block, m.indexer.top_k)
            if layer.counts_2 is None:
                layer.counts_2 = torch.zeros(2, dtype=torch.int64, device=own_TK.device)
            counts_2 = layer.counts_2
        chosen_TK = layer.choice(own_TK, step)
    slots_TK, n_T = paged.list_cells(chosen_TK, table_BM, at.row_T, at.position_T, slots_T, block, counts_2)
    return paged.sparse_attention_paged(query_THD, cache_SW, slots_TK, n_T, m.kv_rank, m.scale)
