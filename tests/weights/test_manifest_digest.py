"""A digest taken in pieces is that of the whole, wherever a piece ends."""
from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.weights.manifest import digest_of, in_pieces


@settings(max_examples=60, deadline=None, derandomize=True)
@given(size=st.integers(1, 400), piece=st.integers(1, 120), seed=st.integers(0, 99))
def test_pieces_change_no_digit(size: int, piece: int, seed: int) -> None:
    flat = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    assert in_pieces(flat, piece) == digest_of(flat)
    changed = flat.clone()
    changed[seed % size] ^= 1
    assert in_pieces(changed, piece) != digest_of(flat)
