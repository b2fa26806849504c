"""Class 1: the same input twice, in runs, ranks and processes."""
from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from alignment import rerun
from alignment.rerun import Run
from alignment.verdict import Status


def l2norm(x: torch.Tensor, lanes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of squares over strided lanes, then a halving tree; and the normalised rows."""
    parts = (x * x).reshape(x.shape[0], -1, lanes).transpose(1, 2)
    total = torch.zeros(x.shape[0], lanes)
    for j in range(parts.shape[2]):
        total = total + parts[:, :, j]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0], x * torch.rsqrt(total)


class TestCase02AutotuneWinnerDiffersBetweenRanks:
    x = torch.randn(512, 2048, generator=torch.Generator().manual_seed(0))

    def run(self, lanes: int, x: torch.Tensor | None = None, **kwargs) -> Run:
        sums, rows = l2norm(self.x if x is None else x, lanes)
        return Run({"l2norm": sums, "l2norm.rows": rows}, config={"l2norm": {"lanes": lanes}}, **kwargs)

    def test_each_rank_repeats_itself(self):
        for lanes in (1024, 256):
            assert rerun.judge([self.run(lanes), self.run(lanes)]).status is Status.PASS

    def test_ranks_disagree_at_the_op(self):
        v = rerun.judge({0: self.run(1024), 1: self.run(256)}, side="rank")
        assert v.status is Status.FAIL
        assert v.first_bad.module == "l2norm"
        assert v.cause == "config fingerprint rank0≠rank1 (lanes 1024 vs 256)"
        numeric = v.children[1]
        assert numeric.status is Status.FAIL and numeric.first_bad.module == "l2norm"
        assert numeric.stats["differing"] > 0

    def test_fails_where_the_bits_happen_to_agree(self):
        zeros = torch.zeros(4, 2048)
        zeros[:, 0] = 1
        v = rerun.judge({0: self.run(1024, zeros), 1: self.run(256, zeros)}, side="rank")
        assert v.children[1].status is Status.PASS
        assert v.status is Status.FAIL and "lanes 1024 vs 256" in v.cause

    def test_one_process_is_not_enough(self):
        runs = [self.run(1024, process=1), self.run(1024, process=1)]
        assert rerun.judge(runs, fresh_process=True).status is Status.NOT_RUN
        runs[1] = self.run(1024, process=2)
        assert rerun.judge(runs, fresh_process=True).status is Status.PASS

    def test_clean_twin(self):
        assert rerun.judge({0: self.run(256), 1: self.run(256)}, side="rank").status is Status.PASS


class TestCase03CombineGivesNaN:
    good = torch.arange(32.0).reshape(8, 4)

    def combine(self, bad: bool) -> dict[str, torch.Tensor]:
        out = self.good.clone()
        if bad:
            out[3:5] = float("nan")
        return {"dispatch": self.good + 1, "combine": out}

    def test_one_of_three_runs(self):
        v = rerun.judge([self.combine(False), self.combine(True), self.combine(False)])
        assert v.status is Status.FAIL
        assert (v.first_bad.module, v.first_bad.row, v.first_bad.run) == ("combine", 3, "1 vs 2")
        assert "rows 3-4" in v.cause and "finite→NaN" in v.cause

    def test_the_same_nan_in_both_is_never_green(self):
        v = rerun.judge([self.combine(True), self.combine(True)])
        assert v.status is Status.INVALID
        assert v.first_bad.module == "combine"
        assert "non-finite" in v.reason

    def test_the_deterministic_flag_is_the_trigger(self):
        runs = [Run(self.combine(False), axes={"deterministic algorithms": False}),
                Run(self.combine(True), axes={"deterministic algorithms": True})]  # fmt: skip
        v = rerun.judge(runs)
        assert any("deterministic algorithms False vs True" in c.text for c in v.causes)

    def test_clean_twin(self):
        assert rerun.judge([self.combine(False)] * 3).status is Status.PASS


class TestCase04FirstRequestDiffersFromItsRepeats:
    g = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(16, generator=g), torch.randn(8, 16, generator=g), torch.randn(8, 16, generator=g)

    def part(self, keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        s = self.k[keys] @ self.q / 4
        lse = s.logsumexp(0)
        return lse, (s - lse).exp() @ self.v[keys]

    def attention(self, cached: int) -> Run:
        if cached == 0:
            out = self.part(slice(0, 8))[1]
        else:
            (l0, o0), (l1, o1) = self.part(slice(0, cached)), self.part(slice(cached, 8))
            total = torch.logaddexp(l0, l1)
            out = (l0 - total).exp() * o0 + (l1 - total).exp() * o1
        return Run({"qkv": self.k, "attention": out}, axes={"cached tokens": cached})

    def test_cold_against_warm(self):
        v = rerun.judge([self.attention(c) for c in (0, 4, 4, 4)], require=["cached tokens"], require_hits="cached tokens")
        assert v.status is Status.FAIL
        assert (v.first_bad.module, v.first_bad.run) == ("attention", "1 vs 2")
        assert v.cause == "trigger: cached tokens 0 vs 4"
        assert v.info["groups"] == [["1"], ["2", "3", "4"]]

    @pytest.mark.parametrize("cached", [0, 4])
    def test_within_one_class_it_passes(self, cached):
        assert rerun.judge([self.attention(cached), self.attention(cached)]).status is Status.PASS

    def test_a_dropped_warm_up_was_not_compared(self):
        v = rerun.judge([self.attention(4)] * 3, require=["cached tokens"])
        assert v.status is Status.NOT_RUN and "cached tokens" in v.reason

    def test_cache_off_was_not_compared(self):
        v = rerun.judge([self.attention(0)] * 3, require_hits="cached tokens")
        assert v.status is Status.NOT_RUN and "no run was warm" in v.reason

    def test_clean_twin(self):
        same = self.attention(0).ops
        runs = [Run(same, axes={"cached tokens": c}) for c in (0, 4, 4)]
        assert rerun.judge(runs, require=["cached tokens"], require_hits="cached tokens").status is Status.PASS


class TestCase06HashSeedPerProcess:
    def probe(self, code: str = "", **env: str) -> dict[str, int]:
        text = f"import os\n{code}\nprint(hash(('None', (1, 2, 3))))"
        clean = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        out = subprocess.run([sys.executable, "-c", text], env={**clean, **env}, capture_output=True, text=True, check=True)
        return {"block hash": json.loads(out.stdout)}

    def test_unset(self):
        v = rerun.judge_environment({"A": self.probe(), "B": self.probe()})
        assert v.status is Status.FAIL
        assert "environment fingerprint: block hash process A≠process B" in v.cause
        assert v.first_bad.module == "block hash"

    def test_set_after_the_start_is_too_late(self):
        code = "os.environ['PYTHONHASHSEED'] = '0'"
        assert rerun.judge_environment({"A": self.probe(code), "B": self.probe(code)}).status is Status.FAIL

    def test_one_process_is_no_evidence(self):
        assert rerun.judge_environment({"A": {"block hash": 7}}).status is Status.NOT_RUN

    def test_it_comes_before_the_numbers(self):
        runs = [Run({"logits": torch.ones(3)}, config=self.probe()) for _ in range(2)]
        v = rerun.judge(runs)
        assert v.status is Status.FAIL and v.children[0].status is Status.FAIL and v.children[1].status is Status.PASS

    def test_clean_twin(self):
        sides = {p: self.probe(PYTHONHASHSEED="0") for p in "AB"}
        assert rerun.judge_environment(sides).status is Status.PASS
