"""Unpatched ``transformers`` in float64 as referee: Megatron under vime errs no more than transformers in fp32 does."""
from __future__ import annotations

import copy

import pytest
import torch

import vime
from tests.megatron.suite import kit
from tests.weights import conversion
from vime.megatron import forward


@pytest.mark.parametrize("family", kit.FAMILIES)
def test_logits_agree_with_transformers(family):
    reference, _ = kit.huggingface(family)
    exact = copy.deepcopy(reference).double()
    model, sequences = kit.shared(family, torch.float32), kit.sequences([60, 7, 121], seed=5)
    with vime.enabled(), torch.no_grad():
        ours = forward.packed_logits(model, sequences).double()
    theirs_64 = torch.cat([exact(torch.tensor([s])).logits[0] for s in sequences]).detach()
    theirs_32 = torch.cat([reference(torch.tensor([s])).logits[0] for s in sequences]).detach().double()
    error, their_error = (float((x - theirs_64).abs().max()) for x in (ours, theirs_32))
    assert error <= 3 * their_error, (error, their_error)
    assert torch.equal(ours.argmax(-1), theirs_64.argmax(-1))


@pytest.mark.parametrize("family", kit.FAMILIES)
def test_gradients_agree_with_transformers(family):
    """Through the whole model, in float64 on the other side: relative error of every gradient is fp32 rounding."""
    reference, config = kit.huggingface(family)
    exact = copy.deepcopy(reference).double()
    model, (sequence,) = kit.build(family, torch.float32), kit.sequences([47], seed=3)
    with vime.enabled():
        torch.cat(forward.token_logprobs_of(model, [sequence], grad=True)).mean().backward()
    logits = exact(torch.tensor([sequence])).logits[0, :-1]
    torch.log_softmax(logits, -1).gather(1, torch.tensor(sequence[1:])[:, None]).mean().backward()
    grads = {name: p.grad for name, p in exact.named_parameters()}
    if config["tie_word_embeddings"]:
        grads["lm_head.weight"] = grads["model.embed_tokens.weight"]
    _, expected = conversion.to_megatron(grads, config)
    for name, parameter in model.named_parameters():
        error = float((parameter.grad.double() - expected[name]).norm() / expected[name].norm())
        assert error < 2e-5, f"{name}: {error:.2e}"


def test_a_wrong_rotary_base_is_seen():
    """Negative control of the referee: a model that computes something else must not pass."""
    from vime.megatron.routes.rope import RopeParameters, declare

    reference, _ = kit.huggingface("llama")
    model, (sequence,) = kit.build("llama", torch.float32), kit.sequences([60], seed=5)
    declare(model.rotary_pos_emb, RopeParameters(dim=8, base=20000.0))
    with vime.enabled(), torch.no_grad():
        ours = forward.packed_logits(model, [sequence])
    assert float((ours - reference(torch.tensor([sequence])).logits[0]).abs().max()) > 1e-3
