"""Class 5: a harness that is green for the wrong reason."""
from __future__ import annotations

import math

import pytest
import torch

from alignment import bits, logprobs, weights
from alignment.verdict import Coverage, Status, Verdict

pytest_plugins = ("pytester",)


class TestCase37NaNEqualsNaN:
    def test_bits_are_equal_and_it_is_invalid(self):
        a = torch.full((3,), math.nan)
        v = bits.judge(a, a.clone(), "grad")
        assert v.status is Status.INVALID
        assert "non-finite 3/3 vs 3/3" in v.reason
        assert v.first_bad.tensor == "grad" and v.first_bad.index == (0,)
        assert torch.equal(a.view(torch.int32), a.clone().view(torch.int32))  # what an integer view says

    @pytest.mark.parametrize("value", [math.inf, -math.inf])
    def test_infinity(self, value):
        a = torch.tensor([1.0, value])
        assert bits.judge(a, a.clone()).status is Status.INVALID

    def test_one_side_only(self):
        assert bits.judge([1.0, 2.0], [1.0, math.nan]).status is Status.FAIL

    def test_clean_twin(self):
        assert bits.judge(torch.ones(3), torch.ones(3)).status is Status.PASS


class TestCase39NoAbs:
    d = torch.tensor([0.5, -0.5, 0.25, -0.25])

    def test_signed_mean_is_zero_and_it_fails(self):
        v = logprobs.judge(torch.zeros(4), self.d)
        assert v.status is Status.FAIL
        assert v.stats["max_abs"] == 0.5 and v.stats["max_index"] == [0] and v.first_bad.position == 0
        assert v.stats["mean_signed"] == 0.0 and v.stats["mean_abs"] == 0.375

    def test_as_a_metric(self):
        v = logprobs.gate_metrics({"logprob_abs_diff": 0.0}, "logprob_abs_diff", diffs=self.d)
        assert v.status is Status.FAIL and v.first_bad.position == 0 and "max 0.5 at token 0" in v.reason
        v = logprobs.gate_metrics({"logprob_abs_diff": -0.1}, "logprob_abs_diff")
        assert v.status is Status.INVALID and v.causes[0].kind == "missing_abs"

    def test_ranks_are_not_averaged(self):
        v = logprobs.judge_ranks({0: (torch.zeros(3), torch.full((3,), 0.3)), 1: (torch.zeros(3), torch.full((3,), -0.3))})
        assert v.status is Status.FAIL
        assert [c.status for c in v.children] == [Status.FAIL, Status.FAIL]
        assert v.first_bad.rank == {"rank": 0} and v.downstream[0].rank == {"rank": 1}

    def test_argmax_is_sequence_and_token(self):
        b = torch.zeros(2, 3)
        b[1, 2] = 0.5
        b[0, 1] = 0.1
        v = logprobs.judge(torch.zeros(2, 3), b, mask=torch.ones(2, 3))
        assert v.stats["max_index"] == [1, 2]
        assert (v.first_bad.row, v.first_bad.position) == (0, 1)

    def test_clean_twin(self):
        assert logprobs.judge(self.d, self.d.clone()).status is Status.PASS


class TestCase41FiveElements:
    a = torch.linspace(0, 1, 1024)

    def test_element_five(self):
        b = self.a.clone()
        b[5] += 1
        v = bits.judge(self.a, b)
        assert v.status is Status.FAIL and v.first_bad.index == (5,) and v.stats["differing"] == 1

    def test_every_element_a_little(self):
        v = bits.judge(self.a, self.a + 1e-3)
        assert v.status is Status.FAIL and v.stats["differing"] == 1024

    def test_five_of_1024_is_invalid(self):
        v = bits.judge(self.a[:5], self.a[:5].clone(), expected=1024)
        assert v.status is Status.INVALID and "5/1024" in v.reason
        assert Verdict("weights", Status.PASS, coverage={"elements": Coverage(5, 1024)}).status is Status.INVALID

    def test_clean_twin_prints_coverage(self):
        v = weights.judge({"w": self.a}, {"w": self.a.clone()})
        assert v.status is Status.PASS
        assert v.info["tensors"]["w"]["compared"] == v.info["tensors"]["w"]["total"] == 1024
        assert "elements 1024/1024" in v.summary()


class TestCase43DtypeIgnored:
    def test_equal_values_of_another_dtype(self):
        a, b = torch.tensor([1.5, -2.25]), torch.tensor([1.5, -2.25], dtype=torch.bfloat16)
        assert torch.equal(a, b.float())
        v = weights.judge({"w": a}, {"w": b})
        assert v.status is Status.FAIL
        assert v.first_bad.tensor == "w" and "dtype float32 vs bfloat16" in v.reason
        assert "same values in bfloat16" in v.cause  # the comparison of values, as information

    def test_checkpoint_load(self):
        saved = {"w": torch.tensor([0.1])}
        v = weights.judge_checkpoint(saved, {"w": saved["w"].bfloat16()})
        assert v.status is Status.FAIL
        assert v.first_bad.stage == "checkpoint load" and "dtype float32 vs bfloat16" in v.reason
        laundered = bits.judge(saved["w"], saved["w"].bfloat16().float())
        assert laundered.status is Status.FAIL  # also after .float() on both

    def test_clean_twin(self):
        saved = {"w": torch.tensor([0.1])}
        assert weights.judge_checkpoint(saved, {"w": saved["w"].clone()}).status is Status.PASS


class TestCase44GateOnAKey:
    key = "train_rollout_logprob_abs_diff"

    def test_missing_key(self):
        v = logprobs.gate_metrics({"train/logprob_diff": 0.0}, self.key)
        assert v.status is Status.NOT_RUN and v.exit_code == 11
        assert self.key in v.reason and "train/logprob_diff" in v.reason

    def test_one_token_in_a_thousand(self):
        d = torch.zeros(1000)
        d[417] = 50.0
        v = logprobs.gate_metrics({self.key: 0.05}, self.key, tier=0.1, diffs=d)
        assert v.status is Status.FAIL and v.exit_code == 1
        assert v.first_bad.position == 417 and "max 50 at token 417" in v.reason
        assert logprobs.gate_metrics({self.key: 0.05}, self.key, tier=0.1, tokens=1000).status is not Status.PASS

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_nan(self, value):
        v = logprobs.gate_metrics({self.key: value}, self.key, tier=0.1)
        assert v.status is Status.INVALID and v.exit_code == 10
        v = logprobs.gate_metrics({self.key: value}, self.key, tier=0.1, diffs=torch.zeros(4))
        assert v.status is Status.INVALID

    def test_no_tokens(self):
        assert logprobs.gate_metrics({self.key: 0.0, "tokens": 0}, self.key, tokens="tokens").status is Status.NOT_RUN
        v = logprobs.gate_metrics({self.key: 0.0}, self.key, diffs=torch.zeros(4), mask=torch.zeros(4))
        assert v.status is Status.NOT_RUN and v.exit_code == 11

    def test_clean_twins(self):
        assert logprobs.gate_metrics({self.key: 0.0}, self.key, tokens=1000).status is Status.PASS
        assert logprobs.gate_metrics({self.key: 2e-8}, self.key, diffs=torch.full((100,), 2e-8)).status is Status.PASS


class TestCase45NothingRan:
    def test_no_verdict_is_not_run(self):
        from alignment.verdict import combine

        v = combine("required gates", [])
        assert v.status is Status.NOT_RUN and v.exit_code == 11
        v = combine("required gates", [Verdict("gpu gate", Status.NOT_RUN, "no GPU")])
        assert v.status is Status.NOT_RUN and "gpu gate" in v.reason
        assert Verdict("claims to pass", Status.PASS).status is Status.NOT_RUN

    SKIPPED = """
        import pytest
        @pytest.mark.gate_logprob
        @pytest.mark.skipif(True, reason="no GPU")
        def test_on_gpu():
            pass
    """

    def test_all_skipped(self, pytester):
        pytester.makepyfile(self.SKIPPED)
        result = pytester.runpytest_subprocess("-m", "gate_logprob")
        assert result.ret == 1
        result.stdout.fnmatch_lines(["*NOT_RUN*"])

    def test_nothing_collected(self, pytester):
        pytester.makepyfile("def test_other(): pass")
        result = pytester.runpytest_subprocess("-m", "gate_ep8")
        assert result.ret not in (0, 5)
        result.stdout.fnmatch_lines(["*NOT_RUN*"])

    def test_required_and_missing(self, pytester):
        pytester.makepyfile("def test_other(): pass")
        result = pytester.runpytest_subprocess("--gate-require", "gate_logprob")
        assert result.ret == 1

    def test_clean_twin(self, pytester):
        pytester.makepyfile("""
            import pytest
            from alignment import bits
            @pytest.mark.gate_logprob
            def test_it(gate):
                gate.record(bits.judge([1.0], [1.0], "logprobs"))
        """)
        result = pytester.runpytest_subprocess("-m", "gate_logprob")
        assert result.ret == 0
        result.stdout.fnmatch_lines(["*PASS*"])
