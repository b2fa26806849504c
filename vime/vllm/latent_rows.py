"""How a token of latent attention lies in the paged cache, and where the tokens of a step's sequences lie.

A cell holds ``[compressed | rotated key | index key]`` in the model dtype, or with an FP8 cache, as bytes,
``[compressed in E4M3 | fp32 scale per block | rotated key | index key]``: only the compressed part is quantised, and the
index key stays in the model dtype, because it decides which keys are read at all. No numerics here: quantisation is
``ops.quantise_blocks`` and ``ops.dequantise_blocks``.
"""
from __future__ import annotations

import dataclasses
import itertools

import torch

from vime import ops
from vime.ops.fp8 import BLOCK


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """Sizes of one cell. ``index`` is 0 where the layer has no indexer of its own.

    ``dtype`` is the model dtype; ``fp8`` stores the compressed part as E4M3.
    """

    rank: int
    rope: int
    index: int
    dtype: torch.dtype
    fp8: bool

    @property
    def cache_dtype(self) -> torch.dtype:
        return torch.uint8 if self.fp8 else self.dtype

    @property
    def _parts(self) -> list[int]:
        """Elements of ``cache_dtype`` of compressed, scales, rotated key, index key."""
        if not self.fp8:
            return [self.rank, 0, self.rope, self.index]
        size = self.dtype.itemsize
        return [self.rank, 4 * -(-self.rank // BLOCK), self.rope * size, self.index * size]

    @property
    def width(self) -> int:
        """Elements of ``cache_dtype`` of a cell."""
        return sum(self._parts)

    def pack(self, row_TD: torch.Tensor, key_TI: torch.Tensor | None) -> torch.Tensor:
        """Cells ``[T, width]`` of rows ``[T, rank + rope]`` and, with an indexer, index keys ``[T, index]``."""
        keys = [] if key_TI is None else [key_TI]
        if not self.fp8:
            return torch.cat([row_TD, *keys], dim=1)
        q_TL, scale_TB = ops.quantise_blocks(row_TD[:, :self.rank])
        parts = [q_TL, scale_TB, row_TD[:, self.rank:], *keys]
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)

    def rows(self, cells_SW: torch.Tensor) -> torch.Tensor:
        """What attention reads of cells: ``[S, rank + rope]`` in the model dtype, contiguous."""
        if not self.fp8:
            return cells_SW[:, :self.rank + self.rope].contiguous()
        q_SL, scale_SB, key_SR, _ = cells_SW.split(self._parts, dim=1)
        compressed = ops.dequantise_blocks(q_SL.contiguous().view(torch.float8_e4m3fn), scale_SB.contiguous().view(torch.float32),
                                           self.dtype)
        return torch.cat([compressed, key_SR.contiguous().view(self.dtype)], dim=1)

    def keys(self, cells_SW: torch.Tensor) -> torch.Tensor:
        """The index keys of cells, ``[S, index]`` in the model dtype, contiguous."""
        return cells_SW.split(self._parts, dim=1)[3].contiguous().view(self.dtype)

    def key_view(self, cells_SW: torch.Tensor) -> torch.Tensor:
        """The index keys of cells where they lie, ``[S, index]`` in the model dtype; the cells may be wider than this format's."""
        first = sum(self._parts[:3])
        part = cells_SW[:, first:first + self._parts[3]]
        return part.view(self.dtype) if self.fp8 else part


@dataclasses.dataclass(frozen=True)
class Sequences:
    """The sequences of one step, laid end to end: sequence ``r`` is rows ``starts[r] .. starts[r] + lengths[r]``.

    ``queries[r]`` is the range of the step's tokens that belong to it; ``block_S, offset_S`` say where each row lies in
    the cache; ``start_T`` and ``position_T`` give a token's first row and its position.
    """

    starts: list[int]
    lengths: list[int]
    queries: list[tuple[int, int]]
    block_S: torch.Tensor
    offset_S: torch.Tensor
    start_T: torch.Tensor
    position_T: torch.Tensor


def sequences(query_start_loc: list[int], seq_lens: list[int], block_table_BM: torch.Tensor, block_size: int) -> Sequences:
    """Lay out a step: ``query_start_loc`` bounds each sequence's new tokens, ``seq_lens`` counts all of its tokens.

    The tensors lie where the block table does.
    """
    bounds = list(itertools.pairwise(query_start_loc))
    lengths = seq_lens[:len(bounds)]
    starts = [0, *itertools.accumulate(lengths)]
    device, total, new = block_table_BM.device, starts[-1], query_start_loc[-1]

    def each(values: list[int], times: list[int], size: int) -> torch.Tensor:
        """``values[r]``, ``times[r]`` times each; made on the host, where all of it is known, and moved in one go."""
        return torch.repeat_interleave(torch.tensor(values), torch.tensor(times), output_size=size).to(device)

    counts = [end - begin for begin, end in bounds]
    row_S, first_S = each(list(range(len(bounds))), lengths, total), each(starts[:-1], lengths, total)
    position_S = torch.arange(total, device=device) - first_S
    start_T = each(starts[:-1], counts, new)
    # a sequence's new tokens are its last ones
    before = [length - end for length, (_, end) in zip(lengths, bounds, strict=True)]
    position_T = torch.arange(new, device=device) + each(before, counts, new)
    return Sequences(starts[:-1], lengths, bounds, block_table_BM[row_S, position_S // block_size].long(), position_S % block_size,
                     start_T, position_T)
