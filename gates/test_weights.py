"""Gate: after each online update, what the engine holds is what the trainer sent, every tensor, bit by bit.

Controls: one bit of one trainer weight flipped after the update (the gate has to name that tensor), and an optimizer
step whose update was never sent (stale weights).
"""
from __future__ import annotations

import pytest

from alignment.verdict import Place
from gates.judging import same_weights


def planted(harness, held):
    """What the gate says with the lowest bit of one weight of the trainer's final norm flipped."""
    with harness.flipped("decoder.final_layernorm.weight"):
        return same_weights(harness.trainer_digests(), held, "weights")


@pytest.mark.gate_weights
def test_weights(gate, harness):
    profile = harness.profile
    requests = harness.requests(profile.prompts, profile.samples, tag="weights")
    if gate.control_only:
        gate.record(planted(harness, harness.engine_digests()))
        return
    gate.record(same_weights(harness.trainer_digests(), harness.engine_digests(), f"version {harness.version}"))
    for _ in range(profile.updates):
        samples = harness.generate(requests)
        harness.train(samples, profile.samples)
        unsent = same_weights(harness.trainer_digests(), harness.engine_digests(), "weights")
        update = harness.update()
        gate.happened(f"version {update.version}: tensors changed", update.changed)
        if not gate.record(same_weights(update.trainer, update.engine, f"version {update.version}")).green:
            return
    gate.control("a step that was not sent", Place(stage="engine"), unsent)
    gate.control("one bit of the final norm", Place(tensor="model.norm.weight"), planted(harness, harness.engine_digests()))
