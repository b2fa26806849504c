"""Latent attention out of a paged cache without the host: what a captured step of generation is made of.

Same equations as :mod:`vime.ops.sparse_attention` and :mod:`vime.ops.indexer`, same kernels, same bits; only keys and rows are
found by block table and slot, on the device. There is no such form on a CPU, where sequences are laid end to end.
"""
from __future__ import annotations

import torch

from vime.ops import registry
from vime.ops.checks import refuse
from vime.ops.indexer import select

#: Columns up to which a choice takes one program a token; more are sorted.
MOST = 1 << 14


def write_cells(cells_TW: torch.Tensor, cache_SW: torch.Tensor, slots_T: torch.Tensor) -> None:
    """``cache[slots[t], :W] = cells[t]``; a negative slot is none. int64 slots; the cache may be wider than a cell."""
    registry.resolve("attention", cells_TW.device, torch.bfloat16).functions["write_cells"](cells_TW, cache_SW, slots_T)


def choose(q_THD: torch.Tensor, key_SD: torch.Tensor, weights_TH: torch.Tensor, table_BM: torch.Tensor, row_T: torch.Tensor,
           position_T: torch.Tensor, block: int, top_k: int) -> torch.Tensor:
    """:func:`vime.ops.select` of :func:`vime.ops.index_scores`: positions in rising order, ``-1`` past the last, int32
    ``[T, min(top_k, M * block)]``.

    Args:
        q_THD, weights_TH: as of :func:`vime.ops.index_scores`.
        key_SD: the index key of every cell of the cache.
        table_BM: int32, the blocks (of ``block`` cells) of each sequence.
        row_T, position_T: int64, each token's row of the table and its position; ``-1`` for one that is none and chooses nothing.

    Raises:
        ValueError: a score is NaN.
    """
    width = table_BM.shape[1] * block
    scores_TS = registry.call("attention", "index_scores_paged", q_THD, q_THD, key_SD, weights_TH, table_BM, row_T, position_T, width, block)
    if width > MOST:
        return select(scores_TS, position_T + 1, top_k)
    bad_T = torch.isnan(scores_TS).any(1)
    refuse(bad_T.any(), lambda: ValueError(f"the index scores of row {int(bad_T.nonzero()[0])} hold NaN; no keys can be chosen from them"),
           "an index score is NaN")
    return registry.call("attention", "select", q_THD, scores_TS, position_T + 1, top_k)


def list_cells(positions_TK: torch.Tensor, table_BM: torch.Tensor, row_T: torch.Tensor, position_T: torch.Tensor, slots_T: torch.Tensor, block: int,
               counts_2: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The cell of each position of the token's own sequence, int32 ``[T, K]``, ``-1`` where that is negative; and how many there are
    before the first ``-1``, int32 ``[T]``.

    Args:
        positions_TK: what :func:`choose` chose.
        table_BM, row_T, position_T, block: as of :func:`choose`.
        slots_T: int64, the cell that the token itself is written to.
        counts_2: int64; the keys that each token could read and those that it does not are added to it, of tokens whose own cell is not
            in the first block.
    """
    return registry.resolve("attention", table_BM.device, torch.bfloat16).functions["list_cells"](
        positions_TK, table_BM, row_T, position_T, slots_T, block, counts_2)


def sparse_attention_paged(q_THD: torch.Tensor, cache_SW: torch.Tensor, slots_TK: torch.Tensor, n_T: torch.Tensor, value_dim: int,
                           scale: float) -> torch.Tensor:
    """:func:`vime.ops.sparse_attention` of the rows that the listed cells hold, ``[T, heads, value_dim]``. No gradient.

    Args:
        cache_SW: every cell of the cache, in the dtype of ``q``, or uint8 with the compressed part in E4M3
            (:class:`vime.vllm.latent_rows.RowFormat`).
        slots_TK, n_T: as of :func:`list_cells`.
    """
    return registry.call("attention", "sparse_attention_paged", q_THD, q_THD, cache_SW, slots_TK, n_T, int(value_dim), float(scale))
