"""The real model: SmolLM2-135M against unpatched ``transformers`` in float64, and packed against alone."""
from __future__ import annotations

import json

import pytest
import torch

import vime
from tests.megatron.suite import kit
from vime import smollm2
from vime.megatron import forward
from vime.megatron import model as models

TEXTS = ("The capital of France is Paris, and the capital of Germany is Berlin.",
         "Tom has 3 apples. He buys 4 more and gives 2 away. How many apples does he have? He has 5 apples.")


@pytest.fixture(scope="module")
def checkpoint():
    return smollm2.ensure()


@pytest.fixture(scope="module")
def sequences(checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return [tokenizer(text).input_ids for text in TEXTS]


def load(checkpoint, dtype):
    from safetensors.torch import load_file

    config = json.loads((checkpoint / "config.json").read_text())
    model = models.build_model(config, dtype, initialize=False)
    models.load_weights(model, load_file(checkpoint / "model.safetensors"), config)
    return model


def test_fp32_is_as_near_to_float64_as_transformers_is(checkpoint, sequences):
    from transformers import AutoModelForCausalLM

    with vime.enabled():
        ours = forward.record_layers(load(checkpoint, torch.float32), sequences).outputs["logits"].double()
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        theirs = torch.cat([reference(torch.tensor([s])).logits[0] for s in sequences]).double()
        reference = reference.double()
        exact = torch.cat([reference(torch.tensor([s])).logits[0] for s in sequences])
    error, their_error = (float((x - exact).abs().max()) for x in (ours, theirs))
    assert error <= 2 * their_error and error < 1e-3, (error, their_error)
    assert torch.equal(ours.argmax(-1), exact.argmax(-1))


def test_bf16_packed_equals_alone_in_every_layer(checkpoint, sequences):
    model = load(checkpoint, torch.bfloat16)
    with vime.enabled():
        packed = forward.record_layers(model, sequences)
        assert len(packed.outputs) == 32
        for i, sequence in enumerate(sequences):
            alone = forward.record_layers(model, [sequence])
            for name, rows in alone.outputs.items():
                assert kit.same_bits(rows, packed.outputs[name][packed.sequence_T == i]), name
