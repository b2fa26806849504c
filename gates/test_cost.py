"""Gate: what alignment costs, measured against the unaligned run in alternating pairs on the same input.

The unaligned run is also the strongest control there is: with vime off the same comparison has to fail, else the input
was too easy to show anything.
"""
from __future__ import annotations

import time

import pytest

from alignment.verdict import Place
from gates.judging import same_logprobs

PAIRS = 3


def seconds(work):
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@pytest.mark.gate_cost
def test_cost(gate, harness, lab, dtype):
    stock = lab.harness(gate.device, dtype, ops=())
    requests = harness.requests(harness.profile.prompts, harness.profile.samples, tag="cost")
    samples = harness.generate(requests)
    theirs = stock.generate(requests)
    off = same_logprobs(theirs, stock.logprobs(theirs), "vime off")
    parts = {
        "rollout": lambda h: h.generate(requests),
        "log-probs": lambda h: h.logprobs(samples),
        "training step": lambda h: h.train(samples, harness.profile.samples),
    }
    if gate.control_only:
        slow = [10 * seconds(lambda: harness.generate(requests)) for _ in range(2)]
        gate.cost_max = gate.cost_max or 2.0
        gate.cost(slow, [s / 10 for s in slow], "rollout")
        return
    gate.control("vime off", Place(), off, anywhere=True)
    for part, work in parts.items():
        for h in (harness, stock):
            work(h)  # warm
        times = [(seconds(lambda w=work: w(harness)), seconds(lambda w=work: w(stock))) for _ in range(PAIRS)]
        gate.cost([a for a, _ in times], [b for _, b in times], part)
    lab.drop(stock)
