"""Faults of the five classes that none of the public reports names, written from the documentation alone.

Each states the verdict, the place and the cause a user expects. Where a diagnosis is asked for, there is a case
beside it in which that diagnosis would be false.
"""
from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from alignment import InputError, RecordWriter, Status, bits, layers, logprobs, match, rerun, weights
from alignment.compare import compare_runs
from alignment.diagnose.numbers import rounded_through
from alignment.rerun import Run


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def kinds(verdict) -> list[str]:
    return [c.kind for c in verdict.causes]


class TestRerunAndBatch:
    def test_facts_as_tensors_tuples_and_lists(self):
        side = {"gemm": {"tile": torch.tensor([64, 64])}}
        assert rerun.judge_configs({0: side, 1: {"gemm": {"tile": (64, 64)}}}).status is Status.PASS
        v = rerun.judge_configs({0: side, 1: {"gemm": {"tile": [64, 128]}}})
        assert v.status is Status.FAIL and v.first_bad.module == "gemm" and v.first_bad.rank == {"rank": 1}

    def test_facts_that_are_all_none_are_no_evidence(self):
        assert rerun.judge_configs({0: {"tile": None}, 1: {"tile": None}}).status is Status.NOT_RUN

    def test_axes_may_be_tensors(self):
        x, y = rand(2, 4), rand(2, 4) + 1
        v = rerun.judge([Run({"attn": x}, {"seqlens": torch.tensor([1, 2])}), Run({"attn": y}, {"seqlens": torch.tensor([1, 12])})])
        assert v.status is Status.FAIL and "seqlens [1, 2] vs [1, 12]" in v.cause and v.first_bad.module == "attn"

    def test_hits_must_be_numbers(self):
        with pytest.raises(InputError, match="hits"):
            rerun.judge([Run({"o": rand(2)}, {"hits": "3"}), Run({"o": rand(2)}, {"hits": "0"})], require_hits="hits")

    @pytest.mark.parametrize("module", [torch.nn.Dropout(1), torch.nn.RReLU()])
    def test_everything_that_draws(self, module):
        v = rerun.judge_self(lambda: torch.ones(4), torch.nn.Sequential(module))
        assert v.status is Status.FAIL and v.first_bad.module == "0" and kinds(v) == ["training_mode"]
        assert rerun.judge_self(lambda: torch.ones(4), torch.nn.TripletMarginLoss()).status is Status.PASS  # its p is a norm

    def test_noise_is_no_dispatch_boundary(self):
        calls = iter(range(99))
        v = rerun.judge_sweep(lambda x: x + 1e-3 * (next(calls) == 4), rand(8, 4), (1, 4, 8), boundaries=())
        assert v.status is Status.FAIL and v.causes[0].kind == "nondeterministic" and "boundary" not in v.cause

    def test_a_function_that_writes_to_its_input(self):
        assert rerun.judge_sweep(lambda x: x.add_(1), torch.zeros(8, 2), (1, 4, 8), boundaries=()).status is Status.PASS

    def test_sizes_that_do_not_fit_say_so(self):
        v = rerun.judge_sweep(lambda x: x, rand(8, 2), (1, 512), boundaries=())
        assert v.status is Status.NOT_RUN and "512" in v.reason


class TestLogprobs:
    z = rand(32, 64) * 2
    ids = torch.arange(32) % 64
    lp = z.log_softmax(-1).gather(-1, ids[:, None])[:, 0]

    def of(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1).gather(-1, self.ids[:, None])[:, 0]

    def test_a_cast_is_no_temperature(self):
        v = logprobs.judge(self.lp, self.lp.bfloat16(), tokens=self.ids)
        assert v.status is Status.FAIL and kinds(v) == ["dtype_cast"]

    def test_noise_in_bf16_is_no_temperature(self):
        a = (self.lp[:16] - 1).bfloat16()
        v = logprobs.judge(a, (a.float() + 0.1 * rand(16)).bfloat16())
        assert v.status is Status.FAIL and "temperature" not in kinds(v)

    @pytest.mark.parametrize(("factor", "text"), [(math.log2(math.e), "base 2 on side b"), (math.log(10), "10 on side a"), (4.0, "times 4")])
    def test_other_logarithms(self, factor, text):
        assert text in logprobs.judge(self.lp, self.lp * factor).cause

    def test_probabilities(self):
        assert kinds(logprobs.judge(self.lp, self.lp.exp())) == ["exponential"]

    def test_softcap_and_padded_normaliser(self):
        capped = logprobs.judge(self.lp, self.of(30 * torch.tanh(self.z / 30)), tokens=self.ids, logits=self.z)
        assert capped.status is Status.FAIL and kinds(capped) == ["softcap"] and capped.causes[0].evidence["cap"] == 30
        padded = logprobs.judge(self.lp, self.of(torch.cat([self.z, torch.zeros(32, 16)], -1)), tokens=self.ids, logits=self.z)
        assert kinds(padded) == ["padded_vocabulary"] and padded.causes[0].evidence["padding"] == 16

    def test_a_mask_does_not_silence_the_cause(self):
        keep = torch.arange(32) > 5
        v = logprobs.judge(self.lp, self.of(self.z / 0.7), tokens=self.ids, logits=self.z, mask=keep)
        assert v.status is Status.FAIL and v.first_bad.position == 6 and kinds(v) == ["temperature"]

    def test_nan_has_an_origin_and_a_lost_token_a_place(self):
        v = logprobs.judge(self.lp, torch.where(torch.arange(32) == 5, math.nan, self.lp))
        assert v.status is Status.FAIL and v.first_bad.position == 5 and kinds(v) == ["nan_origin"]
        v = logprobs.judge(self.lp, self.lp[:-1])
        assert v.status is Status.INVALID and v.first_bad.position == 31

    def test_one_token_at_an_end(self):
        front = match.judge([5, 6, 7], [1, 5, 6, 7])
        behind = match.judge([5, 6, 7, 2], [5, 6, 7])
        assert "begin-of-sequence" in front.cause and "dropped" in behind.cause and behind.first_bad.position == 3

    def test_padding_at_different_ends(self):
        v = match.judge([5, 6, 7, 0, 0], [0, 0, 5, 6, 7])
        assert v.status is Status.FAIL and kinds(v) == ["padding"]
        assert kinds(match.judge([5, 6, 7, 8, 9, 4], [3, 5, 6, 7, 8, 9])) == ["shift"]


class TestMetrics:
    @pytest.mark.parametrize("value", ["0.0", "nan", True, False, ["a"], None])
    def test_what_is_no_number_is_never_green(self, value):
        assert not logprobs.gate_metrics({"abs_diff": value}, "abs_diff", tokens=4).green

    @pytest.mark.parametrize("count", [math.nan, "twelve", -1, 2.5, True])
    def test_counts(self, count):
        assert not logprobs.gate_metrics({"abs_diff": 0.0, "n": count}, "abs_diff", tokens="n").green

    def test_a_signed_mean_of_zero_is_not_green(self):
        assert logprobs.gate_metrics({"logprob_diff": 0.0}, "logprob_diff", tokens=4).status is Status.INVALID
        assert logprobs.gate_metrics({"logprob_abs_diff": 0.0}, "logprob_abs_diff", tokens=4).status is Status.PASS

    def test_softmax_is_no_maximum(self):
        assert logprobs.gate_metrics({"softmax_abs_diff": 5e-7}, "softmax_abs_diff", tokens=1000).status is Status.INVALID
        assert logprobs.gate_metrics({"diff_max": 5e-7}, "diff_max", tokens=1000).status is Status.PASS

    def test_differences_of_another_metric(self):
        assert logprobs.gate_metrics({"abs_diff": 0.7}, "abs_diff", diffs=torch.zeros(9)).status is Status.INVALID
        assert logprobs.gate_metrics({"abs_diff": 2e-8}, "abs_diff", diffs=torch.full((9,), 2e-8)).status is Status.PASS


class TestWeights:
    def test_renamed_and_missing(self):
        w = rand(4, 4)
        v = weights.judge({"a.weight": w}, {"b.weight": w})
        assert v.status is Status.INVALID and v.first_bad.tensor == "a.weight" and kinds(v) == ["renamed"]
        assert kinds(weights.judge({"a.weight": w}, {"b.weight": w + 1})) == []

    def test_a_missing_expert_names_its_rank(self):
        experts = {f"layers.0.experts.{e}.w": rand(3) + e for e in range(8)}
        v = weights.judge(experts, {n: t for n, t in experts.items() if ".7." not in n}, ep=4)
        assert v.status is Status.INVALID and v.first_bad.expert == 7 and v.first_bad.rank == {"ep": 3}

    def test_the_loose_one_of_two_tied(self):
        e = rand(4, 4)
        v = weights.judge({"embed": e, "head": e}, {"embed": e, "head": e + 1}, tied=[("head", "embed")])
        assert v.status is Status.FAIL and v.first_bad.tensor == "head"

    def test_stages(self):
        w = {"a": rand(4)}
        assert weights.judge_stages({"HF": w}).status is Status.NOT_RUN
        with pytest.raises(InputError, match="nope"):
            weights.judge_stages({"HF": w, "B": w}, truth={"nope": w})
        v = weights.judge_stages({"HF": w, "shards": {"ep0": w, "ep1": {"a": w["a"] + 1}}})
        assert v.status is Status.INVALID and v.first_bad.stage == "shards" and v.first_bad.rank == {"ep": 1} and kinds(v) == ["duplicate"]

    def test_received(self):
        assert weights.judge_received(["w", "s"], ["w", "s", "w"]).status is Status.INVALID
        assert weights.judge_received(["w"], [], retained=["w"]).status is Status.NOT_RUN
        assert weights.judge_received(["w", "s"], ["w"], retained=["s"]).status is Status.PASS

    def test_shards(self):
        w = rand(16, 4)
        assert weights.judge_shards(w, []).status is Status.NOT_RUN
        assert kinds(weights.judge_shards(w, [w, w])) == ["not_split"]
        twice = weights.judge_shards(w, [w[:8], w[:8]])
        assert twice.status is Status.FAIL and twice.first_bad.rank == {"tp": 1} and kinds(twice) == ["wrong_shard"]
        swapped = weights.judge_shards(w, [w[8:], w[:8]])
        assert swapped.first_bad.rank == {"tp": 0} and "swapped" in swapped.cause

    def test_padding_on_the_middle_rank_and_on_every_rank(self):
        w, pad = rand(16, 4), torch.zeros(2, 4)
        v = weights.judge_shards(w, [w[:6], torch.cat([w[6:10], pad]), w[10:]])
        assert v.status is Status.INVALID and v.first_bad.rank == {"tp": 1} and kinds(v) == ["padded_vocabulary"]
        v = weights.judge({"lm_head.weight": w}, {"lm_head.weight": torch.cat([w[:8], pad, w[8:], pad])}, tp=2)
        assert v.status is Status.INVALID and v.causes[0].evidence["at"] == [8, 9, 18, 19] and v.first_bad.rank == {"tp": 0}

    @pytest.mark.parametrize(("change", "kind"), [
        (torch.zeros_like, "zero"), (lambda s: 1 / s, "reciprocal"), (lambda s: s * torch.arange(1, 9)[:, None], "row_scale"),
        (lambda s: s * (torch.arange(8) != 7)[:, None], "zero_rows"),
    ])  # fmt: skip
    def test_scales(self, change, kind):
        s = rand(8, 8).abs() + 0.1
        assert kinds(weights.judge({"w_scale": s}, {"w_scale": change(s)})) == [kind]

    @pytest.mark.parametrize(("x", "dtype"), [(torch.tensor([200, 1], dtype=torch.uint8), torch.int8),
                                              (torch.ones(4).to(torch.float8_e4m3fn), torch.float8_e4m3fnuz)])  # fmt: skip
    def test_the_same_bytes_of_another_dtype(self, x, dtype):
        v = bits.judge(x, x.view(torch.uint8).view(dtype))
        assert v.status is Status.FAIL and kinds(v) == ["reinterpreted"]

    def test_rounding_needs_evidence(self):
        assert rounded_through(torch.tensor([1e-9, 2e-9]), torch.zeros(2)) is None
        assert rounded_through(1 + 1e-4 * rand(8), torch.ones(8)) is None
        assert rounded_through(torch.tensor([0.1]), torch.tensor([0.1]).bfloat16().float()).kind == "rounded"


class TestLayers:
    def test_epsilon_that_no_list_has(self):
        x = rand(6, 16) * torch.tensor([0.001, 0.01, 0.1, 1, 2, 3])[:, None]
        def norm(eps: float) -> torch.Tensor:
            return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
        v = layers.judge({"norm": norm(1e-6)}, {"norm": norm(2e-5)}, inputs={"norm": x})
        assert kinds(v) == ["epsilon"] and v.causes[0].evidence["b"] == pytest.approx(2e-5)

    def test_softcap_and_base(self):
        h = 20 * rand(6, 16)
        assert kinds(layers.judge({"lm_head.output": h}, {"lm_head.output": 30 * torch.tanh(h / 30)})) == ["softcap"]
        f = [base ** (-torch.arange(8.0) / 8) for base in (1e4, 150000.0)]
        v = layers.judge({"rope.inv_freq": f[0]}, {"rope.inv_freq": f[1]})
        assert kinds(v) == ["rotary_base"] and v.causes[0].evidence["b"] == pytest.approx(150000, rel=1e-3)

    def test_routing_weights_have_no_norm(self):
        p = rand(4, 8).softmax(-1)
        v = layers.judge({"router.topk_weights": p}, {"router.topk_weights": p * (1 + torch.arange(4.0)[:, None])})
        assert v.status is Status.FAIL and "norm" not in v.cause


class TestFiles:
    def checkpoint(self, path, **listed):
        path.mkdir()
        save_file({"a.weight": rand(4)}, path / "model-00001-of-00002.safetensors")
        save_file({"b.weight": rand(5)}, path / "model-00002-of-00002.safetensors")
        table = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors", **listed}
        table = {n: f for n, f in table.items() if f}
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
        return path

    def test_a_sharded_checkpoint_is_no_recording(self, tmp_path):
        a, b = (self.checkpoint(tmp_path / n) for n in "ab")
        v = compare_runs(a, b)
        assert v.status is Status.PASS and str(v.coverage["tensors"]) == "2/2"

    @pytest.mark.parametrize("listed", [{"b.weight": None}, {"a.weight": "../x.safetensors"}, {"c.weight": "model-00001-of-00002.safetensors"}])
    def test_an_index_that_lies(self, tmp_path, listed):
        v = compare_runs(self.checkpoint(tmp_path / "a", **listed), self.checkpoint(tmp_path / "b"))
        assert v.status is Status.INVALID and "index" in v.reason

    def test_bytes_behind_the_last_tensor(self, tmp_path):
        save_file({"a": rand(4)}, tmp_path / "a.safetensors")
        (tmp_path / "b.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes() + b"xx")
        assert compare_runs(tmp_path / "a.safetensors", tmp_path / "b.safetensors").status is Status.INVALID

    @pytest.mark.parametrize("record", [
        {"logprobs": [-0.1, None]}, {"logprobs": 5}, {"logprobs": "ab"}, {"prompt_token_ids": 5}, {"prompt_token_ids": "ab"},
        {"positions": 3}, {"positions": [0]}, {"token_ids": 7}, {"token_ids": {"0": 1}},
    ])  # fmt: skip
    def test_records_of_requests_that_are_none(self, tmp_path, record):
        path = tmp_path / "r.json"
        path.write_text(json.dumps({"r1": {"token_ids": [5, 6], "logprobs": [-0.1, -0.2], **record}}))
        v = compare_runs(path, path)
        assert v.status is Status.INVALID and "object" not in v.reason

    def write(self, path, values, rank=0, world=1, tokens=(1, 2, 3, 4), request="r1"):
        with RecordWriter(path, rank={"tp": rank}, world=world) as w:
            w.add("layer", "layers.2.output", values, request=request, tokens=list(tokens), positions=list(range(len(tokens))), step=3)
        return path

    def test_places_in_records(self, tmp_path):
        x = rand(4, 8)
        good = self.write(tmp_path / "good", x)
        other = self.write(tmp_path / "other", x, tokens=(1, 2, 9, 4))
        v = compare_runs(good, other)
        assert v.status is Status.FAIL and (v.first_bad.step, v.first_bad.layer, v.first_bad.position) == (3, 2, 2)
        v = compare_runs(good, self.write(tmp_path / "renamed", x, request="r2"))
        assert v.status is Status.INVALID and v.first_bad.request == "r1" and v.first_bad.step == 3
        torn = self.write(tmp_path / "torn", x, world=2)
        assert compare_runs(good, torn).first_bad.run == "side b"
        y = x.clone()
        y[2] += 1
        v = compare_runs(good, self.write(torn, y, rank=1, world=2))
        assert v.status is Status.INVALID and v.first_bad.rank["tp"] == 1 and (v.first_bad.layer, v.first_bad.position) == (2, 2)
