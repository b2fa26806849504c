"""Conversion both ways is bitwise, and the layouts are the ones Megatron computes with, not only self-inverse."""
from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.weights.conversion import differing, to_hf, to_megatron
from tests.weights.tiny import load, to_fp8, with_mtp
from vime.weights.convert import Stacker
from vime.weights.errors import ConfigMismatch, UnknownArchitecture, WeightError
from vime.weights.families import base, families, family_for
from vime.weights.families.base import SYNONYMS, Config
from vime.weights.families.units import Ref, Unit
from vime.weights.ledger import Key


def test_every_tensor_comes_back(case, checkpoint):
    state, cfg = load(checkpoint(case))
    assert differing(state, to_hf(*to_megatron(state, cfg, vocab_multiple=64))) == []


@settings(max_examples=60, deadline=None)
@given(kv=st.integers(1, 4), per_group=st.integers(1, 4), d=st.integers(1, 6), hidden=st.integers(1, 7), bias=st.booleans())
def test_qkv_is_interleaved_by_group_as_megatron_reads_it(kv, per_group, d, hidden, bias):
    tail = () if bias else (hidden,)
    q, k, v = (torch.randn(n * d, *tail) for n in (kv * per_group, kv, kv))
    unit = Unit("qkv", (Ref("q", q.shape), Ref("k", k.shape), Ref("v", v.shape)), groups=kv, split="column")
    mixed = unit.to_megatron([q, k, v])
    # SelfAttention.get_query_key_value_tensors: view(ng, (np/ng + 2) * hn), split in [np/ng * hn, hn, hn]
    got_q, got_k, got_v = mixed.view(kv, (per_group + 2) * d, *tail).split([per_group * d, d, d], dim=1)
    assert torch.equal(got_q.reshape(-1, *tail), q)
    assert torch.equal(got_k.reshape(-1, *tail), k)
    assert torch.equal(got_v.reshape(-1, *tail), v)
    assert all(torch.equal(a, b) for a, b in zip(unit.to_hf(mixed), (q, k, v), strict=True))


@settings(max_examples=40, deadline=None)
@given(tp=st.integers(1, 4), rows=st.integers(1, 4), hidden=st.integers(1, 5), stacked=st.booleans())
def test_glu_shards_hold_their_own_gate_and_their_own_up(tp, rows, hidden, stacked):
    gate, up = torch.randn(tp * rows, hidden), torch.randn(tp * rows, hidden)
    if stacked:
        unit, pieces = Unit("fc1", (Ref("gu", (2 * tp * rows, hidden), 0, 1),), split="glu"), [torch.cat([gate, up])]
    else:
        unit, pieces = Unit("fc1", (Ref("g", gate.shape), Ref("u", up.shape)), split="glu"), [gate, up]
    full = unit.to_megatron(pieces)
    shards = [unit.shard(full, r, tp) for r in range(tp)]
    for r, shard in enumerate(shards):
        part = slice(r * rows, (r + 1) * rows)
        assert torch.equal(shard, torch.cat([gate[part], up[part]]))
        assert tuple(shard.shape) == unit.shard_shape(tp)
    assert torch.equal(unit.unshard(shards), full)


@settings(max_examples=40, deadline=None)
@given(tp=st.integers(1, 4), n=st.integers(1, 3), m=st.integers(1, 5), split=st.sampled_from(["none", "column", "row"]))
def test_plain_shards(tp, n, m, split):
    shape = {"none": (n, m), "column": (tp * n, m), "row": (m, tp * n)}[split]
    unit, full = Unit("w", (Ref("w", shape),), split=split), torch.randn(shape)
    shards = [unit.shard(full, r, tp) for r in range(tp)]
    if split == "row":
        assert torch.equal(shards[-1], full[:, -n:])
    elif split == "column":
        assert torch.equal(shards[-1], full[-n:])
    else:
        assert torch.equal(shards[-1], full)
    assert torch.equal(unit.unshard(shards), full)


def test_padding_is_zero_and_goes_away():
    unit = Unit("e", (Ref("e", (5, 3)),), pad_rows=8)
    x = torch.randn(5, 3)
    full = unit.to_megatron([x])
    assert full.shape == (8, 3) and not full[5:].any() and torch.equal(unit.to_hf(full)[0], x)


def test_dtypes_are_kept_one_by_one(checkpoint):
    state, cfg = load(checkpoint("deepseek_v3"))
    state = {n: t if "e_score_correction_bias" in n else t.bfloat16() for n, t in state.items()}
    _, mega = to_megatron(state, cfg)
    assert mega["decoder.layers.1.mlp.router.expert_bias"].dtype == torch.float32
    assert mega["decoder.layers.1.mlp.router.weight"].dtype == torch.bfloat16


def test_mtp_layers_and_their_copies_of_embedding_and_head(checkpoint):
    state, cfg = with_mtp(*load(checkpoint("deepseek_v3")))
    at = "model.layers.4."
    plan, mega = to_megatron(state, cfg)
    assert "mtp.layers.0.transformer_layer.mlp.experts.local_experts.7.linear_fc2.weight" in mega
    assert differing(state, to_hf(plan, mega)) == []
    state[at + "embed_tokens.weight"][0, 0] += 1
    with pytest.raises(WeightError, match="one tensor with two names"):
        to_megatron(state, cfg)


def fp8_case(checkpoint, block=(8, 8)):
    return to_fp8(*load(checkpoint("deepseek_v3")), block)


def test_fp8_bytes_and_scales(checkpoint):
    state, cfg = fp8_case(checkpoint)
    plan, mega = to_megatron(state, cfg)
    assert mega["decoder.layers.0.mlp.linear_fc1.weight_scale_inv"].shape == (12, 4)
    assert differing(state, to_hf(plan, mega)) == []


@pytest.mark.parametrize(("change", "message"), [
    (lambda p: {**p, 3: p[3].bfloat16()}, r"expert 3 arrived as torch\.bfloat16 .* expected torch\.float32"),
    (lambda p: {**p, 3: p[3][0]}, r"expert 3 arrived as torch\.float32 \[24\], expected .*\[32, 24\]"),
    (lambda p: {**{e: p[e] for e in range(7)}, -1: p[7]}, "expert -1 of 8 arrived"),
    (lambda p: {**{e: p[e] for e in range(7)}, 99: p[7]}, "expert 99 of 8 arrived"),
    (lambda p: [*list(p.items())[:3], *p.items()], "expert 0 arrived twice"),
    (lambda p: [*p.items(), *p.items()], "expert 0 arrived once more"),
    (lambda p: {e: p[e] for e in range(7)}, "1 of 8 experts never arrived, 7 the first")])
def test_an_expert_that_does_not_fit_its_stacked_tensor_is_named(checkpoint, change, message):
    """An assignment would convert its dtype, repeat a row, or let the last of two win."""
    state, cfg = load(checkpoint("gemma4"))
    name = "model.layers.1.experts.down_proj"
    stacker, pieces = Stacker(family_for(cfg).plan(cfg, hf_names=state.keys())), change(dict(enumerate(state[name])))
    with pytest.raises(WeightError, match=message):
        for part, piece in pieces.items() if isinstance(pieces, dict) else pieces:
            list(stacker.add(Key(name, part), piece))
        stacker.finish()


def test_a_block_that_straddles_gate_and_up_is_refused(checkpoint):
    state, cfg = fp8_case(checkpoint, block=(32, 32))
    with pytest.raises(ConfigMismatch, match="straddle"):
        to_megatron(state, cfg)


@pytest.mark.parametrize("half", ["gate", "up"])
def test_a_missing_scale_is_named(checkpoint, half):
    state, cfg = fp8_case(checkpoint)
    del state[f"model.layers.2.mlp.experts.3.{half}_proj.weight_scale_inv"]
    with pytest.raises(WeightError, match=rf"1 missing: .*layers\.2\.mlp\.experts\.3\.{half}_proj\.weight_scale_inv"):
        to_megatron(state, cfg)


def test_wrong_input_is_named(checkpoint):
    state, cfg = load(checkpoint("qwen2"))
    short = {n: t for n, t in state.items() if n != "model.layers.2.self_attn.k_proj.bias"}
    with pytest.raises(WeightError, match=r"1 missing: model\.layers\.2\.self_attn\.k_proj\.bias"):
        to_megatron(short, cfg)
    with pytest.raises(WeightError, match=r"1 unknown: model\.surprise"):
        to_megatron({**state, "model.surprise": torch.zeros(1)}, cfg)
    with pytest.raises(ConfigMismatch, match=r"k_proj.*\(16, 32\), the config says \(32, 32\)"):
        to_megatron(state, {**cfg, "num_key_value_heads": 4})
    with pytest.raises(ConfigMismatch, match="no field 'hidden_size'"):
        to_megatron(state, {k: v for k, v in cfg.items() if k != "hidden_size"})
    with pytest.raises(UnknownArchitecture, match=r"MambaForCausalLM.*Covered: .*Qwen2ForCausalLM"):
        family_for({"architectures": ["MambaForCausalLM"]})


def test_every_family_is_exercised_by_a_case():
    from tests.weights.tiny import CASES

    assert {case.split("-")[0] for case in CASES} == set(families())


class _Read(Config):
    """Tells which fields a family asks for."""

    asked: ClassVar[set[str]] = set()

    def __getattr__(self, name):
        self.asked.update((name, *SYNONYMS.get(name, ())))
        return super().__getattr__(name)

    def get(self, name, default=None):
        self.asked.add(name)
        return super().get(name, default)

    def count(self, name, default=0):
        self.asked.add(name)
        return super().count(name, default)

    def kinds(self, name, layers):
        self.asked.add(name)
        return super().kinds(name, layers)

    def table(self, name):
        self.asked.add(name)
        return super().table(name)


def test_a_config_field_of_another_kind_is_an_error_with_its_name(case, checkpoint, monkeypatch):
    """Whatever stands in any field that a family reads: a plan that fits the files, or a message; never a stack of calls."""
    state, cfg = load(checkpoint(case))
    monkeypatch.setattr(_Read, "asked", {"architectures", "text_config", "quantization_config"})
    monkeypatch.setattr(base, "Config", _Read)
    family_for(cfg).plan(cfg, state)
    assert len(_Read.asked) > 8
    refused = 0
    for field in sorted(_Read.asked):
        for value in (0, -1, "x", 3.5, [], {}, [1]):
            try:
                family_for({**cfg, field: value}).plan({**cfg, field: value}, state)
            except WeightError as error:
                refused += 1
                assert str(error)
    assert refused > 2 * len(_Read.asked)
