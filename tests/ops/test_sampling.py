"""Sampling: the right distribution, the stated noise, fixed ties."""
from __future__ import annotations

import pytest
import torch

from vime import ops
from vime.ops import reference


def draw(logits, n, temperature=1.0, k=None, p=None, seed=11):
    rows = logits.expand(n, -1)
    full = lambda value, dtype: None if value is None else torch.full((n,), value, dtype=dtype)  # noqa: E731
    return ops.sample(rows, torch.full((n,), seed), torch.arange(n), full(float(temperature), torch.float32), full(k, torch.int64), full(p, torch.float32))


def chi_square(counts, probabilities, n):
    expected = probabilities * n
    used = expected >= 5
    assert counts[~used].sum() <= max(20, 3 * expected[~used].sum())
    return float(((counts[used] - expected[used]) ** 2 / expected[used]).sum()), int(used.sum()) - 1


def test_philox_known_answers():
    """The published vectors of Random123 for philox4x32-10."""
    assert reference.philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert reference.philox4x32((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_distribution_is_the_softmax(temperature, dtype):
    logits, n = (torch.randn(60, generator=torch.Generator().manual_seed(3)) * 2).to(dtype), 40000
    counts = torch.bincount(draw(logits, n, temperature), minlength=60).double()
    statistic, freedom = chi_square(counts, torch.softmax(logits.double() / temperature, 0), n)
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5, f"chi-square {statistic} at {freedom} degrees of freedom"


def test_the_distribution_test_can_fail():
    logits, n = torch.randn(60, generator=torch.Generator().manual_seed(3)) * 2, 40000
    counts = torch.bincount(draw(logits, n, 1.05), minlength=60).double()
    statistic, freedom = chi_square(counts, torch.softmax(logits.double(), 0), n)
    assert statistic > freedom + 5 * (2 * freedom) ** 0.5


def test_small_probabilities_are_drawn_about_as_often_as_they_should(dtype):
    logits, n = torch.zeros(2000).to(dtype), 60000
    counts = torch.bincount(draw(logits, n), minlength=2000).double()
    statistic, freedom = chi_square(counts, torch.full((2000,), 1 / 2000, dtype=torch.float64), n)
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("k,p", [(5, None), (None, 0.8), (20, 0.5), (1, None), (None, 1e-6)])
def test_top_k_and_top_p_keep_exactly_the_stated_tokens(k, p, dtype):
    logits, n = (torch.randn(50, generator=torch.Generator().manual_seed(5)) * 2).to(dtype), 20000
    kept = reference.kept_tokens(logits, 1.0, k or 0, p or 1.0)
    counts = torch.bincount(draw(logits, n, 1.0, k, p), minlength=50).double()
    outside = torch.ones(50, dtype=torch.bool).index_fill(0, kept, False)
    assert counts[outside].sum() == 0
    inside = torch.softmax(logits.double(), 0)[kept]
    if len(kept) > 1:
        statistic, freedom = chi_square(counts[kept], inside / inside.sum(), n)
        assert statistic < freedom + 5 * max(1, (2 * freedom)) ** 0.5


@pytest.mark.parametrize("temperature,k,p", [(1.0, 0, 1.0), (0.7, 0, 1.0), (0.0, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.8), (0.9, 20, 0.5)])
def test_tokens_are_those_of_the_float64_form(temperature, k, p, dtype):
    n, V = 12, 333
    logits = torch.randn(n, V, generator=torch.Generator().manual_seed(8)).to(dtype)
    seeds, positions = torch.arange(n) * 7919 - 3, torch.arange(n) * (1 << 31)
    got = ops.sample(logits, seeds, positions, torch.full((n,), temperature), torch.full((n,), k), torch.full((n,), p))
    want = [reference.sample(logits[i].float(), int(seeds[i]), int(positions[i]), temperature, k, p) for i in range(n)]
    assert got.tolist() == want


def test_ties_take_the_lowest_id(dtype):
    logits = torch.tensor([[0.0, 3.0, 3.0, 3.0, -1.0]]).to(dtype)
    one = torch.tensor([1])
    assert ops.sample(logits, one, one, torch.zeros(1)).tolist() == [1]
    draws = {int(draw(logits[0], 1, k=2, seed=s)) for s in range(60)}
    assert draws == {1, 2}
    assert reference.kept_tokens(logits[0], 1.0, 2).tolist() == [1, 2]


def test_seed_and_position_matter():
    logits = torch.zeros(500)
    assert len(set(draw(logits, 50).tolist())) > 30
    assert draw(logits, 50, seed=1).tolist() != draw(logits, 50, seed=2).tolist()
    assert draw(logits, 50, seed=1).tolist() == draw(logits, 50, seed=1).tolist()


def test_masked_and_broken_logits(dtype):
    masked = torch.full((3, 40), float("-inf")).to(dtype)
    masked[:, 7] = 0
    assert ops.sample(masked, torch.arange(3), torch.arange(3), torch.ones(3)).tolist() == [7, 7, 7]
    masked[1, 3] = float("nan")
    with pytest.raises(ValueError, match="logits of row 1 hold NaN"):
        ops.sample(masked, torch.arange(3), torch.arange(3), torch.ones(3))
    with pytest.raises(ValueError, match="temperature must be >= 0"):
        ops.sample(masked[:1], torch.arange(1), torch.arange(1), -torch.ones(1))
