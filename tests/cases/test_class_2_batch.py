"""Class 2: a row that knows its neighbours."""
from __future__ import annotations

import pytest
import torch

from alignment import bits, rerun
from alignment.diagnose import argmax, rounding_modes
from alignment.rerun import Run
from alignment.verdict import Status
from tests.cases.test_class_1_rerun import l2norm


class TestCase07NormSwitchesAt256Rows:
    g = torch.Generator().manual_seed(7)
    x, res = torch.randn(512, 2048, generator=g), torch.randn(512, 2048, generator=g)

    def norm(self, x: torch.Tensor, res: torch.Tensor, switch: int = 256) -> dict[str, torch.Tensor]:
        s = x + res
        return {"residual": s, "output": l2norm(s, 1024 if len(x) < switch else 256)[1]}

    def test_the_boundary_is_located(self):
        v = rerun.judge_sweep(self.norm, (self.x, self.res), (4, 255, 256, 512), op="fused_add_norm")
        assert v.status is Status.FAIL
        assert v.first_bad.tensor == "fused_add_norm.output"
        assert v.first_bad.run == "rows 255 vs 256"
        assert v.info["boundary"] == [255, 256]
        assert "between 255 and 256" in v.cause
        assert all("residual" not in str(p) for p in v.downstream)

    def test_the_boundary_is_bisected_from_far_away(self):
        v = rerun.judge_sweep(self.norm, (self.x[:300], self.res[:300]), (60, 300), op="fused_add_norm")
        assert v.info["boundary"] == [255, 256]

    def test_sizes_below_the_switch_prove_nothing(self):
        v = rerun.judge_sweep(self.norm, (self.x[:64], self.res[:64]), (1, 4), op="fused_add_norm")
        assert v.status is Status.NOT_RUN
        assert "dispatch boundary not crossed" in v.reason
        v = rerun.judge_sweep(self.norm, (self.x[:64], self.res[:64]), (1, 4), boundaries=(256,))
        assert v.status is Status.NOT_RUN and "dispatch boundary not crossed" in v.reason

    def test_clean_twin(self):
        fixed = lambda x, res: self.norm(x, res, switch=10**6)  # noqa: E731
        v = rerun.judge_sweep(fixed, (self.x, self.res), (1, 255, 256, 512), op="fused_add_norm")
        assert v.status is Status.PASS


class TestCase08SplitKFromTokensPerExpert:
    g = torch.Generator().manual_seed(8)
    a, others = torch.randn(1, 64, generator=g), torch.randn(6, 64, generator=g)
    w = torch.randn(64, 32, generator=g)

    def expert(self, x: torch.Tensor, split: bool = True) -> torch.Tensor:
        parts = 4 if split and len(x) <= 2 else 1
        rows = []
        for row in x:  # one row at a time: only the split may change the order of additions
            total = torch.zeros(32)
            for piece in range(parts):
                acc = torch.zeros(32)
                for k in range(piece * 64 // parts, (piece + 1) * 64 // parts):
                    acc = acc + row[k] * self.w[k]
                total = total + acc
            rows.append(total)
        return torch.stack(rows)

    def run(self, crowded: bool, split: bool = True) -> Run:
        x = torch.cat([self.a, self.others]) if crowded else self.a
        return Run({"router": torch.zeros(1), "experts.0.fc1": self.expert(x, split)[:1]},
                   axes={"tokens per expert": len(x), "batch size": 7})  # fmt: skip

    def test_trigger(self):
        v = rerun.judge([self.run(False), self.run(True)])
        assert v.status is Status.FAIL
        assert v.first_bad.tensor == "experts.0.fc1" and v.first_bad.expert == 0
        assert v.cause == "trigger: tokens per expert 1 vs 7, same batch size 7"

    def test_uniform_routing_misses_it(self):
        v = rerun.judge([self.run(True), self.run(True)], require=["tokens per expert"])
        assert v.status is Status.NOT_RUN

    def test_clean_twin(self):
        assert rerun.judge([self.run(False, False), self.run(True, False)], require=["tokens per expert"]).status is Status.PASS


class TestCase09AllReduceByMessageSize:
    parts = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(9)).bfloat16()

    def run(self, n: int, tp: int = 4, fixed: bool = False) -> Run:
        r = [p[:n] for p in self.parts]
        size = n * 64 * 2
        ring = fixed or size < 2048
        if tp == 1:
            out = r[0]
        else:
            out = ((r[0] + r[1]) + r[2]) + r[3] if ring else (r[0] + r[1]) + (r[2] + r[3])
        return Run({"row_parallel.partial": torch.stack([p[:1] for p in r]), "all_reduce": out[:1]},
                   axes={"bytes": size, "algorithm": "ring" if ring else "tree"})  # fmt: skip

    def test_place_and_key(self):
        v = rerun.judge([self.run(8), self.run(64)])
        assert v.status is Status.FAIL
        assert v.first_bad.module == "all_reduce"
        assert v.cause == "trigger: bytes 1024 vs 8192, algorithm ring vs tree"

    def test_one_rank_passes(self):
        assert rerun.judge([self.run(8, tp=1), self.run(64, tp=1)]).status is Status.PASS

    def test_clean_twin(self):
        assert rerun.judge([self.run(8, fixed=True), self.run(64, fixed=True)], require=["bytes"]).status is Status.PASS


class TestCase12SilentTF32:
    positions = torch.arange(8192.0)[None]

    def mm(self, x: torch.Tensor, tf32: bool) -> torch.Tensor:
        y = rounding_modes(self.positions)["TF32"] if tf32 else self.positions
        return x @ y

    def test_self_consistent_and_wrong(self):
        rows = torch.ones(64, 1)
        sweep = rerun.judge_sweep(lambda x: self.mm(x, True), rows, (1, 4, 64), boundaries=(2, 16), op="mm")
        assert sweep.status is Status.PASS
        got, want = self.mm(rows[:1], True)[0], self.mm(rows[:1].double().float(), False)[0]
        v = bits.judge(want, got, "mm")
        assert v.status is Status.FAIL
        assert v.first_bad.index == (2049,)
        assert v.stats["differing"] == 4096 and v.stats["total"] == 8192
        v = rerun.judge({"reference": {"mm": want}, "mm": {"mm": got}})
        assert "TF32" in v.cause and v.first_bad.module == "mm"

    def test_clean_twin(self):
        assert bits.judge(self.positions[0], self.mm(torch.ones(1, 1), False)[0], "mm").status is Status.PASS


class TestCase13TileFromLongestQuery:
    g = torch.Generator().manual_seed(13)
    q, k, v = torch.randn(16, generator=g), torch.randn(32, 16, generator=g), torch.randn(32, 16, generator=g)

    def decode(self, partner: int, fixed: bool = False) -> Run:
        block = 8 if partner >= 10 and not fixed else 4
        m, total, out = torch.tensor(-torch.inf), torch.tensor(0.0), torch.zeros(16)
        for at in range(0, 32, block):
            s = self.k[at : at + block] @ self.q / 4
            new = torch.maximum(m, s.max())
            p = (s - new).exp()
            out, total = out * (m - new).exp() + p @ self.v[at : at + block], total * (m - new).exp() + p.sum()
            m = new
        return Run({"attention": out / total}, axes={"max_seqlen_q": max(1, partner), "batch size": 2})

    def test_trigger(self):
        v = rerun.judge([self.decode(1), self.decode(12)])
        assert v.status is Status.FAIL
        assert v.first_bad.module == "attention"
        assert v.cause == "trigger: max_seqlen_q 1 vs 12, same batch size 2"

    def test_equal_lengths_do_not_cover_it(self):
        assert rerun.judge([self.decode(1), self.decode(1)], require=["max_seqlen_q"]).status is Status.NOT_RUN

    def test_tie_flip_is_said(self):
        a, b = torch.tensor([[1.0, 3.0, 3.0, 0.0]]), torch.tensor([[1.0, 3.0, 3.0000002, 0.0]])
        assert "tie flip" in argmax(a, b)[0].text
        assert argmax(torch.tensor([[1.0, 3.0, 2.9]]), torch.tensor([[1.0, 2.9, 3.0]])) == []

    def test_clean_twin(self):
        assert rerun.judge([self.decode(1, True), self.decode(12, True)], require=["max_seqlen_q"]).status is Status.PASS


@pytest.mark.parametrize("sizes", [(1,), (1, 2), (3, 5, 8)])
def test_too_narrow_a_sweep_is_never_green(sizes):
    assert rerun.judge_sweep(lambda x: x, torch.ones(8, 2), sizes).status is not Status.PASS
