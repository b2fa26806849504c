"""Both specs of Megatron, the same bits: Megatron's own wrappers, over a stand-in for TransformerEngine."""
from __future__ import annotations

import pytest
import torch

import vime
from tests.megatron.suite import kit
from vime.megatron import forward, hooks
from vime.weights.megatron_state import canonical

BOTH = ("local", "transformer_engine")
LENGTHS = [9, 1, 17, 30]


def build(family: str, impl: str, dtype: torch.dtype = torch.float32, **options):
    return kit.build(family, dtype, transformer_impl=impl, **options)


def run(model, sequences) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(logits, gradients by the local spec's names) of a loss that weighs every logit differently."""
    model.zero_grad()
    logits_TV = forward.packed_logits(model, sequences)
    weights_TV = torch.randn(logits_TV.shape, generator=torch.Generator().manual_seed(5)).to(logits_TV.dtype)
    (logits_TV * weights_TV).float().sum().backward()
    return logits_TV.detach(), {canonical(name): p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_same_bits_forward_and_backward(family: str, dtype: str) -> None:
    sequences = kit.sequences(LENGTHS)
    with vime.enabled():
        (want, want_grads), (got, got_grads) = (run(build(family, impl, kit.DTYPES[dtype]), sequences) for impl in BOTH)
        hooks.assert_active(op for op in vime.active_ops() if op != "logprob")
    assert kit.same_bits(got, want)
    assert got_grads.keys() == want_grads.keys()
    assert all(kit.same_bits(got_grads[name], want_grads[name]) for name in want_grads)
    assert all(bool(grad.any()) for grad in want_grads.values())


def test_every_layer_output_is_the_same_and_so_is_a_sequence_alone() -> None:
    sequences = kit.sequences(LENGTHS)
    with vime.enabled():
        local, engine = (build("qwen3", impl) for impl in BOTH)
        a, b = forward.record_layers(local, sequences), forward.record_layers(engine, sequences)
        alone = forward.record_layers(engine, sequences[2:3])
    assert a.outputs.keys() == b.outputs.keys() and len(a.outputs) > 3
    for name, rows in a.outputs.items():
        assert kit.same_bits(rows, b.outputs[name]), name
        assert kit.same_bits(rows[10:27], alone.outputs[name]), name


def test_batched_form_and_recompute() -> None:
    (sequence,) = kit.sequences([21])
    with vime.enabled():
        want, engine = (forward.single_logits(build("llama", impl), sequence) for impl in BOTH)
        assert kit.same_bits(engine, want)
        plain, again = (run(build("llama", "transformer_engine", recompute=on), [sequence]) for on in (False, True))
    assert kit.same_bits(plain[0], again[0])
    assert all(kit.same_bits(plain[1][name], again[1][name]) for name in plain[1])


def test_it_is_the_routes_that_make_them_equal() -> None:
    """Without them the stand-in's modules give other numbers in every layer, and each module is as before."""
    from megatron.core.extensions import transformer_engine as extension
    from transformer_engine.pytorch.module.rmsnorm import RMSNorm

    classes = (extension.TELinear, extension.TELayerNormColumnParallelLinear, extension.TEGroupedLinear, extension.TEDotProductAttention)
    before = [cls.forward for cls in classes]
    model, sequence = build("llama", "transformer_engine"), kit.sequences([12])
    with vime.enabled():
        aligned = forward.logits_of(model, sequence)
        assert [cls.forward for cls in classes] != before and "forward" in vars(RMSNorm)
    assert [cls.forward for cls in classes] == before and "forward" not in vars(RMSNorm)
    assert not kit.same_bits(forward.logits_of(model, sequence), aligned)


def test_a_flipped_bit_in_a_fused_norm_is_seen() -> None:
    sequences = kit.sequences(LENGTHS)
    with vime.enabled():
        model = build("llama", "transformer_engine")
        before = forward.packed_logits(model, sequences)
        weight = model.decoder.layers[1].mlp.linear_fc1.layer_norm_weight
        with torch.no_grad():
            weight.view(torch.int32)[3] ^= 1 << 20
        assert not torch.equal(forward.packed_logits(model, sequences), before)


def test_counts_say_what_ran() -> None:
    with vime.enabled():
        forward.packed_logits(build("llama", "transformer_engine"), kit.sequences([5]))
    layers = 3
    assert hooks.counters() == {"embedding": 1, "linear": 4 * layers + 1, "norm": 2 * layers + 1, "rope": 2 * layers, "attention": layers,
                                "activation": layers}


def test_weights_have_the_same_names_outside() -> None:
    from vime.weights.bridge import fused_names
    from vime.weights.megatron_state import named_weights

    with vime.enabled():
        for family in ("qwen3", "qwen3_moe"):
            local, engine = ({name: t.shape for name, t in named_weights(build(family, impl))} for impl in BOTH)
            assert {canonical(name): shape for name, shape in engine.items()} == local
            assert set(fused_names(local).values()) == engine.keys()


def test_optimizer_steps_are_the_same() -> None:
    from vime.megatron.optim import Optimizer

    found = []
    with vime.enabled():
        for impl in BOTH:
            model = build("qwen3", impl, torch.bfloat16)
            optimizer = Optimizer(model, lr=1e-2, weight_decay=0.1)
            for seed in range(2):
                optimizer.zero_grad()
                logits_TV = forward.packed_logits(optimizer.ddp, kit.sequences([13, 8], seed))
                logits_TV.float().square().mean().backward()
                optimizer.finish_gradients()
                digests = optimizer.gradient_digests()
                result = optimizer.step()
            found.append((digests, result.grad_norm_bits, {canonical(n): p.detach().clone() for n, p in model.named_parameters()}))
    (want, want_norm, want_weights), (got, got_norm, got_weights) = found
    assert got == want and got_norm == want_norm
    assert all(kit.same_bits(got_weights[name], weight) for name, weight in want_weights.items())
