"""Megatron's data parallel and optimizer on the CPU: right, repeatable, and stopped by a gradient that is not finite."""
from __future__ import annotations

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vime
from tests.megatron.suite import kit
from vime.megatron import forward, optim, stateless

SEQUENCES = kit.sequences([17, 30, 5])


def train(family, dtype, steps=3, recompute=False, lr=1e-3, **kwargs):
    """Weights, results and losses of a few steps from the same start."""
    model = kit.build(family, dtype, recompute)
    optimizer = optim.Optimizer(model, lr=lr, **kwargs)
    results, losses = [], []
    with vime.enabled():
        for _ in range(steps):
            optimizer.zero_grad()
            loss = -torch.cat(forward.token_logprobs_of(optimizer.ddp, SEQUENCES, grad=True)).mean()
            loss.backward()
            optimizer.finish_gradients()
            assert optimizer.parameters_without_gradient() == []
            results.append(optimizer.step())
            losses.append(float(loss.detach()))
    return {name: p.detach().clone() for name, p in model.named_parameters()}, results, losses


@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_rerun_and_recompute_give_the_same_bits(dtype):
    start = dict(kit.build("qwen3", kit.DTYPES[dtype]).named_parameters())
    runs = [train("qwen3", kit.DTYPES[dtype], recompute=recompute, weight_decay=0.01) for recompute in (False, False, True)]
    for weights, results, _ in runs[1:]:
        assert [r.grad_norm_bits for r in results] == [r.grad_norm_bits for r in runs[0][1]]
        assert all(kit.same_bits(w, runs[0][0][name]) for name, w in weights.items())
    # AdamW's first steps move every element by about lr, so no tensor may have stood still
    assert all(not torch.equal(w, start[name]) for name, w in runs[0][0].items())
    assert runs[0][2][-1] < runs[0][2][0]


def test_the_first_step_is_adamw():
    """Against AdamW's definition in float64: with zero state, one step is lr * (sign-like quotient + decay)."""
    lr, decay, eps = 1e-3, 0.01, 1e-8
    model = kit.build("llama", torch.float32)
    optimizer = optim.Optimizer(model, lr=lr, weight_decay=decay, clip_grad=0.0, eps=eps)
    before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    with vime.enabled():
        optimizer.zero_grad()
        (-torch.cat(forward.token_logprobs_of(optimizer.ddp, SEQUENCES, grad=True)).mean()).backward()
        optimizer.finish_gradients()
    grads = {name: p.main_grad.double().clone() for name, p in model.named_parameters()}
    result = optimizer.step()
    assert math.isclose(result.grad_norm, math.sqrt(sum(float(g.square().sum()) for g in grads.values())), rel_tol=1e-12)
    assert result.clip_coefficient == 1.0
    for name, p in model.named_parameters():
        w, g = before[name], grads[name]
        decayed = w * (1 - lr * (decay if w.dim() > 1 else 0.0))  # Megatron: no decay on norms and biases
        expected = decayed - lr * g / (g.abs() + eps)
        assert float((p.double() - expected).abs().max()) < 3e-7, name


def test_bf16_weights_follow_fp32_masters():
    """Steps too small for one bf16 rounding must add up in the master weights."""
    model = kit.build("llama", torch.bfloat16)
    optimizer = optim.Optimizer(model, lr=2e-5, clip_grad=0.0)
    weight = model.decoder.final_layernorm.weight
    before = weight.detach().clone()
    with vime.enabled():
        for _ in range(120):
            optimizer.zero_grad()
            torch.cat(forward.token_logprobs_of(optimizer.ddp, SEQUENCES[:1], grad=True)).mean().backward()
            optimizer.finish_gradients()
            optimizer.step()
    assert weight.dtype is torch.bfloat16 and weight.main_param.dtype is torch.float32
    assert torch.equal(weight.main_param.bfloat16(), weight)
    moved = (weight.float() - before.float()).abs()
    assert float(moved.max()) > 0.5 * 120 * 2e-5  # each single step is far below half a bf16 ulp of 1.0 (0.002)


def test_clipping_scales_to_the_norm():
    _, loose, _ = train("llama", torch.float32, steps=1, clip_grad=0.0)
    _, tight, _ = train("llama", torch.float32, steps=1, clip_grad=0.01)
    assert loose[0].grad_norm_bits == tight[0].grad_norm_bits
    assert math.isclose(tight[0].clip_coefficient * tight[0].grad_norm, 0.01, rel_tol=1e-3)


def test_the_norm_has_one_order():
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(n, generator=generator) * 10.0**e for n, e in ((3_000_001, 0), (7, 3), (1, -5))]
    before, seen = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            seen.add(tuple(optim.sum_of_squares(g) for g in grads))
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 1
    for grad, found in zip(grads, seen.pop(), strict=True):
        assert math.isclose(found, math.fsum(x * x for x in grad.double().tolist()), rel_tol=1e-14)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_a_gradient_that_is_not_finite_changes_nothing(dtype, bad):
    model = kit.build("llama", kit.DTYPES[dtype])
    optimizer = optim.Optimizer(model, lr=1e-3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.zero_grad()
    for p in model.parameters():
        p.main_grad.fill_(1e-3)
    model.decoder.layers[2].mlp.linear_fc1.weight.main_grad[3, 4] = bad
    optimizer.finish_gradients()
    with pytest.raises(optim.TrainingDiverged, match=r"decoder\.layers\.2\.mlp\.linear_fc1\.weight is not finite .1 param"):
        optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_state_round_trip():
    model = kit.build("llama", torch.bfloat16)
    optimizer = optim.Optimizer(model, lr=1e-3)
    for p in model.parameters():
        p.main_grad.fill_(1e-3)
    optimizer.finish_gradients()
    optimizer.step()
    with pytest.raises(RuntimeError, match="finish_gradients"):
        optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    other = kit.build("llama", torch.bfloat16)
    other.load_state_dict(model.state_dict())
    again = optim.Optimizer(other, lr=1e-3)
    again.load_state_dict(state)
    for side in (optimizer, again):
        for p in side.ddp.module.parameters():
            p.main_grad.fill_(-2e-3)
        side.finish_gradients()
        side.step()
    assert all(kit.same_bits(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def nearest(exact, dtype):
    """``exact`` (Fraction) rounded to nearest, ties to even, without torch's own conversion."""
    if dtype is torch.float32:
        return float(np.float32(exact.numerator / exact.denominator))  # a quotient of what float64 holds exactly
    if exact == 0:
        return 0.0
    step = Fraction(2) ** (math.floor(math.log2(abs(exact))) - 7)
    return float(round(exact / step) * step)  # Python rounds halves to even


@pytest.mark.parametrize("dtype", kit.DTYPES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999), exponent=st.integers(-12, 2), decay=st.sampled_from([0.0, 0.1]), coefficient=st.sampled_from([1.0, 0.3]))
def test_the_stateless_update_is_its_equation(dtype, seed, exponent, decay, coefficient):
    """Every operation in fp32, in that order, one rounding at the end; whatever slices the tensor is updated in."""
    generator, lr = torch.Generator().manual_seed(seed), 0.125
    weight = torch.nn.Parameter((torch.randn(7, 9, generator=generator) * 0.1).to(kit.DTYPES[dtype]))
    weight.main_grad = (torch.randn(7, 9, generator=generator) * 2.0**exponent).to(kit.DTYPES[dtype])
    before, grad = weight.detach().clone(), weight.main_grad.clone()
    other = torch.nn.Parameter(before.clone())
    other.main_grad = grad.clone()
    moved, lost = stateless.StatelessSGD([(weight, True)], lr, decay).step(coefficient)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stateless, "_SLICE", 5)
        assert stateless.StatelessSGD([(other, True)], lr, decay).step(coefficient) == (moved, lost)
    assert kit.same_bits(weight, other) and kit.same_bits(weight.main_grad, grad)
    f32 = np.float32
    expected, still = [], 0
    for w, g in zip(before.view(-1).tolist(), grad.view(-1).tolist(), strict=True):
        change = f32(g) * f32(coefficient)
        if decay:
            change = change + f32(w) * f32(decay)
        change = change * f32(lr)
        new = nearest(Fraction(float(f32(w) - change)), kit.DTYPES[dtype])
        expected.append(new)
        still += bool(change != 0 and new == w)
    assert weight.view(-1).tolist() == expected and (moved, lost) == (63, still)


def test_what_is_below_half_a_unit_is_lost_and_counted():
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    weight.main_grad = torch.tensor([2.0**-9, 2.0**-8, 2.0**-7], dtype=torch.bfloat16)  # a unit below 1 is 2**-8
    sgd = stateless.StatelessSGD([(weight, False)], 1.0)
    for _ in range(3):
        found = sgd.step()
    assert weight.tolist() == [1.0, 1 - 3 * 2.0**-8, 1 - 3 * 2.0**-7] and found == (3, 1)
    assert sgd.state_dict() == {"optimizer": "sgd"}
    sgd.load_state_dict({"optimizer": "sgd"})
    with pytest.raises(stateless.OtherOptimizer, match=r"the state holds optimizer, fp32.*Go on with the optimizer that wrote it"):
        sgd.load_state_dict({"optimizer": {}, "fp32": []})


def test_a_weight_that_several_ranks_hold_is_counted_once(monkeypatch):
    """Two data parallel ranks, an expert on each of them and the rest on both."""
    from megatron.core import parallel_state

    counts = []
    for rank in range(2):
        monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda rank=rank: rank)
        monkeypatch.setattr(parallel_state, "get_expert_data_parallel_rank", lambda: 0)
        shared, expert = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(5))
        expert.allreduce = False
        shared.main_grad, expert.main_grad = torch.tensor([0.0, 1.0, 2.0**-30]), torch.ones(5)
        counts.append(stateless.StatelessSGD([(shared, False), (expert, False)], 1.0, counted=optim.first_replica).step())
        assert shared.tolist() == [1.0, 0.0, 1.0] and not expert.any()  # whether it counts or not
    assert counts == [(7, 1), (5, 0)]


@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_a_stateless_run_learns_and_repeats(dtype):
    start = dict(kit.build("qwen3", kit.DTYPES[dtype]).named_parameters())
    runs = [train("qwen3", kit.DTYPES[dtype], kind="sgd", clip_grad=0.0, lr=0.02, recompute=r, fp32_gradients=False) for r in (False, False, True)]
    weights, results, losses = runs[0]
    for again, others, _ in runs[1:]:
        assert [r.grad_norm_bits for r in others] == [r.grad_norm_bits for r in results]
        assert all(kit.same_bits(w, again[name]) for name, w in weights.items())
    assert losses[-1] < losses[0] and all(not torch.equal(w, start[name]) for name, w in weights.items() if w.dim() > 1)
    assert all(0 <= r.lost_updates < r.updates for r in results)
    assert train("qwen3", kit.DTYPES[dtype], steps=1)[1][0].updates is None


def test_gradients_in_bf16_are_those_in_fp32_rounded():
    """After one backward on one rank there is one rounding, and it is the backward's own."""
    found = []
    for fp32 in (True, False):
        optimizer = optim.Optimizer(kit.build("llama", torch.bfloat16), lr=1.0, kind="sgd", fp32_gradients=fp32)
        with vime.enabled():
            optimizer.zero_grad()
            torch.cat(forward.token_logprobs_of(optimizer.ddp, SEQUENCES, grad=True)).mean().backward()
            optimizer.finish_gradients()
        found.append({n: p.main_grad for n, p in optimizer.ddp.module.named_parameters()})
    wide, narrow = found
    assert {g.dtype for g in wide.values()} == {torch.float32} and {g.dtype for g in narrow.values()} == {torch.bfloat16}
    assert all(torch.equal(g.bfloat16(), narrow[name]) for name, g in wide.items())


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_gradients_that_are_given_up_between_steps_change_no_bit(kind, monkeypatch):
    monkeypatch.setattr(optim, "sum_of_squares", lambda g: float(g.double().square().sum()))  # numpy pins memory that it has seen
    weights = []
    for release in (False, True):
        model = kit.build("llama", torch.bfloat16)
        optimizer = optim.Optimizer(model, lr=1e-2, kind=kind, fp32_gradients=False)
        with vime.enabled():
            for _ in range(3):
                optimizer.zero_grad()
                torch.cat(forward.token_logprobs_of(optimizer.ddp, SEQUENCES, grad=True)).mean().backward()
                optimizer.finish_gradients()
                optimizer.step()
                if release:
                    optimizer.release_gradients()
                    optimizer.release_gradients()  # again: nothing left to give up
                    assert all(b.grad_data.untyped_storage().size() == 0 for b in optimizer.ddp.buffers)
                    with pytest.raises(RuntimeError, match="were given up"):
                        optimizer.gradient_digests()
        weights.append(dict(model.named_parameters()))
    assert all(kit.same_bits(w, weights[1][name]) for name, w in weights[0].items())
