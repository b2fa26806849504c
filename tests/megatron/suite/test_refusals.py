"""What can't be aligned is refused by name, before anything runs."""
from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import vime
from tests.megatron.suite import kit
from vime.megatron import Refused, check, forward
from vime.megatron import model as models


def tiny(spec=None, *, rope=10000, **changes):
    """A model as a script builds it, with these fields of its config changed."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    fields = dict(num_layers=1, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, normalization="RMSNorm",
                  add_bias_linear=False, gated_linear_unit=True, activation_func=F.silu, hidden_dropout=0.0,
                  attention_dropout=0.0, persist_layer_norm=False, use_cpu_initialization=True,
                  gradient_accumulation_fusion=False)
    config = TransformerConfig(**{**fields, **changes})
    layer = spec or get_gpt_layer_local_spec(normalization=config.normalization, num_experts=config.num_moe_experts)
    model = GPTModel(config=config, transformer_layer_spec=layer, vocab_size=64, max_sequence_length=64,
                     position_embedding_type="rope", rotary_base=rope)
    return model


def run(model, **kwargs):
    ids = torch.arange(12)[None]
    return model(ids, ids, kwargs.pop("attention_mask", None), **kwargs)


@pytest.mark.parametrize(("changes", "text"), [
    (dict(hidden_dropout=0.1), "hidden_dropout: is 0.1 in train mode"),
    (dict(attention_dropout=0.2), "core_attention.*attention dropout is 0.2 in train mode"),
    (dict(normalization="LayerNorm"), "LayerNorm.*vime does not know"),
    (dict(activation_func=F.gelu), "mlp .MLP.: its activation is gelu .gated."),
    (dict(gated_linear_unit=False), "its activation is silu .not gated."),
    (dict(num_moe_experts=2, moe_grouped_gemm=False, add_bias_linear=False), "MoELayer"),
    (dict(bias_dropout_fusion=True), "bias_dropout_fusion: is True"),
    (dict(bias_activation_fusion=True), "bias_activation_fusion is on"),
    (dict(apply_query_key_layer_scaling=True, attention_softmax_in_fp32=True), "apply_query_key_layer_scaling is on"),
    (dict(fp32_residual_connection=True), "fp32_residual_connection: is True"),
    (dict(window_size=(4, 0)), "sliding window"),
    (dict(softmax_type="learnable"), "softmax_type is 'learnable'"),
])
def test_refused_by_name(changes, text):
    model = tiny(**changes)
    with pytest.raises(Refused, match=text), vime.enabled():
        run(model)
    with pytest.raises(Refused, match=text):
        vime.enable(model=model)
    assert not vime.is_enabled()


def test_a_wrapped_model_is_checked_inside():
    from vime.megatron.optim import Optimizer

    vime.enable(model=Optimizer(tiny(), lr=1e-3).ddp)
    vime.disable()
    with pytest.raises(Refused, match="hidden_dropout"):
        vime.enable(model=Optimizer(tiny(hidden_dropout=0.1), lr=1e-3).ddp)


def test_dropout_is_fine_in_eval_mode():
    with vime.enabled():
        run(tiny(hidden_dropout=0.1, attention_dropout=0.2).eval())


def dropping_spec():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.params = {"hidden_dropout": 0.3}
    return spec


def one_layer_trains(model):
    model.eval()
    model.decoder.layers[0].train()


@pytest.mark.parametrize(("spec", "config", "change", "text"), [
    (None, 0.1, one_layer_trains, r"decoder\.layers\.0 \(TransformerLayer\): its dropout is 0\.1 in train mode"),
    (dropping_spec, 0.0, lambda model: None, r"decoder\.layers\.0 \(TransformerLayer\): its dropout is 0\.3 in train mode"),
    (None, 0.0, lambda model: setattr(model.decoder.layers[0], "hidden_dropout", 0.2), r"layers\.0 \(TransformerLayer\): its dropout is 0\.2"),
    (None, 0.0, lambda model: setattr(model.embedding.embedding_dropout, "p", 0.1), r"embedding\.embedding_dropout \(Dropout\): its dropout is 0\.1"),
    (None, 0.1, lambda model: model.eval().embedding.train(), r"embedding\.embedding_dropout \(Dropout\): its dropout is 0\.1"),
    (dropping_spec, 0.1, lambda model: None, r"hidden_dropout: is 0\.1(.|\n)*layers\.0 \(TransformerLayer\): its dropout is 0\.3"),
], ids=["a layer's mode", "a spec", "a layer's value", "embedding value", "embedding mode", "beside the config's"])
def test_dropout_of_a_module_is_refused_whatever_the_config_says(spec, config, change, text):
    model = tiny(spec and spec(), hidden_dropout=config)
    change(model)
    with pytest.raises(Refused, match=text), vime.enabled():
        run(model)
    with vime.enabled():
        run(model.eval())


def test_a_layer_of_another_class_is_refused_even_if_it_is_a_subclass():
    from megatron.core.transformer.mlp import MLP

    class Scaled(MLP):
        def forward(self, hidden_states, **kwargs):
            out, bias = super().forward(hidden_states)
            return out * 2, bias

    model = tiny()
    model.decoder.layers[0].mlp.__class__ = Scaled
    with pytest.raises(Refused, match=r"layers\.0\.mlp \(Scaled\).*can't say what it computes"), vime.enabled():
        run(model)


def test_a_refusal_concerns_only_operations_that_are_on():
    with vime.enabled(["linear", "norm"]):
        run(tiny(activation_func=F.gelu, window_size=(4, 0), attention_dropout=0.2))


@pytest.mark.parametrize("kind", ["tensor", "context"])
def test_parallelism_is_refused(monkeypatch, kind):
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, f"get_{kind}_{'model_' if kind == 'tensor' else ''}parallel_world_size", lambda: 2)
    with pytest.raises(Refused, match=f"{kind} parallel size is 2"):
        vime.enable()
    assert not vime.is_enabled()


def test_tensor_parallel_layers_are_refused():
    class Two:
        def size(self):
            return 2

    model = tiny()
    model.decoder.layers[0].self_attention.linear_proj.tp_group = Two()
    model.config.sequence_parallel = True
    with pytest.raises(Refused, match=r"sequence_parallel: is True(.|\n)*linear_proj.*tensor parallel size is 2"), vime.enabled():
        run(model)


def test_a_mask_that_is_not_causal_is_refused():
    model, hidden = tiny(), torch.ones(12, 12, dtype=torch.bool).triu(1)[None, None]
    with vime.enabled():
        assert kit.same_bits(run(model, attention_mask=hidden), run(model))
        holes = hidden.clone()
        holes[..., 7, 2] = True
        with pytest.raises(Refused, match="not the plain causal one"):
            run(model, attention_mask=holes)


def test_padded_packing_is_refused():
    from megatron.core.packed_seq_params import PackedSeqParams

    cu, padded = torch.tensor([0, 5, 12], dtype=torch.int32), torch.tensor([0, 6, 12], dtype=torch.int32)
    packing = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=padded,
                              cu_seqlens_kv_padded=padded, max_seqlen_q=7, max_seqlen_kv=7)
    with pytest.raises(Refused, match="pack without padding"), vime.enabled():
        run(tiny(), packed_seq_params=packing)


def test_a_layer_outside_a_checked_model_is_refused():
    layer = tiny().decoder.layers[0]
    hidden = torch.randn(4, 1, 32)
    with vime.enabled(["norm", "linear"]):
        with pytest.raises(Refused, match="outside a GPTModel"):
            layer(hidden, None)
        check.prepare(layer, {"norm", "linear"})
        layer(hidden, None)


def test_stock_angles_never_reach_the_aligned_rotation():
    from megatron.core.transformer import attention

    model = tiny()
    angles = model.rotary_pos_emb(12)
    with vime.enabled(["rope"]), pytest.raises(Refused, match="vime's table did not make"):
        attention.apply_rotary_pos_emb(torch.randn(12, 1, 4, 8), angles, config=model.config)


@pytest.mark.parametrize("base", [10000, 500000, 8000000])
def test_rotary_base_of_any_script_is_worked_out(base):
    from vime.megatron.routes import rope

    model = tiny(rope=base)
    assert rope.parameters_of(model) == rope.RopeParameters(8, float(base), None)
    model.rotary_pos_emb.inv_freq = model.rotary_pos_emb.inv_freq * 1.001
    with pytest.raises(Refused, match="not those of base"), vime.enabled():
        run(model)


@pytest.mark.parametrize(("field", "value"), [
    ("model_type", "gpt2"), ("hidden_act", "gelu"), ("attention_bias", True), ("mlp_bias", True), ("use_sliding_window", True),
    ("layer_types", ["sliding_attention"]), ("partial_rotary_factor", 0.5), ("hidden_size", None),
])
def test_uncovered_configs_are_named(field, value):
    _, config = kit.huggingface("llama")
    with pytest.raises(models.UnsupportedModel, match=field):
        models.build_model({**config, field: value}, torch.float32)


def test_uncovered_dtype_is_named():
    with pytest.raises(models.UnsupportedModel, match="float16"):
        models.build_model(kit.huggingface("llama")[1], torch.float16)


@pytest.mark.parametrize(("damage", "text"), [
    (lambda s: s.pop("decoder.final_layernorm.weight"), "no weight for .'decoder.final_layernorm.weight'"),
    (lambda s: s.update(extra=torch.zeros(1)), "no parameter for .'extra'"),
    (lambda s: s.update({"decoder.final_layernorm.weight": torch.ones(3)}), "final_layernorm.weight has shape .3,."),
    (lambda s: s.update({"decoder.final_layernorm.weight": torch.full((48,), torch.nan)}), "not finite"),
])
def test_damaged_weights_are_named_and_nothing_is_written(damage, text):
    model = kit.build("llama", torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = {name: p + 1 for name, p in before.items()}
    damage(state)
    with pytest.raises(ValueError, match=text):
        models.load_megatron_weights(model, state)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_refusals_list_every_reason():
    model = tiny(hidden_dropout=0.1, activation_func=F.gelu)
    found = list(check.refusals(model, vime.OPS))
    assert len(found) == 2 and all(dataclasses.asdict(r)["place"] for r in found)
    assert not list(check.refusals(model, ()))


def test_record_layers_takes_its_hooks_off_after_an_error():
    model = kit.build("llama", torch.float32)
    with pytest.raises(IndexError), vime.enabled():
        forward.record_layers(model, [[1, 2, kit.VOCAB + 5]])
    assert not any(m._forward_hooks for m in model.modules())
