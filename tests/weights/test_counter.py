"""Weights made of a counter: against plain integers, whatever part is asked for, and as a distribution."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.weights import counter

MASK = (1 << 64) - 1


def by_hand(name: str, i: int, mean: float, scale: float, seed: int) -> np.float32:
    """The equation of the module in Python's own integers and single fp32 operations."""
    z = (i + counter.key_of(name, seed)) & MASK
    for _ in range(2):
        for shift, factor in zip((30, 27), counter._MULTIPLIERS, strict=True):
            z = ((z ^ (z >> shift)) * factor) & MASK
        z ^= z >> 31
    s = sum((z >> 16 * part) & 0xFFFF for part in range(4))
    return np.float32(np.float32(s - 131070) * np.float32(scale / 37837.0)) + np.float32(mean)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(name=st.text(min_size=1, max_size=20), seed=st.integers(0, 2**40), first=st.integers(0, 2**40), count=st.integers(1, 40),
       mean=st.sampled_from([0.0, 1.0, -0.3]), scale=st.sampled_from([1.0, 0.02, 0.1]))
def test_against_plain_integers(name: str, seed: int, first: int, count: int, mean: float, scale: float) -> None:
    got = counter.elements(name, first, count, mean, scale, torch.float32, seed=seed)
    assert got.tolist() == [float(by_hand(name, first + i, mean, scale, seed)) for i in range(count)]
    assert torch.equal(counter.elements(name, first, count, mean, scale, torch.bfloat16, seed=seed), got.bfloat16())


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunks_change_no_bit(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = counter.tensor("a.weight", (13, 17), 0.0, 1.0, torch.bfloat16)
    monkeypatch.setattr(counter, "CHUNK", chunk)
    assert torch.equal(counter.tensor("a.weight", (13, 17), 0.0, 1.0, torch.bfloat16), whole)


def test_it_is_close_to_normal_and_without_a_pattern() -> None:
    x = counter.tensor("a.weight", (500, 400), 0.0, 1.0, torch.float32).double()
    other = counter.tensor("b.weight", (500, 400), 0.0, 1.0, torch.float32).double()
    flat, noise = x.flatten(), 4 / 200_000**0.5
    assert abs(float(x.mean())) < noise and abs(float(x.std()) - 1) < noise and 2.6 < float((x**4).mean()) < 2.8
    assert all(abs(float((flat[:-lag] * flat[lag:]).mean())) < noise for lag in (1, 2, 3, 16, 400))
    assert abs(float((x * other).mean())) < noise
    assert float(torch.linalg.svdvals(x)[0]) < 1.1 * (500**0.5 + 400**0.5)  # no direction stands out
