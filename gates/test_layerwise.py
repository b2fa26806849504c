"""Gate: the output of every layer is the same on both sides, hidden state plus residual, in the model's dtype.

Recorded at each framework's own module boundary. The terminal position of a request is excluded: its token was
sampled last and the engine never computes it. Controls: the lowest bit that matters of one weight of each kind of
tensor, flipped in the trainer's middle layer; the gate has to fail at that layer.
"""
from __future__ import annotations

import pytest

from alignment.verdict import Place
from gates.judging import same_layers

KINDS = ("input_layernorm.weight", "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight",
         "pre_mlp_layernorm.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight")


def planted(harness, samples, engine, clean, kind, layer):
    """The verdict with the lowest bit flipped that changes the trainer's own output: a lower one vanishes in rounding."""
    bits = (0, 2, 4, 6) if harness.dtype == "bfloat16" else (0, 6, 12, 18, 22)
    for bit in bits:
        with harness.flipped(f"decoder.layers.{layer}.{kind}", index=0, bit=bit):
            faulty = harness.trainer_layers(samples)
        if not same_layers(clean, faulty, "trainer against itself").green:
            return bit, same_layers(engine, faulty, "layers")
    pytest.fail(f"no bit of {kind} of layer {layer} changes the trainer's output: the fault could not be planted")


@pytest.mark.gate_layerwise
def test_layerwise(gate, harness):
    requests = harness.requests(harness.profile.prompts, tag="layers")
    samples, engine = harness.engine_layers(requests)
    trainer = harness.trainer_layers(samples)
    layer = sum(n.startswith("layers.") for n in trainer.outputs) // 2
    if gate.control_only:
        gate.record(planted(harness, samples, engine, trainer, KINDS[-1], layer)[1])
        return
    gate.describe(excluded=f"the terminal position of each of {len(samples)} requests")
    if not gate.record(same_layers(engine, trainer, "layers", gate.tier)).green:
        return
    for kind in KINDS:
        bit, said = planted(harness, samples, engine, trainer, kind, layer)
        gate.control(f"bit {bit} of {kind}", Place(layer=layer), said)
