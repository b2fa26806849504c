"""A token's log-probability depends on its own sequence only: not on packing, grad, recompute or threads."""
from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vime
from tests.megatron.suite import kit
from vime.megatron import forward, hooks

SWEEP = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
lengths = st.lists(st.integers(2, 40), min_size=1, max_size=5)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("family", kit.FAMILIES)
@SWEEP
@given(lengths=lengths, seed=st.integers(0, 99), temperature=st.sampled_from([1.0, 0.7]), order=st.randoms(use_true_random=False))
def test_packed_equals_alone(family, dtype, lengths, seed, temperature, order):
    model = kit.shared(family, kit.DTYPES[dtype])
    sequences = kit.sequences(lengths, seed)
    shuffled = list(range(len(sequences)))
    order.shuffle(shuffled)
    with vime.enabled():
        packed = forward.token_logprobs_of(model, sequences, temperature)
        permuted = forward.token_logprobs_of(model, [sequences[i] for i in shuffled], temperature)
        for place, i in enumerate(shuffled):
            assert kit.same_bits(permuted[place], packed[i])
        for sequence, row in zip(sequences, packed, strict=True):
            (alone,) = forward.token_logprobs_of(model, [sequence], temperature)
            assert kit.same_bits(alone, row)
            assert kit.same_bits(hooks.token_logprobs(forward.single_logits(model, sequence)[:-1],
                                                      torch.tensor(sequence[1:]), temperature), row)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("family", kit.FAMILIES)
@SWEEP
@given(lengths=lengths, seed=st.integers(0, 99))
def test_grad_and_recompute_change_no_bit(family, dtype, lengths, seed):
    sequences = kit.sequences(lengths, seed)
    seen = []
    with vime.enabled():
        for recompute in (False, True):
            model = kit.shared(family, kit.DTYPES[dtype], recompute)
            model.zero_grad()
            without = forward.token_logprobs_of(model, sequences)
            with_grad = forward.token_logprobs_of(model, sequences, grad=True)
            for a, b in zip(without, with_grad, strict=True):
                assert kit.same_bits(a, b)
            torch.cat(with_grad).mean().backward()
            seen.append((torch.cat(without), {name: p.grad.clone() for name, p in model.named_parameters()}))
    assert kit.same_bits(seen[0][0], seen[1][0])
    for name, grad in seen[0][1].items():
        assert kit.same_bits(grad, seen[1][1][name]), f"gradient of {name} differs with recompute"


@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_threads_change_no_bit(dtype):
    model, sequences = kit.shared("qwen3", kit.DTYPES[dtype]), kit.sequences([33, 7, 21, 2])
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            model.zero_grad()
            with vime.enabled():
                rows = torch.cat(forward.token_logprobs_of(model, sequences, grad=True))
                rows.sum().backward()
            seen.append([rows, *(p.grad.clone() for p in model.parameters())])
    finally:
        torch.set_num_threads(before)
    for other in seen[1:]:
        assert all(kit.same_bits(a, b) for a, b in zip(seen[0], other, strict=True))


@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_recorded_layers_packed_equal_alone(dtype):
    model, sequences = kit.shared("qwen2", kit.DTYPES[dtype]), kit.sequences([13, 2, 29])
    with vime.enabled():
        packed = forward.record_layers(model, sequences)
        assert set(packed.outputs) == {"layers.0", "layers.1", "layers.2", "final_norm", "logits"}
        for i, sequence in enumerate(sequences):
            alone, mine = forward.record_layers(model, [sequence]), packed.sequence_T == i
            assert packed.token_T[mine].tolist() == sequence
            assert packed.position_T[mine].tolist() == list(range(len(sequence)))
            for name, rows in alone.outputs.items():
                assert rows.dtype is kit.DTYPES[dtype] and kit.same_bits(rows, packed.outputs[name][mine]), name


def test_a_flipped_weight_shows_from_its_layer_on():
    """Negative control: the comparison above must be able to fail, and at the planted place."""
    model, sequences = kit.build("llama", torch.float32), kit.sequences([19, 8])
    with vime.enabled():
        before = forward.record_layers(model, sequences)
        with torch.no_grad():
            weight = model.decoder.layers[1].mlp.linear_fc2.weight
            weight[5] = torch.nextafter(weight[5], torch.tensor(torch.inf))  # one weight alone may vanish in rounding
        after = forward.record_layers(model, sequences)
    differs = [name for name, rows in before.outputs.items() if not kit.same_bits(rows, after.outputs[name])]
    assert differs == ["layers.1", "layers.2", "final_norm", "logits"]


def test_a_changed_token_shows_in_its_own_sequence_only():
    model, sequences = kit.shared("llama", torch.bfloat16), kit.sequences([16, 16, 16])
    changed = [list(s) for s in sequences]
    changed[1][9] = (changed[1][9] + 1) % kit.VOCAB
    with vime.enabled():
        before, after = (forward.token_logprobs_of(model, s) for s in (sequences, changed))
    assert kit.same_bits(before[0], after[0]) and kit.same_bits(before[2], after[2])
    assert kit.same_bits(before[1][:8], after[1][:8]) and not kit.same_bits(before[1][8:], after[1][8:])


def test_stock_is_not_invariant_here_or_vime_has_nothing_to_do():
    """vime off, each sequence goes alone; on, the values are close to it but not the stock ones."""
    model, sequences = kit.shared("llama", torch.bfloat16), kit.sequences([31, 12])
    stock = torch.cat(forward.token_logprobs_of(model, sequences))
    with vime.enabled():
        aligned = torch.cat(forward.token_logprobs_of(model, sequences))
    assert not kit.same_bits(stock, aligned)
    assert float((stock - aligned).abs().max()) < 0.3


@pytest.mark.parametrize("vime_on", [True, False])
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_response_tokens_alone_have_the_bits_of_all(dtype, vime_on):
    """The LM head of the aligned run skips prompt rows; stock evaluates all and is cut afterwards. A weight's
    gradient adds over all rows, rows of zeros included, so there it is rounding that may differ."""
    sequences, first, grads = kit.sequences([13, 2, 29]), [5, 1, 28], []
    for skip in (True, False):
        model = kit.build("llama", kit.DTYPES[dtype])
        with vime.enabled() if vime_on else contextlib.nullcontext():
            found = forward.token_logprobs_of(model, sequences, 0.9, grad=True, first=first if skip else None)
            rows = found if skip else [row[f - 1:] for row, f in zip(found, first, strict=True)]
            torch.cat(rows).sum().backward()
        grads.append([torch.cat(rows).detach(), *(p.grad for p in model.parameters())])
        assert not model.output_layer._forward_pre_hooks
    assert kit.same_bits(grads[0][0], grads[1][0])
    for a, b in zip(*grads, strict=True):
        assert float((a - b).norm()) <= (2e-2 if dtype == "bfloat16" else 1e-6) * float(b.norm())


@pytest.mark.parametrize("first", [[0, 1], [1, 9], [1]])
def test_a_start_outside_the_sequence_is_named(first):
    with pytest.raises(ValueError), vime.enabled():
        forward.token_logprobs_of(kit.shared("llama", torch.float32), kit.sequences([4, 9]), first=first)


@pytest.mark.parametrize("bad", [[], [[1, 2], []], [[3]]])
def test_too_short_sequences_are_named(bad):
    with pytest.raises(ValueError, match="sequence"), vime.enabled():
        forward.token_logprobs_of(kit.shared("llama", torch.float32), bad)
