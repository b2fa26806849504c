"""Router and experts in Megatron's own modules: one slot order, rows that do not see each other, refusals by name."""
from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vime
from tests.megatron.suite import kit
from vime import ops
from vime.megatron import Refused, check, experts, faults, forward, gradients, hooks
from vime.megatron.dispatch.dispatcher import SlotOrderDispatcher

SWEEP = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.fixture(autouse=True)
def vime_on(vime_off):
    with vime.enabled():
        yield


def first_moe(model):
    return next(m for m in model.modules() if type(m).__name__ == "MoELayer")


@SWEEP
@given(seed=st.integers(0, 99), tokens=st.integers(1, 9), ties=st.booleans(), bf16=st.booleans())
def test_the_router_is_the_same_with_and_without_grad(seed, tokens, ties, bf16):
    """Slots run from the best down and ties go to the lower expert, in both modes; Megatron sorts with grad only."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    layer = first_moe(kit.build("deepseek_v3", dtype))
    x = torch.randn(tokens, 1, 48, generator=torch.Generator().manual_seed(seed)).to(dtype)
    with torch.no_grad():
        if ties:
            layer.router.weight[4:] = layer.router.weight[:4]
            layer.router.expert_bias.zero_()
        weights, ids = layer.router(x)
    with_grad, again = layer.router(x.requires_grad_())
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32 and torch.equal(ids, again) and torch.equal(weights, with_grad)
    assert with_grad.requires_grad
    if ties:
        for row in ids.tolist():
            assert all(row.index(e - 4) < row.index(e) for e in row if e >= 4 and e - 4 in row)
            assert all(e - 4 in row[:row.index(e)] for e in row if e >= 4)


@pytest.mark.parametrize("family", kit.SPARSE)
def test_weights_are_those_of_megatrons_own_router(family):
    """Vime's route against the stock router in fp32: the same experts, the same weights up to rounding."""
    layer = first_moe(kit.build(family, torch.float32))
    x = torch.randn(40, 1, 48, generator=torch.Generator().manual_seed(7))
    weights, ids = layer.router(x)
    vime.disable()
    probs, chosen = layer.router(x)
    mine = torch.zeros_like(probs).scatter_(1, ids, weights)
    assert torch.equal(mine > 0, chosen) and float((mine - probs).abs().max()) < 1e-6


@pytest.mark.parametrize("dtype", kit.DTYPES)
@SWEEP
@given(counts=st.lists(st.integers(0, 6), min_size=8, max_size=8), seed=st.integers(0, 99))
def test_a_row_does_not_see_how_many_its_expert_got(dtype, counts, seed):
    layer = first_moe(kit.shared("qwen3_moe", kit.DTYPES[dtype]))
    rows = torch.randn(sum(counts), 48, generator=torch.Generator().manual_seed(seed)).to(kit.DTYPES[dtype])
    with torch.no_grad():
        together, bias = layer.experts(rows, torch.tensor(counts)[:, None], None)
        assert bias is None and together.shape == rows.shape
        owner = [e for e, n in enumerate(counts) for _ in range(n)]
        for i, e in enumerate(owner):
            alone, _ = layer.experts(rows[i:i + 1], torch.eye(8, dtype=torch.int64)[e][:, None], None)
            assert kit.same_bits(alone[0], together[i])


@pytest.mark.parametrize("dtype", kit.DTYPES)
@SWEEP
@given(counts=st.lists(st.integers(0, 9), min_size=4, max_size=4), seed=st.integers(0, 99), bf16_sums=st.booleans())
def test_a_weight_gradient_is_kept_apart_by_source(dtype, counts, seed, bf16_sums):
    """Each partial sum has the bits of a gradient over that source's rows alone; the input's gradient sees no sources."""
    g, dtype = torch.Generator().manual_seed(seed), kit.DTYPES[dtype]
    x, dy = (torch.randn(sum(counts), n, generator=g).to(dtype) for n in (16, 12))
    weight = torch.nn.Parameter(torch.randn(12, 16, generator=g).to(dtype))
    weight.main_grad = torch.zeros(12, 16, dtype=dtype if bf16_sums else torch.float32)
    x.requires_grad_()
    with gradients.rows_from(counts):
        gradients.linear(x, weight, None).backward(dy)
    assert weight.grad is None
    parts, start = torch.cat([weight.main_grad[None], weight.vime_partials]), 0
    at_once = torch.nn.Parameter(weight.detach().clone())  # as in a step of one microbatch: no partial sums, the same additions
    at_once.main_grad, at_once.vime_at_once = torch.full_like(weight.main_grad, 7.0), 0.125
    with gradients.rows_from(counts):
        y = gradients.linear(x.detach().clone().requires_grad_(), at_once, None)
    y.backward(dy, retain_graph=True)
    assert not hasattr(at_once, "vime_partials")
    assert kit.same_bits(at_once.main_grad, (gradients._sum_in_order(parts.float()) * 0.125).to(parts.dtype))
    with pytest.raises(RuntimeError, match="a second backward"):
        y.backward(dy)
    for source, n in enumerate(counts):
        plain = torch.nn.Parameter(weight.detach().clone())
        xs = x.detach()[start:start + n].clone().requires_grad_()
        gradients.linear(xs, plain, None).backward(dy[start:start + n])
        expected = plain.grad.float() if n else torch.zeros(12, 16)
        assert torch.equal(parts[source].float(), expected)
        if n:
            assert kit.same_bits(xs.grad, x.grad[start:start + n])
        start += n
    want = dy.double().t() @ x.detach().double()
    assert float((parts.double().sum(0) - want).norm()) <= (2e-2 if dtype is torch.bfloat16 else 1e-5) * float(want.norm()) + 1e-12


def test_without_data_parallel_the_gradient_is_an_ordinary_one():
    """It lies in ``.grad``, bit for bit the sum, by rising source, of what each source's rows give alone."""
    weight, *alone = (torch.nn.Parameter(w) for w in torch.randn(1, 3, 4).repeat(3, 1, 1).unbind())
    x, dy = torch.randn(5, 4), torch.randn(5, 3)
    with gradients.rows_from([2, 3]):
        gradients.linear(x, weight, None).backward(dy)
    for source, rows in zip(alone, (slice(0, 2), slice(2, 5)), strict=True):
        ops.linear(x[rows], source).backward(dy[rows])
    assert kit.same_bits(weight.grad, alone[0].grad + alone[1].grad)


def refused(model) -> str:
    with pytest.raises(Refused) as caught:
        forward.packed_logits(model, [[1, 2, 3]])
    return str(caught.value)


@pytest.mark.parametrize(("field", "value", "text"), [
    ("moe_router_dtype", "fp64", "moe_router_dtype is 'fp64'; aligned is 'fp32': the router runs in FP32 on both sides"),
    ("moe_router_dtype", None, "moe_router_dtype is None"),
    ("moe_expert_capacity_factor", 1.25, "moe_expert_capacity_factor is 1.25"),
    ("moe_pad_expert_input_to_capacity", True, "moe_pad_expert_input_to_capacity is True"),
    ("moe_token_dropping", True, "moe_token_dropping is True"),
    ("moe_input_jitter_eps", 0.1, "moe_input_jitter_eps is 0.1"),
    ("moe_z_loss_coeff", 1e-3, "moe_z_loss_coeff is 0.001"),
    ("moe_shared_expert_overlap", True, "moe_shared_expert_overlap is True"),
    ("moe_router_force_load_balancing", True, "moe_router_force_load_balancing is True"),
    ("moe_enable_routing_replay", True, "moe_enable_routing_replay is True"),
    ("pipeline_model_parallel_size", 2, "pipeline_model_parallel_size is 2"),
    ("expert_tensor_parallel_size", 2, "expert_tensor_parallel_size is 2"),
    ("tensor_model_parallel_size", 2, "tensor_model_parallel_size: is 2"),
    ("context_parallel_size", 2, "context_parallel_size: is 2"),
])
def test_settings_are_refused_by_name(field, value, text):
    model = kit.build("qwen3_moe", torch.float32)
    setattr(model.config, field, value)
    assert text in refused(model)


def test_dropout_and_auxiliary_losses_are_refused():
    model = kit.build("qwen3_moe", torch.float32)
    model.config.hidden_dropout = 0.1
    assert "hidden_dropout: is 0.1 in train mode" in refused(model)
    model = kit.build("qwen3_moe", torch.float32)
    for module in model.modules():
        if type(module).__name__ == "TopKRouter":
            module.routing_type, module.config.moe_aux_loss_coeff = "aux_loss", 0.01
    assert "aux_loss with coefficient 0.01 has no route" in refused(model)
    for module in model.modules():
        if type(module).__name__ == "TopKRouter":
            module.routing_type = "sinkhorn"
    assert "moe_router_load_balancing_type is 'sinkhorn'" in refused(model)


def test_stock_dispatchers_are_refused_and_can_be_exchanged():
    vime.disable()
    model = kit.build("qwen3_moe", torch.float32)
    assert type(first_moe(model).token_dispatcher).__name__ == "MoEAlltoAllTokenDispatcher"
    vime.enable()
    text = refused(model)
    assert "MoEAlltoAllTokenDispatcher" in text and "depends on which experts share a rank" in text
    assert experts.use_slot_order(model) == 2 and isinstance(first_moe(model).token_dispatcher, SlotOrderDispatcher)
    mine = forward.packed_logits(model, [[1, 2, 3]])
    assert torch.equal(mine, forward.packed_logits(kit.build("qwen3_moe", torch.float32), [[1, 2, 3]]))
    with faults.stock_dispatchers(model):
        assert any("MoEAlltoAllTokenDispatcher" in str(r) for r in check.refusals(model, hooks.COVERED))
    assert isinstance(first_moe(model).token_dispatcher, SlotOrderDispatcher)


def test_a_router_that_is_not_routed_is_told_by_the_dispatcher():
    model = kit.build("qwen3_moe", torch.float32)
    with vime.enabled(exclude=["moe"]), pytest.raises(Refused, match="the router did not run through vime's route"):
        forward.packed_logits(model, [[1, 2, 3]])


def test_experts_that_do_not_divide():
    config = kit.huggingface("qwen3_moe")[1]
    experts.check_spread(config, 4)
    with pytest.raises(experts.ExpertsDoNotDivide, match="8 experts can't be spread evenly over 3 ranks"):
        experts.check_spread(config, 3)
    with pytest.raises(experts.ExpertsDoNotDivide, match="a qwen3 model, which has no experts"):
        experts.check_spread(kit.huggingface("qwen3")[1], 2)


def test_names_of_experts_in_the_model():
    name = "decoder.layers.3.mlp.experts.local_experts.1.linear_fc1.weight"
    there = experts.global_name(name, 2, 4)
    assert ".local_experts.9." in there and experts.local_name(there, 2, 4) == name and experts.local_name(there, 1, 4) is None
    assert experts.local_name("output_layer.weight", 1, 4) == "output_layer.weight"


def test_the_expert_bias_stays_in_fp32():
    model = kit.build("deepseek_v3", torch.bfloat16)
    reference, _ = kit.huggingface("deepseek_v3")
    bias = dict(reference.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"]
    router = first_moe(model).router
    assert router.expert_bias.dtype == torch.float32 and torch.equal(router.expert_bias, bias)


@pytest.mark.parametrize("name", [n for n in faults.FAULTS if n != "KV scale off by one block"])
def test_every_planted_fault_changes_its_layer_and_can_be_taken_back(name):
    """In fp32, where nothing vanishes in rounding."""
    model, sequences = kit.build("glm_moe_dsa", torch.float32), kit.sequences([40, 25], 3)
    clean = forward.record_layers(model, sequences)
    layer = 2 if faults.FAULTS[name][1] else 1
    undo = faults.plant(model, name, layer)
    try:
        faulty = forward.record_layers(model, sequences)
    finally:
        undo()
    differs = [n for n, rows in clean.outputs.items() if not torch.equal(rows, faulty.outputs[n])]
    assert differs[0] == f"layers.{layer}"
    after = forward.record_layers(model, sequences)
    assert all(torch.equal(rows, after.outputs[n]) for n, rows in clean.outputs.items())


def test_a_fault_with_nothing_to_act_on_is_refused():
    model = kit.shared("glm_moe_dsa", torch.float32)
    for name, layer in (("router in bf16", 0), ("indices unsorted", 3), ("KV scale off by one block", 0), ("nonsense", 0)):
        with pytest.raises(faults.NoSuchFault):
            faults.plant(model, name, layer)


def test_an_idle_route_is_told_where_a_model_has_experts(monkeypatch):
    """A dense model has no place for ``moe``; in a model with experts its silence is an error."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.moe.moe_layer import MoELayer

    cu, ids = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([[3, 4, 5]])
    packing = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=3, max_seqlen_kv=3)

    def run(family):
        hooks.reset_counters()
        kit.shared(family, torch.float32)(ids, torch.arange(3)[None], None, labels=ids, packed_seq_params=packing)

    for family in ("qwen3", "qwen3_moe"):
        run(family)
        vime.assert_active()
    monkeypatch.setattr(MoELayer, "forward", lambda self, hidden_states, *args, **kwargs: (hidden_states, None))
    run("qwen3_moe")
    with pytest.raises(AssertionError, match="never ran: moe"):
        vime.assert_active()
