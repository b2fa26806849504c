"""Like ``test_breaker3.py``: rotary embeddings, products, log-probs, packed sequences and files."""
from __future__ import annotations

import json
import math
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from alignment import Status, layers, logprobs, weights
from alignment.compare import compare_runs
from alignment.diagnose.numbers import rounding_modes
from alignment.diagnose.rotary import rotate
from alignment.records import RecordWriter

G = torch.Generator().manual_seed(77)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=G)


def kind(verdict):
    return verdict.causes[0].kind if verdict.causes else None


class TestRotary:
    p = torch.arange(32).double()
    f = 10000.0 ** (-torch.arange(8).double() / 8)

    def table(self, wave, base=10000.0, through=torch.float64):
        f = (base ** (-torch.arange(8).double() / 8)).to(through).double()
        return getattr(self.p[:, None] * f, wave)().float()

    @pytest.mark.parametrize("name", ["layers.0.rope.{}", "rotary_emb.{}_cached", "rope_{}", "freqs_{}", "decoder.rotary.{}_table"])
    def test_tables_of_any_name(self, files, name):
        cos, sin = name.format("cos"), name.format("sin")
        a = {cos: self.table("cos"), sin: self.table("sin")}
        for b in ({cos: a[sin], sin: a[cos]}, {**a, cos: a[sin]}):
            v = files(a, b)
            assert v.status is Status.FAIL and v.first_bad.tensor == cos and kind(v) == "cos_sin_swapped"
        assert kind(files(a, {**a, cos: self.table("cos", through=torch.bfloat16)})) == "rotary_frequency"
        assert kind(files(a, {**a, cos: self.table("cos", 500000.0)})) == "rotary_base"

    def test_both_in_one_table(self, files):
        name = "model.rotary_emb.cos_sin_cache"
        cos, sin = self.table("cos"), self.table("sin")
        a = {name: torch.cat([cos, sin], -1)}
        assert kind(files(a, {name: torch.cat([sin, cos], -1)})) == "cos_sin_swapped"
        assert kind(files(a, {name: torch.stack([cos, sin], -1).flatten(1)})) == "interleaved"
        other = [self.table(w, through=torch.bfloat16) for w in ("cos", "sin")]
        assert kind(files(a, {name: torch.cat(other, -1)})) == "rotary_frequency"

    def test_complex_tables(self, files):
        cos, sin = self.table("cos"), self.table("sin")
        a = {"rope.freqs_cis": torch.complex(cos, sin)}
        assert kind(files(a, {"rope.freqs_cis": torch.complex(sin, cos)})) == "cos_sin_swapped"
        assert kind(files(a, {"rope.freqs_cis": torch.complex(cos, -sin)})) == "rotary_direction"

    @pytest.mark.parametrize("layout", ["half", "interleaved"])
    def test_rotated_with_both_swapped_and_no_input(self, files, layout):
        x = rand(32, 4, 16)
        right, wrong = (rotate(x, self.p, self.f, layout, 8 if layout == "half" else 0, swapped=s).float() for s in (False, True))
        v = files({"layers.0.self_attn.q_after_rope": right}, {"layers.0.self_attn.q_after_rope": wrong})
        assert v.status is Status.FAIL and v.first_bad.layer == 0 and kind(v) == "cos_sin_swapped"
        assert files({"layers.0.self_attn.q_after_rope": right}, {"layers.0.self_attn.q_after_rope": rand(32, 4, 16)}).causes == []


class TestProducts:
    @pytest.mark.parametrize("mode", ["TF32", "TF32 (truncated)", "bfloat16"])
    def test_inputs_that_were_rounded(self, mode):
        x, w = rand(8, 32), rand(16, 32)
        name = "layers.0.mlp.down_proj"
        out = {f"{name}.input": x, f"{name}.weight": w, f"{name}.output": x @ w.T}
        rounded = rounding_modes(x)[mode] @ rounding_modes(w)[mode].T
        v = layers.judge(out, {**out, f"{name}.output": rounded})
        assert v.status is Status.FAIL and kind(v) == "rounded_inputs" and v.causes[0].evidence == {"side": "b", "format": mode}
        assert layers.judge(out, dict(out)).status is Status.PASS

    def test_operands_that_are_too_large_are_not_read(self, monkeypatch):
        x, w = rand(8, 32), rand(16, 32)
        out = {"layers.0.fc.input": x, "layers.0.fc.weight": w, "layers.0.fc.output": x @ w.T}
        wrong = {**out, "layers.0.fc.output": rounding_modes(x)["TF32"] @ rounding_modes(w)["TF32"].T}
        monkeypatch.setattr("alignment.diagnose.modules._ROUNDED", w.numel() - 1)
        assert kind(layers.judge(out, wrong)) != "rounded_inputs"
        monkeypatch.undo()
        monkeypatch.setattr("alignment.layers._OPERAND", w.numel() - 1)
        v = layers.judge(out, wrong)
        assert v.status is Status.FAIL and kind(v) != "rounded_inputs" and v.first_bad.tensor == "layers.0.fc.output"

    def test_a_transposed_weight_found_beside(self):
        x, w = rand(8, 16), rand(16, 16)
        out = {"layers.0.fc.input": x, "layers.0.fc.weight": w, "layers.0.fc.output": x @ w.T}
        v = layers.judge(out, {**out, "layers.0.fc.output": x @ w})
        assert kind(v) == "transposed" and v.first_bad.tensor == "layers.0.fc.output"


class TestLogprobs:
    z = rand(12, 50) * 3
    ids = z.softmax(-1).multinomial(1, generator=G)[:, 0]

    def dump(self, z, ids=None):
        ids = self.ids if ids is None else ids
        return {"token_ids": ids, "logprobs": torch.log_softmax(z, -1).gather(-1, ids[:, None])[:, 0], "logits": self.z}

    @pytest.mark.parametrize("t", [0.7, 1.5])
    def test_the_logits_beside_tell_the_temperature(self, files, t):
        v = files(self.dump(self.z), self.dump(self.z / t))
        assert v.status is Status.FAIL and v.first_bad.position == 0 and kind(v) == "temperature"
        assert v.causes[0].evidence["temperature"] == pytest.approx(t, rel=1e-3)

    @pytest.mark.parametrize("top_p", [0.8, 0.95])
    def test_the_logits_beside_tell_the_kept_mass(self, files, top_p):
        order = self.z.sort(-1, descending=True)
        p = order.values.softmax(-1)
        cut = self.z.masked_fill(torch.zeros_like(p, dtype=torch.bool).scatter(-1, order.indices, (p.cumsum(-1) - p) >= top_p), -math.inf)
        ids = cut.softmax(-1).multinomial(1, generator=G)[:, 0]
        v = files(self.dump(self.z, ids), self.dump(cut, ids))
        low, high = v.causes[0].evidence["top_p"]
        assert v.status is Status.FAIL and kind(v) == "truncated_softmax" and low < top_p <= high

    @pytest.mark.parametrize("ids", [torch.arange(12) + 45, torch.arange(12) - 1], ids=["beyond the last", "below the first"])
    def test_ids_that_the_logits_do_not_have(self, files, ids):
        a = {"token_ids": ids, "logprobs": -torch.arange(1.0, 13), "logits": self.z}
        v = files(a, {**a, "logprobs": a["logprobs"] - torch.arange(12.0) ** 2})
        assert v.status is Status.FAIL and v.first_bad.position == 1 and v.causes == []

    def test_the_logits_beside_tell_the_count(self, files):
        cut = self.z.masked_fill(self.z < self.z.topk(5).values[:, -1:], -math.inf)
        ids = self.z.argmax(-1)
        v = files(self.dump(self.z, ids), self.dump(cut, ids))
        assert kind(v) == "truncated_softmax" and v.causes[0].evidence["top_k"] == 5

    def test_a_vocabulary_that_was_cut(self, files):
        ids = self.ids.clamp(max=39)
        v = files(self.dump(self.z, ids), self.dump(self.z[:, :40], ids))
        assert v.status is Status.FAIL and kind(v) == "truncated_vocabulary" and v.causes[0].evidence["kept"] == 40
        whole = {"logprobs": torch.log_softmax(self.z, -1)}
        v = files(whole, {"logprobs": torch.log_softmax(self.z[:, :40], -1)}, kind="logprobs")
        assert v.status is Status.INVALID and kind(v) == "truncated_vocabulary"

    def test_noise_has_none_of_these_causes(self, files):
        a = self.dump(self.z)
        assert files(a, {**a, "logprobs": a["logprobs"] + 0.01 * rand(12)}).causes == []

    def test_a_lag_within_short_requests(self, tmp_path):
        rows = [{"request_id": i, "token_ids": [1, 2, 3, 4], "logprobs": [-0.1 - 10 * n, -0.2 - 10 * n, -0.3 - 10 * n, -0.4 - 10 * n]} for n, i in enumerate("ab")]
        late = [{**r, "logprobs": [0.0, *r["logprobs"][:-1]]} for r in rows]
        for name, content in (("a", rows), ("twin", rows), ("b", late)):
            (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, content)))
        v = compare_runs(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
        assert v.status is Status.FAIL and (v.first_bad.request, v.first_bad.position) == ("a", 0) and kind(v) == "lag"
        assert compare_runs(tmp_path / "a.jsonl", tmp_path / "twin.jsonl").status is Status.PASS

    def test_a_lag_under_a_mask(self):
        v, mask = rand(3, 8), torch.arange(8) < torch.tensor([8, 6, 7])[:, None]
        assert kind(logprobs.judge(v, v.roll(1, 1), mask=mask)) == "lag"
        assert logprobs.judge(v, torch.where(mask, v, 9.0), mask=mask).status is Status.PASS


class TestPackedDumps:
    tokens, values, bounds = torch.arange(5, 14), -rand(9).abs(), torch.tensor([0, 3, 5, 9])
    padded = torch.tensor([0, 4, 8, 12])
    at = torch.tensor([0, 1, 2, 4, 5, 8, 9, 10, 11])

    def sides(self, values=None, fill=0.0):
        buffer = torch.zeros(12, dtype=torch.int64).index_copy(0, self.at, self.tokens)
        wide = torch.full((12,), fill).index_copy(0, self.at, self.values if values is None else values)
        return ({"tokens": self.tokens, "logprobs": self.values, "cu_seqlens": self.bounds},
                {"tokens": buffer, "logprobs": wide, "cu_seqlens": self.bounds, "cu_seqlens_padded": self.padded})

    @pytest.mark.parametrize("fill", [0.0, 7.0])
    def test_padded_bounds_meet_plain_ones(self, files, fill):
        assert files(*self.sides(fill=fill)).status is Status.PASS

    def test_a_value_is_placed_in_its_sequence(self, files):
        v = files(*self.sides(self.values - (torch.arange(9) == 6) * 0.5))
        assert v.status is Status.FAIL and (v.first_bad.request, v.first_bad.position, v.first_bad.token) == ("2", 1, 11)

    def test_padded_bounds_taken_for_the_real_ones(self, files):
        a, b = self.sides()
        v = files(a, {"tokens": b["tokens"], "logprobs": b["logprobs"], "cu_seqlens": self.padded})
        assert not v.green and kind(v) == "padding" and v.first_bad.request == "0"

    @pytest.mark.parametrize("bounds", [[0, 3, 2, 9], [0, 3, 5, 19], [1, 3, 5, 9], []])
    def test_bounds_that_are_none(self, files, bounds):
        a = self.sides()[0]
        assert files(a, {**a, "cu_seqlens": torch.tensor(bounds, dtype=torch.int64)}).status is Status.INVALID


class TestFiles:
    @pytest.mark.parametrize("rules", [
        [], "x", {"patterns": [{"match": "^h", "name": r"\9"}]}, {"tensors": ["a"]}, {"tensors": None}, {"dtypes": {"layers.0.output": 5}}, {"ignore": [5]},
        {"patterns": [{"match": "^h", "name": None}]}, {"patterns": {"a": "b"}}, {"patterns": [{"match": "zzz", "name": "y"}]}, {"ignore": ["zzz"]}, {"schema": 9},
        {"order": "ab"}, {"order": ["gone"]}, {"order": ["layers.0.output"] * 2}, {"tensors": {"h.0.out": 5}}, {"ignore": "h"},
    ], ids=str)  # fmt: skip
    def test_a_mapping_that_is_none(self, tmp_path, rules):
        pair = [tmp_path / "a.npz", tmp_path / "b.npz"]
        x = np.arange(4, dtype=np.float32)
        np.savez(pair[0], **{"h.0.out": x})
        np.savez(pair[1], **{"layers.0.output": x})
        good = {"patterns": [{"match": r"^h\.(\d+)\.out$", "name": r"layers.\1.output"}]}
        assert compare_runs(*pair, rules_a=good, rules_b=good).status is Status.PASS  # one file for both need not fit each
        merged = {**good, **rules} if isinstance(rules, dict) else rules
        v = compare_runs(*pair, rules_a=merged, rules_b=merged)
        assert v.status is Status.INVALID and "apping" in v.reason

    def test_a_mapping_that_nothing_asks(self, tmp_path):
        for side in "ab":
            (tmp_path / f"{side}.jsonl").write_text(json.dumps({"request_id": "r", "token_ids": [1, 2], "logprobs": [-0.1, -0.2]}))
            with RecordWriter(tmp_path / side) as w:
                w.add("weight", "norm.weight", torch.ones(2))
        for pair in ((tmp_path / "a.jsonl", tmp_path / "b.jsonl"), (tmp_path / "a", tmp_path / "b")):
            assert compare_runs(*pair).status is Status.PASS
            for rules in ({"rules_a": {"ignore": ["x"]}}, {"rules_b": {}}):
                v = compare_runs(*pair, **rules)
                assert v.status is Status.INVALID and "a mapping was given for" in v.reason

    @pytest.mark.parametrize("rules", [{"ignore": ["(o+o*)+x"]}, {"patterns": [{"match": "(?:o|oo)+x$", "name": "y"}]}], ids=str)
    def test_a_pattern_that_goes_back_and_forth_without_end(self, tmp_path, monkeypatch, rules):
        monkeypatch.setattr("alignment.rules._PATIENCE", 1.0)
        for side in "ab":
            save_file({"layers.0." + 200 * "o": torch.ones(2)}, tmp_path / f"{side}.safetensors")
        v = compare_runs(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rules_a=rules, rules_b=rules)
        assert v.status is Status.INVALID and "are not through with 2 names" in v.reason

    @pytest.mark.parametrize("name", ["a\x9b31m", "a\x7f", "\u202eevil", "a\u00a0b"])
    def test_names_that_do_not_print(self, tmp_path, name):
        for side in "ab":
            save_file({name: torch.ones(2)}, tmp_path / f"{side}.safetensors")
        assert compare_runs(tmp_path / "a.safetensors", tmp_path / "b.safetensors").status is Status.INVALID

    def test_a_hole_between_two_tensors(self, tmp_path):
        head = json.dumps({n: {"dtype": "F32", "shape": [2], "data_offsets": o} for n, o in (("a", [0, 8]), ("b", [12, 20]))}).encode()
        for side in "ab":
            (tmp_path / f"{side}.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bytes(20))
        v = compare_runs(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
        assert v.status is Status.INVALID and "4 bytes at 8 that belong to no tensor" in v.reason

    def test_an_update_that_changes_nothing_has_a_history_all_the_same(self):
        versions = [{"w": rand(4)} for _ in range(4)]
        new, history = versions[3], [versions[2], versions[1]]
        assert weights.judge_paths({"ipc": new}, new, history).status is Status.PASS
        assert weights.judge_paths({"ipc": new}, new, [new, versions[1]]).status is Status.NOT_RUN
        v = weights.judge_paths({"ipc": new, "nccl": versions[1]}, new, history)
        assert v.status is Status.FAIL and v.first_bad.run == "nccl" and kind(v) == "stale" and v.causes[0].evidence["updates"] == 2

    def test_a_rank_that_holds_nothing(self):
        full = rand(16, 4)
        assert weights.judge_shards(full, [full[:8], full[8:]]).status is Status.PASS
        for held in ({0: full[:8]}, {0: full[:5]}, [full[:8], full[8:12]]):
            assert not weights.judge_shards(full, held).green

    @pytest.mark.parametrize(("diffs", "tier", "status", "at"), [
        ([0.0, math.nan], "exact", Status.INVALID, 1), ([1e-9, math.inf, 0.0], "1e-6", Status.INVALID, 1), ([1e-9, math.nan, 2.0], "1e-6", Status.FAIL, 2),
        ([0.0, 0.0], "exact", Status.PASS, None), ([1e-9, 0.0], "1e-6", Status.PASS, None),
    ])  # fmt: skip
    def test_differences_that_are_no_numbers(self, diffs, tier, status, at):
        v = logprobs.gate_metrics({"train_rollout_logprob_abs_diff": diffs}, tier=tier)
        assert v.status is status and (v.first_bad.position if v.first_bad else None) == at
