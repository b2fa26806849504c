"""Class 3: log-probs of trainer and rollout that are not of the same thing."""
from __future__ import annotations

import math

import pytest
import torch

from alignment import bits, diagnose, layers, logprobs, match, rerun
from alignment.verdict import Status


class TestCase14RawAgainstScaled:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    raw = torch.log_softmax(logits, -1)

    def test_temperature(self):
        v = logprobs.judge(self.raw, torch.log_softmax(self.logits / 0.7, -1), temperature=0.7)
        assert v.status is Status.FAIL
        assert v.stats["max_abs"] == pytest.approx(1.1162, abs=1e-4)
        assert v.causes[0].kind == "temperature"
        assert v.causes[0].evidence["temperature"] == pytest.approx(0.7, abs=1e-5)
        assert v.causes[0].residual < 1e-5
        assert "best-fit T 0.7" in v.cause

    def test_temperature_of_sampled_tokens(self):
        g = torch.Generator().manual_seed(0)
        z = torch.randn(20, 50, generator=g)
        ids = torch.randint(0, 50, (20,), generator=g)
        a, b = (torch.log_softmax(z / t, -1).gather(-1, ids[:, None])[:, 0] for t in (1.0, 1.7))
        v = logprobs.judge(a, b, logits=z, tokens=ids)
        assert v.first_bad.token == int(ids[0])
        assert v.causes[0].evidence["b"] == pytest.approx(1.7, rel=1e-4)
        assert logprobs.judge(a, b).causes == []  # without logits nothing says so

    @pytest.mark.parametrize("with_dropped", [True, False])
    def test_truncated(self, with_dropped):
        kept = torch.cat([torch.log_softmax(self.logits[:3], -1), torch.tensor([-math.inf])])
        n = 4 if with_dropped else 3
        v = logprobs.judge(self.raw[:n], kept[:n])
        assert v.status is Status.FAIL
        assert v.causes[0].kind == "truncated_softmax"
        assert v.causes[0].evidence["log_kept_mass"][0] == pytest.approx(-0.0326, abs=1e-4)
        assert "constant offset per position = log of kept mass" in v.cause

    def test_at_one_it_cannot_tell(self):
        v = logprobs.judge(self.raw, self.raw.clone(), temperature=1.0, top_p=1.0)
        assert v.status is Status.PASS
        assert "cannot tell the two modes apart" in v.info["logprob_mode"]

    def test_clean_twin(self):
        assert logprobs.judge(self.raw, self.raw.clone(), temperature=0.7).status is Status.PASS


class TestCase15InvFreqInBf16:
    f = 10000.0 ** (-torch.arange(32, dtype=torch.float32) / 32)
    p = torch.arange(4096.0)

    def side(self, f: torch.Tensor, n: int = 4096) -> dict[str, torch.Tensor]:
        cos = (self.p[:n, None] * f).cos()
        return {"embed.output": torch.ones(n, 4), "layers.0.rope.cos": cos, "layers.0.q_after_rope": cos * 2, "logits": cos}

    def test_place_and_growth(self):
        v = layers.judge(self.side(self.f), self.side(self.f.bfloat16().float()), positions=range(4096))
        assert v.status is Status.FAIL
        assert v.first_bad.tensor == "layers.0.rope.cos"
        assert v.first_bad.position == 1
        assert len(v.downstream) == 2
        assert "inv_freq of side b was rounded to bfloat16" in v.cause and "grows with the position" in v.cause

    def test_position_zero_is_no_probe(self):
        v = layers.judge(self.side(self.f, 1), self.side(self.f.bfloat16().float(), 1), positions=[0])
        assert v.status is Status.NOT_RUN and "position" in v.reason
        v = layers.judge(self.side(self.f, 8), self.side(self.f, 8), positions=range(8))
        assert v.status is Status.PASS and "1024" in v.info["note"]

    def test_clean_twin(self):
        assert layers.judge(self.side(self.f), self.side(self.f), positions=range(4096)).status is Status.PASS


class TestCase16RightFrequenciesWrongLayout:
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(16))
    real = torch.tensor([1.0, 0.1])

    def rope(self, offset: int, first: int = 0) -> torch.Tensor:
        angle = (torch.arange(len(self.x)) + first)[:, None] * self.real
        out = self.x.clone()
        u, v = self.x[:, :2], self.x[:, offset : offset + 2]
        out[:, :2], out[:, offset : offset + 2] = u * angle.cos() - v * angle.sin(), v * angle.cos() + u * angle.sin()
        return out

    def test_shape_is_not_trimmed(self):
        padded = torch.cat([self.real, torch.zeros(6)])
        v = bits.judge(padded, self.real, "inv_freq")
        assert v.status is Status.INVALID and "shape [8] vs [2]" in v.reason

    def test_first_global_layer(self):
        a = {"layers.0.q_after_rope": self.x, "layers.5.q_after_rope": self.rope(8), "logits": self.rope(8)}
        b = {"layers.0.q_after_rope": self.x, "layers.5.q_after_rope": self.rope(2), "logits": self.rope(2)}
        v = layers.judge(a, b, positions=range(6))
        assert v.status is Status.FAIL
        assert (v.first_bad.layer, v.first_bad.tensor, v.first_bad.position) == (5, "layers.5.q_after_rope", 1)
        assert v.info["tensors"]["layers.0.q_after_rope"]["status"] == "PASS"

    def test_layout_is_named(self):
        c = diagnose.rotary(self.x, self.rope(8), self.rope(2), range(6), inv_freq=self.real)
        assert c.kind == "rotary_layout"
        assert "(i, i+8)" in c.text and "(i, i+2)" in c.text
        assert diagnose.rotary(self.x, self.rope(8), self.rope(8), range(6), inv_freq=self.real) is None

    def test_clean_twin(self):
        side = {"layers.5.inv_freq": self.real, "layers.5.q_after_rope": self.rope(8)}
        assert layers.judge(side, dict(side), positions=range(6)).status is Status.PASS


class TestCase18RouterInBf16:
    z = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5], [0.5, 3.0001, 1.0, 3.0003, 2.9]])

    def side(self, rounded: bool) -> dict[str, torch.Tensor]:
        z = self.z.bfloat16().float() if rounded else self.z
        ids = z.sort(dim=-1, descending=True, stable=True).indices[:, :1]
        return {"layers.2.input": self.z, "layers.2.router.topk_ids": ids, "layers.2.mlp.output": ids * 1.5, "layers.3.output": ids * 2.5}

    def test_only_the_first_is_reported(self):
        v = layers.judge(self.side(False), self.side(True), scores={"layers.2.router.topk_ids": self.z}, tokens=[11, 12])
        assert v.status is Status.FAIL
        assert v.first_bad.tensor == "layers.2.router.topk_ids"
        assert (v.first_bad.layer, v.first_bad.row, v.first_bad.token) == (2, 1, 12)
        assert "{3} vs {1}" in v.cause and "margin 0.0002 < bfloat16 spacing 0.0156" in v.cause
        assert [p.tensor for p in v.downstream] == ["layers.2.mlp.output", "layers.3.output"]

    def test_scores_are_found_beside_it(self):
        sides = [{"layers.0.router.logits": self.z, "layers.0.router.topk_ids": torch.tensor([[4], [i]])} for i in (3, 1)]
        assert "bfloat16 spacing" in layers.judge(*sides).cause

    def test_no_rounding_no_claim(self):
        sides = [{"layers.0.router.logits": self.z, "layers.0.router.topk_ids": torch.tensor([[4], [i]])} for i in (3, 0)]
        assert layers.judge(*sides).causes == []

    def test_clean_twin(self):
        assert layers.judge(self.side(False), self.side(False)).status is Status.PASS


class TestCase20LogprobPassInTrainMode:
    def model(self) -> torch.nn.Module:
        torch.manual_seed(20)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 8))

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(20))

    def test_train_mode(self):
        m = self.model().train()
        v = rerun.judge_self(lambda: torch.log_softmax(m(self.x), -1), m)
        assert v.status is Status.FAIL
        assert v.name == "trainer vs itself"
        assert "1: Dropout, training=True, p=0.1" in v.cause
        assert v.info["training_modules"] == ["1: Dropout, training=True, p=0.1"]

    def test_it_fails_even_if_two_passes_agree(self):
        m = self.model().train()
        assert rerun.judge_self(lambda: self.x, m).status is Status.FAIL

    def test_clean_twin(self):
        m = self.model().eval()
        assert rerun.judge_self(lambda: torch.log_softmax(m(self.x), -1), m).status is Status.PASS


class TestCase22Fp32HeadOnOneSide:
    g = torch.Generator().manual_seed(5)
    h, w = torch.randn(4, 64, generator=g).bfloat16(), torch.randn(32, 64, generator=g).bfloat16()

    def side(self, fp32: bool) -> dict[str, torch.Tensor]:
        z = self.h.float() @ self.w.float().T
        return {"lm_head.input": self.h, "lm_head.output": z if fp32 else z.bfloat16()}

    def test_place_and_dtypes(self):
        v = layers.judge(self.side(True), self.side(False))
        assert v.status is Status.FAIL
        assert v.first_bad.tensor == "lm_head.output"
        assert "dtype float32 vs bfloat16" in v.reason
        assert v.causes[0].kind == "dtype_cast" and "rounded to bfloat16" in v.cause
        lp = [torch.log_softmax(self.side(x)["lm_head.output"].float(), -1) for x in (True, False)]
        assert logprobs.judge(*lp).stats["max_abs"] > 0

    def test_effective_dtype_not_the_flag(self):
        v = rerun.judge_configs({"trainer": {"lm_head": {"dtype": "float32"}}, "engine": {"lm_head": {"dtype": "bfloat16"}}}, side="side")
        assert v.status is Status.FAIL and v.first_bad.module == "lm_head" and "dtype float32 vs bfloat16" in v.cause

    def test_clean_twin(self):
        assert layers.judge(self.side(False), self.side(False)).status is Status.PASS


class TestCase23MultiTurnTokens:
    rollout, train = [5, 6, 7, 99, 8, 9], [5, 6, 7, 99, 10, 8, 9]

    def test_token_identity_blocks_the_logprobs(self):
        lp = [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6]
        v = logprobs.judge(lp, list(lp), tokens_a=self.rollout, tokens_b=self.train)
        assert v.status is Status.FAIL
        assert v.first_bad.index == (4,) and v.first_bad.position == 4
        tokens, values = v.children
        assert tokens.status is Status.FAIL and "token 8 vs 10 at index 4" in tokens.reason and "lengths 6 vs 7" in tokens.reason
        assert values.status is Status.NOT_RUN and "blocked" in values.reason
        assert "retokenised" in [c.kind for c in v.causes] and "after token 99" in v.cause

    def test_as_records(self):
        lp = [-0.1] * 6
        v = logprobs.judge({"r": {"token_ids": self.rollout, "logprobs": lp}}, {"r": {"token_ids": self.train, "logprobs": lp}})
        assert v.status is Status.FAIL and v.first_bad.request == "r" and v.children[1].status is Status.NOT_RUN

    def test_every_turn(self):
        a = [1, 2, 99, 3, 4, 99, 5, 6, 99, 7]
        b = [1, 2, 99, 10, 3, 4, 99, 10, 5, 6, 99, 10, 7]
        v = match.judge(a, b)
        assert v.causes[0].evidence == {"inserted": [10], "side": "b", "index": 3, "after": 99, "places": 3}

    def test_clean_twin(self):
        assert logprobs.judge([-0.1] * 6, [-0.1] * 6, tokens_a=self.rollout, tokens_b=list(self.rollout)).status is Status.PASS
