"""The ratio of alternating pairs, and where a budget ends."""
from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment.verdict import Status
from gates.costs import median_ratio, ratio_of, within

TIMES = st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)), min_size=1, max_size=9)


@given(TIMES, st.sampled_from([2.0, 4.0, 16.0]))  # powers of two, so that no rounding comes in
def test_the_ratio_is_that_of_the_pairs_and_not_of_the_medians(times, slower):
    ours, others = zip(*times, strict=True)
    found = ratio_of(ours, others)
    assert found["min"] <= found["ratio"] <= found["max"] and found["pairs"] == len(times)
    assert found["ratio"] == round(statistics.median(a / b for a, b in times), 3)
    # a machine that is slower during one pair slows both of its sides, and changes nothing
    assert median_ratio((ours[0] * slower, *ours[1:]), (others[0] * slower, *others[1:])) == median_ratio(ours, others)


def test_one_slow_pair_does_not_decide():
    assert ratio_of([1.0, 1.0, 9.0], [1.0, 1.0, 1.0])["ratio"] == 1.0
    with pytest.raises(ValueError, match="zip"):
        ratio_of([1.0, 2.0], [1.0])


@pytest.mark.parametrize(("ratio", "status", "reason"), [
    (1.1, Status.PASS, ""), (1.101, Status.FAIL, "1.10x the ordinary stack, 1.1x asked"), (0.5, Status.PASS, "")])
def test_a_budget_is_the_largest_ratio_that_passes(ratio, status, reason):
    cost = {"ratio": ratio, "min": ratio, "max": ratio, "pairs": 3, "kept": "too"}
    found = within("cost", cost, 1.1, "the ordinary stack")
    assert (found.status, found.reason, found.info["cost"], found.coverage["pairs"].compared) == (status, reason, cost, 3)
    assert not within("cost", cost, 0.4).reason.startswith(f"{ratio:.2f}x ,")
