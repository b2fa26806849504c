"""Gate: trainer and engine give every sampled token the same log-probability, before and after each weight update.

Third party: unpatched transformers in fp32, on the weights of the checkpoint; of a model that chooses experts or keys in bf16,
held to what the engine chose. Control: a bit of some weights of the trainer's final norm flipped; every token is behind it, so
the gate has to fail at the first one.
"""
from __future__ import annotations

import contextlib

import pytest

from alignment.verdict import Place
from gates.judging import same_logprobs

FLIPPED = 16
FINAL_NORM = "decoder.final_layernorm.weight"


def planted(harness, samples):
    """What the gate says with the highest mantissa bit of some weights of the final norm flipped in the trainer: of one alone
    the change may vanish for a token whose activation there is small."""
    bit = 22 if harness.dtype == "float32" else 6
    with contextlib.ExitStack() as flips:
        for index in range(FLIPPED):
            flips.enter_context(harness.flipped(FINAL_NORM, index=index, bit=bit))
        return same_logprobs(samples, harness.logprobs(samples), "logprob")


def first_token(samples):
    return Place(request=samples[0].request_id, position=len(samples[0].prompt_token_ids))


@pytest.mark.gate_logprob
def test_logprob(gate, harness, dtype):
    profile = harness.profile
    harness.pristine()
    samples = harness.generate(harness.requests(profile.prompts, profile.samples))
    if gate.control_only:
        gate.record(planted(harness, samples))
        return
    from gates import choosing
    from gates.reference import Reference, chooses

    third = None
    if chooses(harness.folder):
        for verdict in choosing.verdicts(harness) if dtype == "bfloat16" else choosing.engine_in_fp32(harness):
            gate.third_party(verdict)
    else:
        third = Reference(harness.folder, dtype)
        gate.third_party(same_logprobs(samples, third.records(samples), "third party, engine", third.bound, ("rollout", "transformers")))
    changed = 0
    for step in range(profile.updates + 1):
        if step:
            stats = harness.train(samples, profile.samples)
            gate.happened(f"step {step}: rewards varied in groups", harness.varied)
            gate.happened(f"step {step}: training forward equals the no-grad pass", stats.ratio_off == 0)
            gate.happened(f"step {step}: every parameter got a gradient", not stats.without_gradient)
            update = harness.update()
            changed += update.changed
            gate.happened(f"step {step}: weights changed", update.changed)
            samples = harness.generate(harness.requests(profile.prompts, profile.samples, tag=f"u{step}-"))
        verdict = gate.record(same_logprobs(samples, harness.logprobs(samples), f"after {step} update(s)", gate.tier))
        if not verdict.green:
            return
    gate.control(f"a bit of {FLIPPED} weights of the final norm", first_token(samples), planted(harness, samples))
    if third is None:
        return
    greedy = harness.requests(2, tag="greedy", temperature=0.0)
    harness.pristine()
    gate.third_party(same_logprobs(*third.greedy(harness.generate(greedy)), "third party, greedy tokens", third.bound,
                                   ("chosen", "transformers' best")))
