"""Gate: a request's tokens and log-probabilities do not depend on what else is in the batch.

Sizes 1, 2, 3, 7 and 16, permuted, a prefill in chunks of several sizes, a cold and a warm prefix cache; on the trainer's
side each sequence alone against all packed together. Control: the seed of one request follows its place in the batch
of 7, as a sampler with one generator a batch would do; the gate has to fail at that request.
"""
from __future__ import annotations

import random

import msgspec
import pytest

from alignment.verdict import Place
from gates.harness import CHUNK
from gates.judging import same_logprobs

SIZES = (2, 3, 7, 16)
CHUNKS = (CHUNK // 2 + 1, 8 * CHUNK)


def same(alone, together, name, tier="exact"):
    """Each request of ``together`` against the same request alone."""
    names = {s.request_id for s in together}
    return same_logprobs([s for s in alone if s.request_id in names], together, name, tier, ("alone", "batch"))


def planted(harness, requests, alone):
    """What the gate says about a batch of 7 in which the sixth request is seeded by its place."""
    batch = [msgspec.structs.replace(r, seed=i) if i == 5 else r for i, r in enumerate(requests[:7])]
    return same(alone, harness.generate(batch), "batch of 7")


@pytest.mark.gate_batch
def test_batch(gate, harness):
    requests = harness.requests(max(SIZES), tag="batch")
    alone = [harness.generate([r])[0] for r in requests]
    if gate.control_only:
        gate.record(planted(harness, requests, alone))
        return
    for size in SIZES:
        gate.record(same(alone, harness.generate(requests[:size]), f"batch of {size}", gate.tier))
    shuffled = random.Random(1).sample(requests, len(requests))
    gate.record(same(alone, harness.generate(shuffled), "permuted", gate.tier))
    before = harness.session.client.stats()["cached_tokens"]
    gate.record(same(alone, harness.generate(requests, cold=False), "warm prefix cache", gate.tier))
    gate.happened("tokens from the warm prefix cache", harness.session.client.stats()["cached_tokens"] - before)
    gate.happened(f"prompts longer than a chunk of {CHUNK}", sum(len(r.prompt_token_ids) > CHUNK for r in requests))

    trainer = [harness.logprobs([s])[0] for s in alone]
    gate.record(same_logprobs(trainer, harness.logprobs(alone), "trainer, packed", gate.tier, ("alone", "packed")))
    gate.control("a seed by place in the batch", Place(request=requests[5].request_id), planted(harness, requests, alone))
    if harness.version:
        harness.pristine()
        alone = [harness.generate([r])[0] for r in requests[:7]]
    for chunk in CHUNKS:
        with harness.another_engine(max_num_batched_tokens=chunk, max_num_seqs=16) as client:
            gate.record(same(alone, client.generate(requests[:7]), f"prefill in chunks of {chunk}", gate.tier))
