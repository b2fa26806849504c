"""More ways to be green without having compared: facts that one rank lacks, columns that nobody reads, names that two things share."""
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from alignment import InputError, RecordWriter, bits, layers, logprobs, rerun, weights
from alignment.compare import compare_runs
from alignment.errors import KeyCollision
from alignment.verdict import Status

IDS, LP, X = torch.arange(7), -torch.arange(1.0, 8), torch.arange(12.0).reshape(4, 3)
ROW = {"request_id": "a", "token_ids": [5, 6, 7], "logprobs": [-0.5, -1.5, -2.5]}


@pytest.fixture
def saved(tmp_path):
    """Writes two sides as files of one kind and compares them."""

    def compare(a, b, suffix=".jsonl"):
        paths = []
        for side, content in (("a", a), ("b", b)):
            paths.append(tmp_path / f"{side}{suffix}")
            if suffix == ".jsonl":
                paths[-1].write_text("\n".join(map(json.dumps, content)))
            elif suffix == ".json":
                paths[-1].write_text(json.dumps(content))
            else:
                save_file({n: t.clone() for n, t in content.items()}, paths[-1])
        return compare_runs(*paths)

    return compare


class TestReruns:
    def test_two_labels_that_are_one(self):
        with pytest.raises(KeyCollision, match="3 runs under 2 labels"):
            rerun.judge({1: {"o": X + 1}, "1": {"o": X}, 2: {"o": X}})

    @pytest.mark.parametrize("facts", [{"a.b": 1, "a": {"b": 2}}, {1: 1, "1": 2}])
    def test_two_facts_of_one_name(self, facts):
        with pytest.raises(KeyCollision, match="two facts"):
            rerun.judge_configs({0: facts, 1: facts})

    def test_types_inside_lists_are_part_of_a_fact(self):
        assert rerun.judge_configs({0: {"tile": [1, 2]}, 1: {"tile": [True, 2]}}).status is Status.FAIL
        assert rerun.judge_configs({0: {"tile": (1, 2)}, 1: {"tile": [1, 2]}}).status is Status.PASS

    def test_arguments_of_another_form(self):
        with pytest.raises(InputError, match="a mapping rank"):
            rerun.judge_configs([{"a": 1}, {"a": 2}])
        one, two = (rerun.Run({"o": X}, axes={"rows": i}, process={"pid": i}) for i in (1, 2))
        assert rerun.judge([one, two], require="rows", fresh_process=True).status is Status.PASS
        assert rerun.judge_sweep(lambda x: x * 1, X, (1, 4), boundaries=4).status is Status.PASS
        with pytest.raises(InputError, match="names that are text"):
            rerun.judge([{0: X}, {0: X}])


def rank(path, tp, world, kernels=None, entries=()):
    with RecordWriter(path, rank={"tp": tp}, world=world, kernels=kernels) as w:
        w.add("layer", "layers.0.output", X, request="r", tokens=range(4), positions=range(4))
        for kind, value in entries:
            w.add(kind, f"layers.0.{kind}", value, tokens=range(4))


class TestRecords:
    def test_a_kernel_that_one_rank_does_not_state(self, tmp_path):
        rank(tmp_path / "a", 0, 2, {"norm": "v1"})
        rank(tmp_path / "a", 1, 2, {"norm": "v1"})
        rank(tmp_path / "b", 0, 2, {"norm": "v2"})
        rank(tmp_path / "b", 1, 2)
        v = compare_runs(tmp_path / "a", tmp_path / "b")
        assert v.status is Status.FAIL and "norm v1 vs v2" in v.reason
        rank(tmp_path / "c", 0, 2, {"norm": "v1"})
        rank(tmp_path / "c", 1, 2, {"head": "v1"})  # a rank that runs other ops
        assert compare_runs(tmp_path / "a", tmp_path / "c").status is Status.PASS

    @pytest.mark.parametrize("kind", ["weight", "buffer"])
    def test_weights_with_tokens_are_compared(self, tmp_path, kind):
        for side, value in (("a", X), ("b", X + 1), ("c", X.clone())):
            rank(tmp_path / side, 0, 1, entries=[(kind, value)])
        v = compare_runs(tmp_path / "a", tmp_path / "b")
        assert v.status is Status.FAIL and v.first_bad.tensor == f"layers.0.{kind}"
        assert compare_runs(tmp_path / "a", tmp_path / "c").status is Status.PASS


class TestRequests:
    def test_every_column_of_log_probs(self, saved):
        a = [{**ROW, "old_log_probs": [-1.0, -2.0, -3.0]}]
        v = saved(a, [{**ROW, "old_log_probs": [-1.0, -2.0, -9.0]}])
        assert v.status is Status.FAIL and (v.first_bad.request, v.first_bad.position, v.first_bad.token) == ("a", 2, 7)
        assert "old_log_probs" in v.reason
        v = saved(a, [dict(a[0])])
        assert v.status is Status.PASS and "not_compared" not in v.info

    @pytest.mark.parametrize("field", ["loss_mask", "response_mask"])
    def test_a_mask_of_other_places(self, saved, field):
        a = {**ROW, "prompt_token_ids": [1, 2], "mask": [1, 1, 1], field: [0, 0, 1, 1, 1]}
        v = saved([a], [{**a, field: [0, 0, 1, 1, 0]}])
        assert v.status is Status.FAIL and (v.first_bad.tensor, v.first_bad.request, v.first_bad.index) == (field, "a", (4,))
        assert saved([a], [dict(a)]).status is Status.PASS

    @pytest.mark.parametrize("field", ["prompt_ids", "prompt_tokens"])
    def test_prompts_under_other_names(self, saved, field):
        v = saved([{**ROW, field: [1, 2]}], [{**ROW, field: [1, 3]}])
        assert v.status is Status.FAIL and (v.first_bad.request, v.first_bad.position) == ("a", 1)
        assert saved([{**ROW, field: [1, 2]}], [{**ROW, field: [1, 2]}]).status is Status.PASS

    def test_the_prompt_before_its_response(self, saved):
        a = {"id": "a", "input_ids": [1, 2, 5, 6, 7], "response_ids": [5, 6, 7], "logprobs": ROW["logprobs"]}
        v = saved([a], [{**a, "input_ids": [1, 3, 5, 6, 7]}])
        assert v.status is Status.FAIL and v.first_bad.position == 1
        v = saved([a], [{**a, "logprobs": [-0.5, -1.5, -9.0]}])
        assert v.status is Status.FAIL and (v.first_bad.position, v.first_bad.token) == (4, 7)

    def test_what_lies_beside_the_list(self, saved):
        v = saved({"samples": [ROW], "weight_version": 1}, {"samples": [ROW], "weight_version": 2}, ".json")
        assert v.info["differ_too"] == ["weight_version"] and "weight_version" in v.reason
        v = saved({"samples": [ROW], "requests": [ROW]}, {"samples": [ROW], "requests": [{**ROW, "logprobs": [-9.0] * 3}]}, ".json")
        assert v.status is Status.INVALID and "samples and requests" in v.reason


class TestLogprobs:
    @pytest.mark.parametrize("change", [0.0, -1.0])
    def test_a_log_prob_that_both_sides_lack(self, change):
        v = logprobs.judge(LP[:6], LP[:6] + change, tokens_a=IDS, tokens_b=IDS.clone())
        assert v.status is Status.INVALID and "log-probs [6] for tokens [7]" in v.reason
        with pytest.raises(InputError, match="tokens of shape"):
            logprobs.judge(LP[:6], LP[:6] + change, tokens=IDS)

    def test_fewer_log_probs_than_tokens_in_a_file_are_told(self, saved):
        a = {"token_ids": IDS, "logprobs": LP[:6]}
        v = saved(a, a, ".safetensors")
        assert v.status is Status.PASS and "6 log-probs for 7 token ids" in v.reason

    def test_log_probs_that_were_cut_to_whole_numbers(self, saved):
        with pytest.raises(InputError, match="fractions"):
            logprobs.judge((LP / 10).long(), (LP / 20).long())
        with pytest.raises(InputError, match="fractions"):
            logprobs.judge({"r": {"token_ids": [1, 2], "logprobs": LP[:2].int()}}, {"r": {"token_ids": [1, 2], "logprobs": LP[:2].int()}})
        a = {"token_ids": IDS, "logprobs": LP.int()}
        assert saved(a, a, ".safetensors").status is Status.INVALID
        written = {"token_ids": [1, 2], "logprobs": [0, -1]}  # by a writer that leaves out the point
        assert saved({"r": written}, {"r": {**written, "logprobs": [0.0, -1.0]}}, ".json").status is Status.PASS
        assert saved({"token_ids": [[1, 2]], "logprobs": [[0, -1]]}, {"token_ids": [[1, 2]], "logprobs": [[0, -1]]}, ".json").status is Status.PASS

    def test_masks_of_one_array_are_compared_place_by_place(self, saved):
        ids, lp = torch.full((1, 4), 5), -torch.tensor([[1.0, 2.0, 1.0, 2.0]])
        left, right = torch.tensor([[1, 1, 0, 0]]), torch.tensor([[0, 0, 1, 1]])
        v = saved({"token_ids": ids, "logprobs": lp, "mask": left}, {"token_ids": ids, "logprobs": lp, "mask": right}, ".safetensors")
        assert v.status is Status.FAIL and (v.first_bad.tensor, v.first_bad.index, v.first_bad.token) == ("mask", (0, 0), 5)
        assert logprobs.judge(lp, lp.clone(), tokens_a=ids, tokens_b=ids, mask_a=left, mask_b=right).status is Status.FAIL

    def test_what_padding_on_two_sides_leaves_out_is_told(self):
        v = logprobs.judge(LP[:3], LP[:3].roll(1), tokens_a=torch.tensor([8, 9, 0]), tokens_b=torch.tensor([0, 8, 9]), mask_a=[1, 1, 0], mask_b=[0, 1, 1])
        assert v.status is Status.PASS and v.info["left_out"]["a"] == "1 of 3 places are masked" and "1 of 3" in v.reason

    def test_bounds_under_two_names(self, saved):
        a = {"token_ids": IDS, "logprobs": LP, "cu_seqlens": torch.tensor([0, 3, 7]), "cu_seqlens_q": torch.tensor([0, 3, 7])}
        assert saved(a, a, ".safetensors").status is Status.PASS
        v = saved(a, {**a, "cu_seqlens_q": torch.tensor([0, 4, 7])}, ".safetensors")
        assert v.status is Status.INVALID and "do not bound the same" in v.reason


class TestMetrics:
    @pytest.mark.parametrize("key", ["abs_diff_p99", "abs_diff/p50", "median_abs_diff", "min_abs_diff", "abs_diff_std", "abs_mean_diff", "abs_of_mean",
                                     "abs_diff_quantile_0.99"])  # fmt: skip
    @pytest.mark.parametrize("value", [0.0, 1e-12])
    def test_a_part_of_the_differences_bounds_nothing(self, key, value):
        assert logprobs.gate_metrics({key: value}, key, tokens=100).status is Status.INVALID

    @pytest.mark.parametrize("key", ["top_p1_abs_diff", "tp2_abs_diff", "abs_diff_max", "mean_abs_diff", "abs_diff_mean"])
    def test_names_that_only_look_like_it(self, key):
        assert logprobs.gate_metrics({key: 0.0}, key, tokens=100).status is Status.PASS

    def test_a_mean_of_largest_values_is_no_largest_value(self):
        assert logprobs.gate_metrics({"abs_diff_max_mean": 1e-7}, "abs_diff_max_mean", tokens=100).status is Status.INVALID

    @pytest.mark.parametrize("count", [0.5, True, float("nan")])
    def test_a_number_of_tokens_that_is_none(self, count):
        assert logprobs.gate_metrics({"abs_diff": 0.0}, "abs_diff", tokens=count).status is Status.INVALID

    def test_differences_that_were_cut_to_whole_numbers(self):
        v = logprobs.gate_metrics({"abs_diff": 0.0}, "abs_diff", diffs=torch.tensor([0.5, -0.5]).long())
        assert v.status is Status.INVALID and "whole numbers" in v.reason


class TestNumbers:
    def test_a_list_in_which_two_numbers_become_one(self):
        for a, b in (([True, 2], [1, 2]), ([[True], [2]], [[1], [2]]), ([2**53 + 1, 0.5], [2**53, 0.5])):
            with pytest.raises(InputError):
                bits.judge(a, b)
        assert bits.judge([2**54, 0.5], [2**54, 0.5]).status is Status.PASS

    def test_the_mask_of_an_array_is_not_dropped(self):
        with pytest.raises(InputError, match="masked array"):
            bits.judge(np.ma.array([1.0, 2.0], mask=[0, 1]), np.ma.array([1.0, 2.0], mask=[0, 0]))

    def test_a_truth_value_is_no_tier(self):
        with pytest.raises(InputError, match="tier"):
            bits.judge(torch.ones(1), torch.ones(1) + 0.5, tier=True)

    def test_positions_of_other_outputs_prove_nothing(self):
        with pytest.raises(InputError, match="prove nothing"):
            layers.judge({"a": X}, {"a": X.clone()}, positions={"b": [0, 9, 9, 9]})
        with pytest.raises(InputError, match="not all numbers"):
            layers.judge({"a": X}, {"a": X.clone()}, positions=[float("nan")] * 4)

    def test_wrappers_hold_their_numbers_elsewhere(self):
        from torch._subclasses import FakeTensorMode
        from torch.masked import masked_tensor

        with FakeTensorMode():
            fake = torch.ones(3)
        for wrapped in (fake, masked_tensor(X, X > 0)):
            with pytest.raises(InputError, match="wraps its numbers"):
                bits.judge(wrapped, wrapped)
            with pytest.raises(InputError, match="wraps its numbers"):
                layers.judge({"a": wrapped}, {"a": wrapped})
        assert bits.judge(torch.nn.Parameter(X), torch.nn.Buffer(X.clone())).status is Status.PASS


class Seeded(torch.nn.Module):
    """A pass that seeds itself agrees with itself, however much noise it adds."""

    def __init__(self, **fields):
        super().__init__()
        for name, value in fields.items():
            setattr(self, name, value)


class Config:
    attention_dropout, summary_first_dropout = 0.1, 0.1


class TestTraining:
    @pytest.mark.parametrize("model", [Seeded(router_jitter_noise=0.01), Seeded(config=Config()), torch.nn.Sequential(torch.nn.BatchNorm1d(3))])
    def test_noise_that_a_seed_hides(self, model):
        v = rerun.judge_self(lambda: X, model)
        assert v.status is Status.FAIL and v.causes[0].kind == "training_mode" and len(v.info["training_modules"]) == 1
        model.eval()
        assert rerun.judge_self(lambda: X, model).status is Status.PASS

    def test_arguments_of_another_form(self):
        with pytest.raises(InputError, match=r"torch.nn.Module"):
            rerun.judge_self(lambda: X, "model")
        for pairs in ([(X, X)], {0: (X,)}):
            with pytest.raises(InputError, match="a mapping rank"):
                logprobs.judge_ranks(pairs)
        assert rerun.judge_self(lambda: X, torch.nn.Sequential(torch.nn.InstanceNorm1d(3), torch.nn.LayerNorm(3))).status is Status.PASS

    def test_a_tie_of_names_that_nobody_has(self):
        sides = [{"model.embed_tokens.weight": x} for x in (X, X.clone())]
        with pytest.raises(InputError, match="neither side"):
            weights.judge(*sides, tied=[("lm_head.wieght", "embed_tokens.weight")])
        assert weights.judge(*sides, tied=[("lm_head.weight", "model.embed_tokens.weight")]).status is Status.PASS


class TestReadOffTheRightLogits:
    g = torch.Generator().manual_seed(5)
    z = torch.randn(12, 64, generator=g) * 3
    ids = z.softmax(-1).multinomial(1, generator=g)[:, 0]
    lsm = z.log_softmax(-1)

    def of(self, t):
        return t.gather(1, self.ids[:, None])[:, 0]

    def wrong(self, kind):
        own = self.z.reshape(12, 4, 16).logsumexp(-1).gather(1, self.ids[:, None] // 16)[:, 0]
        return {"unnormalised": self.of(self.z), "greedy": self.lsm.amax(-1), "entropy": -(self.lsm * self.lsm.exp()).sum(-1),
                "vocabulary_shard": self.of(self.z) - own, "shift": self.of(self.lsm.roll(-1, 0)), "back": self.of(self.lsm.roll(1, 0))}[kind]  # fmt: skip

    @pytest.mark.parametrize("kind", ["unnormalised", "greedy", "entropy", "vocabulary_shard", "shift", "back"])
    @pytest.mark.parametrize("side", ["a", "b"])
    def test_is_said(self, kind, side):
        pair = (self.of(self.lsm), self.wrong(kind))
        v = logprobs.judge(*(pair if side == "b" else pair[::-1]), tokens=self.ids, logits=self.z)
        assert v.status is Status.FAIL and v.causes[0].kind == {"back": "shift"}.get(kind, kind) and f"side {side}" in v.cause

    @pytest.mark.parametrize("seed", range(20))
    def test_noise_is_none_of_these(self, seed):
        noise = torch.randn(12, generator=torch.Generator().manual_seed(seed)) * 1e-3
        right = self.of(self.lsm)
        for kind in ("unnormalised", "greedy", "entropy", "vocabulary_shard", "shift", "back"):
            v = logprobs.judge(right, self.wrong(kind) + noise, tokens=self.ids, logits=self.z)
            assert v.status is Status.FAIL and not v.causes
        assert not logprobs.judge(right, right + noise, tokens=self.ids, logits=self.z).causes
