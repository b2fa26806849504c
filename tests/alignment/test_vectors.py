"""Causes on whole columns and on all numbers alike: each planted, and none given for noise."""
from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment import Status, diagnose, layers, logprobs, weights
from alignment.compare import compare_runs
from alignment.diagnose import vectors

G = torch.Generator().manual_seed(31)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=G)


def kinds(verdict):
    return [c.kind for c in verdict.causes]


X = rand(64, 32)


@pytest.mark.parametrize(("kind", "b"), [
    ("bias", X + rand(32)), ("bias", X + torch.where(torch.arange(32) == 5, 0.5, 0.0)), ("column_scale", X * rand(32)),
    ("zero_rows", X.index_fill(1, torch.tensor([3]), 0)), ("affine", (X - X.mean()) / X.std()), ("affine", 2 * X + 0.25),
    ("constant_offset", X + 1), ("scaled", X * 3), ("rounded", (X * 1e4).round() / 1e4),
], ids=["bias", "bias of one", "columns", "zero column", "normalised", "affine", "constant", "factor", "decimals"])  # fmt: skip
def test_an_output_and_a_vector(kind, b):
    v = layers.judge({"layers.0.fc.output": X}, {"layers.0.fc.output": b})
    assert v.status is Status.FAIL and kinds(v) == [kind]


@pytest.mark.parametrize("rank", [1, 2, 8])
def test_a_merged_adapter(rank):
    new = X + 0.05 * (rand(64, rank) @ rand(rank, 32))
    v = weights.judge({"layers.0.q_proj.weight": X}, {"layers.0.q_proj.weight": new})
    assert kinds(v) == ["low_rank"] and v.causes[0].evidence["rank"] == rank
    assert kinds(weights.judge({"layers.0.q_proj.weight": X}, {"layers.0.q_proj.weight": X + 0.05 * rand(64, 32)})) == []


def test_a_norm_whose_weight_is_one_less():
    w, n = rand(32), X * torch.rsqrt(X.pow(2).mean(-1, keepdim=True) + 1e-6)
    a = {"layers.0.input_layernorm.input": X, "layers.0.input_layernorm.weight": w, "layers.0.input_layernorm.output": n * (1 + w)}
    v = layers.judge(a, {**a, "layers.0.input_layernorm.output": n * w})
    assert kinds(v) == ["norm_weight"] and v.causes[0].evidence["side"] == "b" and v.first_bad.tensor == "layers.0.input_layernorm.output"


def test_heads_repeated_otherwise():
    k = rand(16, 4, 8)
    v = layers.judge({"layers.0.attn.k": k.repeat_interleave(2, 1)}, {"layers.0.attn.k": k.repeat(1, 2, 1)})
    assert v.status is Status.FAIL and v.causes and v.causes[0].kind in ("interleaved", "parts_moved", "parts_repeated") and v.causes[0].residual == 0.0


class TestLogprobs:
    lp = -rand(4, 10).abs()

    def test_rows_that_answer_other_rows(self):
        v = logprobs.judge(self.lp, self.lp[[1, 0, 2, 3]])
        assert v.status is Status.FAIL and kinds(v) == ["request_swap"] and v.causes[0].evidence["source"] == {"0": "1", "1": "0"}
        mask = torch.arange(10) < torch.tensor([7, 7, 10, 10])[:, None]
        assert kinds(logprobs.judge(self.lp, self.lp[[1, 0, 2, 3]], mask=mask)) == ["request_swap"]

    def test_requests_that_answer_other_requests(self, tmp_path):
        rows = [{"request_id": f"r{i}", "token_ids": list(range(10)), "logprobs": x.tolist()} for i, x in enumerate(self.lp)]
        swapped = [{**r, "logprobs": rows[(i + 1) % 4]["logprobs"]} for i, r in enumerate(rows)]
        for name, content in (("a", rows), ("b", swapped)):
            (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, content)))
        v = compare_runs(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
        assert v.status is Status.FAIL and v.first_bad.request == "r0" and kinds(v) == ["request_swap"]
        assert v.causes[0].evidence["source"]["r0"] == "r1"

    def test_text_with_few_decimals_and_places_never_computed(self):
        flat = self.lp.flatten()
        assert kinds(logprobs.judge(flat, (flat * 1e3).round() / 1e3)) == ["rounded"]
        v = logprobs.judge(flat, torch.where(torch.arange(40) < 10, 0.0, flat))
        assert kinds(v) == ["zero"] and v.causes[0].evidence["count"] == 10


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.floats(1e-7, 10.0), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_noise_is_none_of_these(seed, size, dtype):
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(24, 18, generator=g, dtype=torch.float64).to(dtype)
    b = (a.double() + size * torch.randn(24, 18, generator=g, dtype=torch.float64)).to(dtype)
    for find in (vectors.along_columns, vectors.low_rank, vectors.affine, vectors.decimals, vectors.zero_part):
        cause = find(a, b)
        assert cause is None or size < 16 * diagnose.numbers.eps(a, b) * 8, (find.__name__, cause)
    assert vectors.norm_weight(a, b, b[0]) is None
    assert vectors.exchanged_rows(list(zip(a, b, strict=True)), [str(i) for i in range(24)], "row") == []
