"""Latent attention, its indexer and experts in whole models: against unpatched transformers, and against themselves."""
from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vime
from tests.megatron.suite import kit
from tests.weights import conversion
from vime import ops
from vime.latent import UnsupportedLatent
from vime.megatron import Refused, forward, hooks
from vime.megatron.model import UnsupportedModel, build_model

SWEEP = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
LATENT = [name for name in kit.SPARSE if name != "qwen3_moe"]
lengths = st.lists(st.integers(2, 40), min_size=1, max_size=4)


@pytest.fixture(autouse=True)
def vime_on(vime_off):
    with vime.enabled():
        yield


@pytest.mark.parametrize("family", kit.SPARSE)
def test_logits_agree_with_transformers(family):
    """In fp32 within 1e-5 of unpatched transformers, no farther from float64 than three times its own error, same greedy tokens."""
    reference, _ = kit.huggingface(family)
    exact, sequences = copy.deepcopy(reference).double(), kit.sequences([60, 7, 33], seed=5)
    ours = forward.packed_logits(kit.shared(family, torch.float32), sequences).detach().double()
    theirs_64 = torch.cat([exact(torch.tensor([s])).logits[0] for s in sequences]).detach()
    theirs_32 = torch.cat([reference(torch.tensor([s])).logits[0] for s in sequences]).detach().double()
    error, their_error = (float((x - theirs_64).abs().max()) for x in (ours, theirs_32))
    assert float((ours - theirs_32).abs().max()) < 1e-5
    assert error <= 3 * their_error + 1e-6, (error, their_error)
    assert torch.equal(ours.argmax(-1), theirs_32.argmax(-1))


@pytest.mark.parametrize("family", kit.SPARSE)
def test_gradients_agree_with_transformers(family):
    """Every gradient against float64; the indexer has none on either side."""
    reference, config = kit.huggingface(family)
    exact, (sequence,) = copy.deepcopy(reference).double(), kit.sequences([47], seed=3)
    model = kit.build(family, torch.float32)
    torch.cat(forward.token_logprobs_of(model, [sequence], grad=True)).mean().backward()
    logits = exact(torch.tensor([sequence])).logits[0, :-1]
    torch.log_softmax(logits, -1).gather(1, torch.tensor(sequence[1:])[:, None]).mean().backward()
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    (_, expected), compared = conversion.to_megatron(kit.as_files(exact), config), 0
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            assert parameter.grad is None and not parameter.requires_grad
            continue
        found, want = parameter.grad, expected[name]
        if found is None:
            assert ".local_experts." in name and not bool(want.any())  # no token came to this expert
            continue
        assert float((found.double() - want).norm()) < 2e-5 * float(want.norm()), name
        compared += 1
    assert compared > 40


def test_index_sets_agree_with_transformers():
    reference, _ = kit.huggingface("glm_moe_dsa")
    model, (sequence,) = kit.shared("glm_moe_dsa", torch.float32), kit.sequences([70], seed=9)
    theirs, ours = [], []
    handles = [m.register_forward_hook(lambda m, i, o: theirs.append(o[0])) for n, m in reference.named_modules() if n.endswith("indexer")]
    handles += [m.register_forward_hook(lambda m, i, o: ours.append(o)) for n, m in model.named_modules() if n.endswith("indexer")]
    try:
        reference(torch.tensor([sequence]))
        forward.packed_logits(model, [sequence])
    finally:
        for handle in handles:
            handle.remove()
    assert len(theirs) == len(ours) == 2
    dropped = 0
    for a, b in zip(ours, theirs, strict=True):
        for t in range(len(sequence)):
            mine = [i for i in a[t].tolist() if i >= 0]
            assert mine == sorted(mine)
            assert mine == sorted(i for i in b[t].tolist() if i <= t)
            dropped += t + 1 - len(mine)
    assert dropped > 3000


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("family", kit.SPARSE)
@SWEEP
@given(lengths=lengths, seed=st.integers(0, 99), order=st.randoms(use_true_random=False))
def test_packed_equals_alone(family, dtype, lengths, seed, order):
    model, sequences = kit.shared(family, kit.DTYPES[dtype]), kit.sequences(lengths, seed)
    shuffled = list(range(len(sequences)))
    order.shuffle(shuffled)
    packed = forward.token_logprobs_of(model, sequences)
    permuted = forward.token_logprobs_of(model, [sequences[i] for i in shuffled])
    for place, i in enumerate(shuffled):
        assert kit.same_bits(permuted[place], packed[i])
    for sequence, row in zip(sequences, packed, strict=True):
        assert kit.same_bits(forward.token_logprobs_of(model, [sequence])[0], row)


@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("family", kit.SPARSE)
def test_grad_and_recompute_change_no_bit(family, dtype):
    """Full recompute runs the shared layers again before the full one they take their indices from."""
    sequences, seen = kit.sequences([33, 2, 20], 4), []
    for recompute in (False, True):
        model = kit.build(family, kit.DTYPES[dtype], recompute)
        without = forward.token_logprobs_of(model, sequences)
        with_grad = forward.token_logprobs_of(model, sequences, grad=True)
        assert all(kit.same_bits(a, b) for a, b in zip(without, with_grad, strict=True))
        torch.cat(with_grad).mean().backward()
        seen.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert seen[0].keys() == seen[1].keys()
    for name, grad in seen[0].items():
        assert kit.same_bits(grad, seen[1][name]), name


def test_a_shared_layer_takes_the_last_full_choice():
    model, (sequence,) = kit.shared("glm_moe_dsa", torch.float32), kit.sequences([50], 2)
    seen = {}
    for layer in model.decoder.layers:
        core = layer.self_attention.core_attention
        core.register_forward_pre_hook(lambda m, args, i=layer.layer_number - 1: seen.update({i: args[2]}))
    forward.packed_logits(model, [sequence])
    assert torch.equal(seen[1], seen[2]) and torch.equal(seen[1], seen[3]) and not torch.equal(seen[0], seen[1])
    for layer in model.decoder.layers:
        layer.self_attention.core_attention._forward_pre_hooks.clear()


@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_the_fp8_cache_is_in_the_rows(dtype):
    """The rows that attention reads are fixed points of the cache, the contract says so, and the logits differ."""
    family = "deepseek_v3"
    plain, (sequence,) = kit.shared(family, kit.DTYPES[dtype]), kit.sequences([40], 1)
    rounded, rows = kit.build(family, kit.DTYPES[dtype], kv_cache_dtype="fp8_e4m3"), []
    for layer in rounded.decoder.layers:
        layer.self_attention.core_attention.register_forward_pre_hook(lambda m, args: rows.append(args[1]))
    a, b = (forward.packed_logits(m, [sequence]) for m in (plain, rounded))
    assert not torch.equal(a, b) and float((a - b).abs().mean()) < 0.3  # a choice of experts may flip
    rank = rounded.decoder.layers[0].self_attention.latent.kv_rank
    assert len(rows) == 3
    for row in rows:
        assert torch.allclose(ops.through_fp8_cache(row.detach(), rank).float(), row.detach().float(), rtol=1e-2)
    from vime.megatron import contract

    assert contract(plain).kv_cache_dtype == "model" and contract(rounded).kv_cache_dtype == "fp8_e4m3"


@pytest.mark.parametrize("excluded", ["attention", "rope"])
def test_there_is_no_stock_form(excluded):
    model = kit.shared("deepseek_v3", torch.float32)
    with vime.enabled(exclude=[excluded]), pytest.raises(Refused, match=rf"missing: {excluded}"):
        forward.single_logits(model, [1, 2, 3])


def test_a_sequence_that_is_not_packed_is_refused():
    with pytest.raises(Refused, match=r"packed sequences \(not given\)"):
        forward.single_logits(kit.shared("glm_moe_dsa", torch.float32), [1, 2, 3])


@pytest.mark.parametrize(("family", "changes", "text"), [
    ("glm_moe_dsa", dict(q_lora_rank=None), "q_lora_rank"),
    ("deepseek_v3", dict(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}), "yarn"),
    ("deepseek_v3", dict(norm_topk_prob=False), "norm_topk_prob is False"),
    ("glm_moe_dsa", dict(indexer_types=["shared", "full", "full", "full"]), "the first one full"),
])
def test_configs_that_cannot_be_built(family, changes, text):
    from vime.errors import BadInput

    with pytest.raises(BadInput, match=text):
        build_model({**kit.huggingface(family)[1], **changes}, torch.float32)


def test_attention_dropout_is_refused():
    model = kit.build("deepseek_v3", torch.float32)
    model.config.attention_dropout = 0.1
    with pytest.raises(Refused, match=r"attention dropout is 0\.1 in train mode"):
        forward.packed_logits(model, [[1, 2, 3]])
    forward.packed_logits(model.eval(), [[1, 2, 3]])


def test_options_that_cannot_be_had():
    with pytest.raises(UnsupportedLatent, match=r"freeze_indexer is false.*everything else of the model is trained"):
        build_model(kit.huggingface("glm_moe_dsa")[1], torch.float32, freeze_indexer=False)
    with pytest.raises(UnsupportedModel, match="kv_cache_dtype is 'fp8_e4m3' for a qwen3 model"):
        build_model(kit.huggingface("qwen3")[1], torch.float32, kv_cache_dtype="fp8_e4m3")


def test_every_route_runs_and_the_contract_names_it():
    from vime.megatron import contract

    model = kit.shared("glm_moe_dsa", torch.bfloat16)
    hooks.reset_counters()
    ids = torch.tensor([[3, 4, 5]])
    from megatron.core.packed_seq_params import PackedSeqParams

    cu = torch.tensor([0, 3], dtype=torch.int32)
    model(ids, torch.arange(3)[None], None, labels=ids,
          packed_seq_params=PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=3, max_seqlen_kv=3))
    ran = hooks.counters()
    assert {"moe", "attention", "linear", "norm", "embedding", "activation", "logprob"} <= ran.keys()
    assert contract(model).ops["moe"] == ops.registry.implementation("moe", "cpu", torch.bfloat16)
