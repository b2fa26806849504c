"""The schedule that FlashInfer's kernel is given: every tile of query rows once, at the offsets that the kernel reads.

What the kernel makes of it is shown on a GPU only (``tests/cuda/test_flashinfer.py``).
"""
from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.ops.providers import flashinfer

NAMES = flashinfer._FIELDS


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=9), group=st.sampled_from([1, 3, 4, 7, 8]), spare=st.integers(0, 40))
def test_every_tile_has_one_program_and_what_is_left_over_repeats_the_first(lengths, group, spare):
    start = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    rows, sequences = int(start[-1]) + spare, len(lengths)  # an engine pads its rows up to a captured size
    schedule = flashinfer.schedule(start, rows, group)
    numbers = dict(zip(NAMES, flashinfer.plan_numbers(rows, sequences, group), strict=True))
    assert len(numbers) == 15 and schedule.dtype is torch.int32
    raw = schedule.numpy().tobytes()

    def read(name, count):
        offset = numbers[f"{name}_offset"]
        assert offset % 16 == 0 and offset + 4 * count <= len(raw)
        return np.frombuffer(raw, np.int32, count, offset).tolist()

    count = numbers["padded_batch_size"]
    programs = list(zip(read("request_indices", count), read("qo_tile_indices", count), strict=True))
    wanted = [(b, t) for b, n in enumerate(lengths) for t in range(-(-n * group // flashinfer.TILE))]
    assert programs[:len(wanted)] == wanted and set(programs[len(wanted):]) <= {(0, 0)}
    assert set(read("kv_tile_indices", count)) == {0} and read("o_indptr", sequences + 1) == start.tolist()
    assert read("kv_chunk_size_ptr", 1)[0] > 0  # divided by, whether or not keys are split
    # whatever the batch, the same tile; keys are never split, and nothing is merged
    assert numbers["cta_tile_q"] == 128 and numbers["split_kv"] == numbers["enable_cuda_graph"] == 0


@given(lengths=st.lists(st.integers(1, 700), min_size=1, max_size=6), page=st.sampled_from([16, 32, 64]), spare=st.integers(0, 5))
def test_a_row_of_the_table_read_to_its_end_has_the_length_of_its_sequence(lengths, page, spare):
    """The kernel takes (pages - 1) * page + last, in 32 bits; ``last`` is negative where the table is longer."""
    width = -(-max(lengths) // page) + spare
    last = torch.tensor(lengths) - (width - 1) * page
    assert ((np.uint32(width - 1) * np.uint32(page) + last.numpy().astype(np.int32).astype(np.uint32)) == lengths).all()


def test_logarithms_are_natural_for_the_backward():
    lse = torch.randn(5, 3)
    assert torch.allclose(flashinfer.natural(lse).t().exp(), 2.0**lse) and flashinfer.natural(lse).is_contiguous()
