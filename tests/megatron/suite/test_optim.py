"""Megatron's data parallel and optimizer on the CPU: right, repeatable, and stopped by a gradient that is not finite."""
from __future__ import annotations

import copy
import math

import pytest
import torch

import vime
from tests.megatron.suite import kit
from vime.megatron import forward, optim

SEQUENCES = kit.sequences([17, 30, 5])


def train(family, dtype, steps=3, recompute=False, **kwargs):
    """Weights, results and losses of a few steps from the same start."""
    model = kit.build(family, dtype, recompute)
    optimizer = optim.Optimizer(model, lr=1e-3, **kwargs)
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
