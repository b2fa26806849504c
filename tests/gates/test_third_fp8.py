"""The third party's block FP8 against the contract's, with which it shares no line; and which layers it takes."""
from __future__ import annotations

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gates.choosing import Held
from gates.synthetic import write
from gates.synthetic_experts import SPARSE
from gates.third_fp8 import Fp8Linears, quantised
from vime import fp8, ops


class Model(torch.nn.Module):
    """One layer with a linear layer and the fused gate and up projections of two experts."""

    def __init__(self, k: int, ffn: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(k + ffn)
        o_proj = torch.nn.Linear(k, ffn)
        o_proj.weight.data = torch.randn(ffn, k, generator=g)
        experts = torch.nn.Module()
        experts.gate_up_proj = torch.nn.Parameter(torch.randn(2, 2 * ffn, k, generator=g))
        experts.down_proj = torch.nn.Parameter(torch.randn(2, k, ffn, generator=g))
        layer = torch.nn.Module()
        layer.o_proj, layer.experts = o_proj, experts
        self.model = types.SimpleNamespace(layers=torch.nn.ModuleList([layer]))
        self.layer = layer


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 5), k=st.integers(1, 300), ffn=st.integers(1, 200), seed=st.integers(0, 9))
def test_it_is_the_equation_of_the_contract(rows, k, ffn, seed):
    model, x = Model(k, ffn), torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed - 5)
    mode, linear = Fp8Linears(model), torch.nn.functional.linear
    with torch.no_grad(), mode:
        plain = model.layer.o_proj(x)
        gate, up = linear(x, model.layer.experts.gate_up_proj[1]).chunk(2, -1)
        other = linear(x, torch.eye(k))
    assert mode.calls == 2 and torch.equal(other, x @ torch.eye(k))
    fused = model.layer.experts.gate_up_proj[1].detach()
    for found, weight, bias in ((plain, model.layer.o_proj.weight, model.layer.o_proj.bias), (gate, fused[:ffn], None), (up, fused[ffn:], None)):
        ours = ops.linear_fp8(x, weight.detach(), None if bias is None else bias.detach())
        assert torch.allclose(found, ours, rtol=1e-5, atol=float(ours.abs().max()) * 1e-5)
    assert k < 64 or not torch.allclose(gate, linear(x, fused[:ffn]), rtol=1e-4, atol=0)  # it does round


@pytest.mark.parametrize("name", SPARSE.keys() & {"glm5.2-6layer-tiny", "deepseek-v3-tiny", "qwen3-moe-tiny"})
def test_it_takes_the_layers_that_the_contract_names(name, tmp_path):
    folder = write(SPARSE[name], tmp_path / "model")
    held = Held(folder, torch.bfloat16, fp8_linear=True)
    model = held.models[torch.float32]
    found = quantised(model)
    by_name = {n: p.untyped_storage().data_ptr() in found for n, p in model.named_parameters() if n.endswith("proj") or n.endswith(".weight")}
    fused = {n: yes for n, yes in by_name.items() if n.endswith(("gate_up_proj", "experts.down_proj"))}
    assert fused and all(fused.values())
    assert {n: yes for n, yes in by_name.items() if n not in fused} == {n: fp8.applies(n) for n in by_name if n not in fused}
