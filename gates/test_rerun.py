"""Gate: the same input twice gives the same tokens and log-probabilities, in the same and in fresh processes.

A rerun inside one process shares that process's tuning, hash seed and caches, so it is not evidence alone: both sides
are started again. Control: in the second run one request gets another seed; the gate has to fail at that request.
"""
from __future__ import annotations

import msgspec
import pytest

from alignment.verdict import Place
from gates.judging import same_logprobs


def both_sides(harness, requests):
    samples = harness.generate(requests)
    return samples, harness.logprobs(samples)


def planted(harness, requests, first):
    """What the gate says when the second request of the second run has another seed."""
    wrong = [msgspec.structs.replace(r, seed=r.seed ^ 1) if i == 1 else r for i, r in enumerate(requests)]
    return same_logprobs(first, harness.generate(wrong), "engine rerun", sides=("run 1", "run 2"))


@pytest.mark.gate_rerun
def test_rerun(gate, harness):
    harness.pristine()
    requests = harness.requests(harness.profile.prompts, harness.profile.samples, tag="rerun")
    samples, trainer = both_sides(harness, requests)
    if gate.control_only:
        gate.record(planted(harness, requests, samples))
        return
    for where in ("same process", "fresh processes"):
        if where != "same process":
            harness.restart()
        again, trainer_again = both_sides(harness, requests)
        gate.record(same_logprobs(samples, again, f"engine, {where}", gate.tier, ("run 1", "run 2")))
        gate.record(same_logprobs(trainer, trainer_again, f"trainer, {where}", gate.tier, ("run 1", "run 2")))
    gate.happened("different samples of one prompt", len({tuple(s.token_ids) for s in samples}) > harness.profile.prompts)
    gate.control("another seed for one request", Place(request=requests[1].request_id), planted(harness, requests, samples))
