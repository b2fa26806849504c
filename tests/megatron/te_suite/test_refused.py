"""What of TransformerEngine can't be aligned is named before it runs; its own products find no workspace."""
from __future__ import annotations

import pytest
import torch

import vime
from tests.megatron.suite import kit
from vime.megatron import Refused, forward
from vime.megatron.te import workspace


def engine(**options):
    return kit.build("qwen3", torch.float32, transformer_impl="transformer_engine", **options)


def test_each_setting_by_name() -> None:
    from transformer_engine.pytorch.module.base import WeightGradStore

    model = engine()
    layer = model.decoder.layers[0]
    qkv, proj, core = layer.self_attention.linear_qkv, layer.self_attention.linear_proj, layer.self_attention.core_attention
    for module, name, value, text in (
            (qkv, "normalization", "LayerNorm", "its norm is LayerNorm"), (qkv, "zero_centered_gamma", True, "zero_centered_gamma is on"),
            (qkv, "return_layernorm_output", True, "returns the output of its norm"), (proj, "tp_size", 2, "tensor parallel size 1"),
            (proj, "ub_name", "proj", "user buffers"), (proj, "te_quant_params", object(), "quantization recipe"),
            (proj, "fuse_wgrad_accumulation", True, "gradient_accumulation_fusion"), (proj, "weight_names", ["a", "b"], "split into a, b"),
            (proj, "wgrad_store", WeightGradStore(True), "delay_wgrad_compute is on"), (core, "softmax_type", "learnable", "softmax_type"),
            (core, "cp_group", object(), "context parallel group"), (core, "attention_dropout", 0.1, "attention dropout is 0.1"),
            (model.decoder.final_layernorm, "zero_centered_gamma", True, "final_layernorm .*zero_centered_gamma")):
        before = getattr(module, name)
        setattr(module, name, value)
        with pytest.raises(Refused, match=text):
            vime.enable(model=model)
        setattr(module, name, before)
        assert not vime.is_enabled()
    with vime.enabled(model=model):
        forward.packed_logits(model, kit.sequences([5]))


def test_half_of_a_fused_module_is_refused() -> None:
    with pytest.raises(Refused, match="norm, linear in one module and only linear is aligned"):
        vime.enable(exclude="norm", model=engine())
    vime.enable(exclude=("norm", "linear"), model=engine())


def test_an_unknown_module_is_named_with_those_that_are_known() -> None:
    from megatron.core.extensions.transformer_engine import TEFusedResidualRMSNorm

    model = engine()
    model.decoder.final_layernorm = TEFusedResidualRMSNorm(48)
    with pytest.raises(Refused, match=r"TEFusedResidualRMSNorm; it can't say what it computes \(of TransformerEngine 2.11.0 it knows .*TELinear"):
        vime.enable(model=model)


def test_an_fp8_context_and_split_keys_are_refused_where_they_would_act() -> None:
    from transformer_engine.pytorch.fp8 import fp8_autocast

    model = engine()
    with vime.enabled(), fp8_autocast(), pytest.raises(Refused, match="FP8 context"):
        forward.packed_logits(model, kit.sequences([5]))
    core, x = model.decoder.layers[0].self_attention.core_attention, torch.ones(3, 1, 6, 16)
    with vime.enabled(), pytest.raises(Refused, match="num_splits=4"):
        core(x, x, x, None, num_splits=4)


def test_block_fp8_is_refused() -> None:
    model = engine()
    with pytest.raises(Refused, match="--transformer-impl local"):
        vime.enable(fp8=True, model=model)


def test_a_rotation_that_would_be_fused_is_routed_all_the_same() -> None:
    model, sequences = engine(), kit.sequences([9, 4])
    with vime.enabled():
        want = forward.packed_logits(model, sequences)
        model.config.apply_rope_fusion = True
        assert kit.same_bits(forward.packed_logits(model, sequences), want)
    with pytest.raises(Refused, match="apply_rope_fusion"):
        vime.enable(exclude="rope", model=model)


def test_products_of_transformer_engine_have_no_workspace_while_vime_is_on() -> None:
    from transformer_engine.pytorch.cpp_extensions import gemm

    stock, x = gemm.get_cublas_workspace, torch.ones(2, 2)
    workspace.reset()
    gemm.general_gemm(x, x)
    assert gemm.WORKSPACES[-1] > 0 and workspace.products() == 0
    with vime.enabled():
        forward.packed_logits(engine(), kit.sequences([5]))
        assert workspace.products() == 0, "a product of TransformerEngine ran in a routed model"
        gemm.general_gemm(x, x)
        assert gemm.WORKSPACES[-1] == 0 and workspace.products() == 1
        assert [w.numel() for w in gemm.get_cublas_workspace("cpu", False, True)] == [0] * 4
        with pytest.raises(Refused, match="user buffers"):
            gemm.get_cublas_workspace("cpu", True, False)
    assert gemm.get_cublas_workspace is stock
    gemm.general_gemm(x, x)
    assert gemm.WORKSPACES[-1] > 0
    with vime.enabled("norm"):
        assert gemm.get_cublas_workspace is stock


def test_another_models_norm_is_left_alone() -> None:
    from transformer_engine.pytorch import RMSNorm

    norm, x = RMSNorm(8), torch.randn(3, 8)
    want = norm(x)
    with vime.enabled(model=engine()):
        assert torch.equal(norm(x), want)


def test_a_release_without_a_name_is_refused_with_the_model_and_leaves_the_local_spec_alone(monkeypatch) -> None:
    from megatron.core.extensions import transformer_engine as extension
    from transformer_engine.pytorch.cpp_extensions import gemm

    before = extension.TELinear.forward
    monkeypatch.delattr(gemm, "get_cublas_workspace")
    with vime.enabled():
        assert extension.TELinear.forward is before, "half of a release that is not known is routed"
        forward.packed_logits(kit.build("qwen3", torch.float32), kit.sequences([5]))
        with pytest.raises(Refused, match=r"TransformerEngine 2.11.0 is not routed, vime covers 2.11.0 .*get_cublas_workspace.*impl local"):
            forward.packed_logits(engine(), kit.sequences([5]))
    monkeypatch.undo()
    monkeypatch.setattr("vime.megatron.model._check_transformer_impl", lambda *args: None)
    with vime.enabled():
        assert extension.TELinear.forward is not before
        forward.packed_logits(engine(), kit.sequences([5]))
