"""The trainer's contract says what is in effect, and both sides must see a difference."""
from __future__ import annotations

import pytest
import torch

import vime
import vime.megatron
from tests.megatron.suite import kit
from vime.contract import Contract, ContractMismatch
from vime.ops import registry


@pytest.mark.parametrize("dtype", kit.DTYPES)
def test_it_is_read_from_the_model_and_the_switches(dtype):
    model = kit.shared("llama", kit.DTYPES[dtype])
    off = vime.megatron.contract(model)
    assert set(off.ops.values()) == {"stock"} and set(off.ops) == set(vime.OPS)
    with vime.enabled(exclude=["attention"]):
        on = vime.megatron.contract(model)
    assert on.dtype == dtype
    assert on.ops["attention"] == on.ops["moe"] == "stock"
    assert on.ops["linear"] == registry.implementation("linear", "cpu", kit.DTYPES[dtype])
    assert on.ops["sampling"] == registry.implementation("sampling", "cpu", kit.DTYPES[dtype])
    assert set(on.diff(off)) == {f"ops.{op}" for op in vime.OPS if op not in ("attention", "moe")}
    assert Contract.from_dict(on.to_dict()).fingerprint() == on.fingerprint()
    with pytest.raises(ContractMismatch, match=r"ops\.linear: trainer has"):
        on.require_equal(off)


def test_a_config_that_says_otherwise_changes_nothing():
    """The dtype is that of the parameters, whatever the config claims."""
    model = kit.build("llama", torch.float32).to(torch.bfloat16)
    assert model.config.params_dtype is torch.float32
    assert vime.megatron.contract(model, ["linear"]).dtype == "bfloat16"


def test_mixed_dtypes_are_named():
    model = kit.build("llama", torch.bfloat16)
    model.decoder.final_layernorm.float()
    with pytest.raises(ValueError, match=r"bfloat16 .embedding.*float32 .decoder\.final_layernorm\.weight"):
        vime.megatron.contract(model)
