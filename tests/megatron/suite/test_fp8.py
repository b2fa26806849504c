"""Block FP8 in Megatron: which layers, where their blocks lie, the switch, and gradients that are the ordinary ones."""
from __future__ import annotations

import contextlib

import pytest
import torch

import vime
import vime.megatron
from tests.megatron.suite import kit
from vime import fp8 as decision
from vime.contract import ContractMismatch
from vime.megatron import faults, forward, fp8, gradients, hooks
from vime.megatron import model as models
from vime.megatron.faults_fp8 import FAULTS_FP8
from vime.megatron.patch import Refused
from vime.weights.families import family_for

FAMILIES = ("llama", "qwen2", "qwen3_moe", "glm_moe_dsa")


def build(family, dtype=torch.float32):
    vime.enable(fp8=True)
    model = kit.build(family, dtype)
    vime.megatron.contract(model)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_marks_are_what_the_weight_families_say(family):
    """Names and places of rows, from the units that load the weights: they know nothing of FP8."""
    model = build(family)
    plan = family_for(kit.huggingface(family)[1]).plan(kit.huggingface(family)[1])
    parameters = dict(model.named_parameters())
    marked = set()
    for unit in plan.units:
        block_N = fp8.blocks_of(parameters[unit.name]) if unit.name in parameters else None
        wanted = [decision.applies(ref.name) for ref in unit.hf]
        assert (block_N is not None) == all(wanted) == any(wanted), unit.name
        if block_N is None:
            continue
        marked |= {ref.name for ref in unit.hf}
        pieces = [(1000 * i + torch.arange(ref.shape[0]) // 128)[:, None].expand(ref.shape) for i, ref in enumerate(unit.hf)]
        rows = unit.to_megatron(pieces)[:, 0].tolist()
        pairs = set(zip(rows, block_N.tolist(), strict=True))
        assert len(pairs) == len(set(rows)) == len(set(block_N.tolist())), unit.name  # one to one
    assert {name + ".weight" for name in fp8.layers(model)} == marked
    for name, parameter in parameters.items():
        if any(part in name for part in ("embedding", "output_layer", "router", "indexer", "linear_kv_up_proj", "norm")):
            assert fp8.blocks_of(parameter) is None, name


@pytest.mark.parametrize(("heads", "groups", "dim"), [(6, 2, 16), (4, 4, 96), (8, 1, 64), (14, 2, 64)])
def test_blocks_of_fused_queries_keys_and_values(heads, groups, dim):
    from types import SimpleNamespace

    from vime.weights.families.units import Ref, Unit

    sizes = [heads * dim, groups * dim, groups * dim]
    pieces = [torch.stack([torch.full((n,), i), torch.arange(n) // 128], dim=1) for i, n in enumerate(sizes)]
    rows = Unit("x", tuple(Ref(str(i), (n, 2)) for i, n in enumerate(sizes)), groups=groups).to_megatron(pieces)
    config = SimpleNamespace(num_attention_heads=heads, num_query_groups=groups, kv_channels=dim)
    block_N = fp8.row_blocks(config, "self_attention.linear_qkv", sum(sizes))
    first = torch.tensor([0, -(-sizes[0] // 128), -(-sizes[0] // 128) - (-sizes[1] // 128)])
    assert torch.equal(block_N, first[rows[:, 0]] + rows[:, 1])
    with pytest.raises(Refused, match="rows where its config says"):
        fp8.row_blocks(config, "self_attention.linear_qkv", sum(sizes) + 1)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("family", ["qwen2", "glm_moe_dsa"])
def test_it_changes_the_forward_and_rows_do_not_see_the_packing(family, dtype):
    model, sequences = build(family, kit.DTYPES[dtype]), kit.sequences([23, 40, 9], 4)
    packed = forward.token_logprobs_of(model, sequences)
    for ids, together in zip(sequences, packed, strict=True):
        assert kit.same_bits(forward.token_logprobs_of(model, [ids])[0], together)
    assert hooks.counters()["fp8"] > 0
    vime.enable()
    without = forward.token_logprobs_of(model, sequences)
    assert all((a != b).any() for a, b in zip(packed, without, strict=True))
    assert not fp8.layers(model)  # and the marks are gone
    vime.enable(fp8=True)
    assert all(kit.same_bits(a, b) for a, b in zip(packed, forward.token_logprobs_of(model, sequences), strict=True))


@pytest.mark.parametrize("family", ["qwen2", "glm_moe_dsa"])
def test_the_training_forward_has_the_bits_of_the_no_grad_pass(family):
    for recompute in (False, True):
        vime.enable(fp8=True)
        model, sequences = kit.build(family, torch.bfloat16, recompute=recompute), kit.sequences([23, 40], 4)
        without = forward.token_logprobs_of(model, sequences)
        with_grad = forward.token_logprobs_of(model, sequences, grad=True)
        assert all(kit.same_bits(a, b.detach()) for a, b in zip(without, with_grad, strict=True))
        torch.cat(with_grad).sum().backward()
        lost = [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
        assert not lost or all("local_experts" in n for n in lost), lost


def test_the_switch_nests_and_is_refused_by_name():
    with pytest.raises(ValueError, match=r"FP8 is on and linear is not aligned"):
        vime.enable(exclude="linear", fp8=True)
    assert not vime.is_enabled()
    with vime.enabled(fp8=True):
        assert vime.is_fp8() and "fp8" not in vime.active_ops()
        with vime.enabled():
            assert not vime.is_fp8()
        assert vime.is_fp8()
    vime.enable(fp8=True)
    model = kit.build("qwen3_moe", torch.float32)
    with pytest.raises(Refused, match=r"fp8: block FP8 is on and moe is not aligned"):
        vime.enable(exclude="moe", fp8=True, model=model)
    assert vime.is_fp8() and vime.is_enabled("moe")  # what was active still is


def test_an_idle_route_and_an_unknown_layer_are_named(monkeypatch):
    vime.enable(fp8=True)
    model = kit.build("qwen2", torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(fp8, "decide", lambda names: False)
        forward.token_logprobs_of(model, kit.sequences([9]))
        with pytest.raises(AssertionError, match=r"never ran: .*fp8"):
            vime.assert_active()
    model.decoder.layers[1].mlp.extra = model.decoder.layers[1].mlp.linear_fc2
    del model.decoder.layers[1].mlp.linear_fc2
    with pytest.raises(Refused, match=r"which layer of a checkpoint mlp\.extra of decoder layer 1 is"):
        vime.megatron.contract(model)
    assert not fp8.layers(kit.shared("llama", torch.float32))


def test_the_contract_says_it_and_a_difference_is_named(monkeypatch):
    model = build("qwen2", torch.bfloat16)
    on = vime.megatron.contract(model)
    assert on.params["linear.fp8"].startswith("e4m3_x1x128_w128x128") and "cpu/linear/" in on.params["linear.fp8"]
    vime.enable()
    off = vime.megatron.contract(model)
    assert set(on.diff(off)) == {"params.linear.fp8", "params.linear.fp8_layers"}
    with pytest.raises(ContractMismatch, match=r"params\.linear\.fp8: trainer has 'e4m3.*engine has 'off'"):
        on.require_equal(off)
    vime.enable(fp8=True)
    names = fp8.layers(model)
    monkeypatch.setattr(fp8, "layers", lambda _: names[1:])
    assert set(on.diff(vime.megatron.contract(model))) == {"params.linear.fp8_layers"}


@pytest.mark.parametrize("name", FAULTS_FP8)
def test_a_planted_fault_changes_its_layer_and_can_be_taken_back(name):
    vime.enable(fp8=True)
    _, config = kit.huggingface("qwen2")  # wide enough for several blocks
    model = models.build_model({**config, "hidden_size": 192, "head_dim": 32, "intermediate_size": 300}, torch.float32)
    sequences = kit.sequences([20, 9], 3)
    clean = forward.record_layers(model, sequences)
    undo = faults.plant(model, name, 1)
    try:
        faulty = forward.record_layers(model, sequences)
    finally:
        undo()
    differs = [n for n, rows in clean.outputs.items() if not torch.equal(rows, faulty.outputs[n])]
    assert differs[0] == "layers.1"
    after = forward.record_layers(model, sequences)
    assert all(torch.equal(rows, after.outputs[n]) for n, rows in clean.outputs.items())
    vime.enable()
    with pytest.raises(faults.NoSuchFault, match="in block FP8"):
        faults.plant(model, name, 1)


@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_an_expert_has_the_gradients_of_the_ordinary_layer(dtype):
    """Kept apart by source rank or not: only the forward is quantised."""
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(7, n, generator=generator).to(kit.DTYPES[dtype]) for n in (150, 140))
    weight = torch.nn.Parameter(torch.randn(140, 150, generator=generator).to(kit.DTYPES[dtype]))
    seen = {}
    for on in (True, False):
        vime.enable(fp8=on)
        if on:
            setattr(weight, fp8._MARK, torch.arange(140) // 128)
        for counts in (None, (3, 0, 4)):
            leaf = x.clone().requires_grad_()
            with gradients.rows_from(counts) if counts else contextlib.nullcontext():
                y = gradients.linear(leaf, weight, None)
            seen[on, counts] = (y.detach(), *torch.autograd.grad(y, (leaf, weight), dy))
    for counts in (None, (3, 0, 4)):
        (y, *ours), (plain, *theirs) = seen[True, counts], seen[False, counts]
        assert not torch.equal(y, plain) and all(kit.same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
