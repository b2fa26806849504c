"""Latent and sparse attention, the indexer, the router, the FP8 cache: rows alone, float64, ties, order."""
from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment import bits
from vime import ops

DTYPES = (torch.float32, torch.bfloat16)


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    verdict = bits.judge(a, b)
    assert verdict.green, verdict.summary()


def lists(tokens: int, rows: int, width: int, generator: torch.Generator) -> torch.Tensor:
    out = torch.full((tokens, width), -1, dtype=torch.int32)
    for t in range(tokens):
        n = int(torch.randint(1, min(width, rows) + 1, (), generator=generator))
        out[t, :n] = torch.randperm(rows, generator=generator)[:n].sort().values.int()
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=12, deadline=None)
@given(tokens=st.integers(1, 24), rows=st.integers(1, 150), heads=st.integers(1, 5), dim=st.integers(2, 40), seed=st.integers(0, 999))
def test_a_query_sees_only_its_list(dtype, tokens, rows, heads, dim, seed):
    g = torch.Generator().manual_seed(seed)
    q, kv = torch.randn(tokens, heads, dim, generator=g).to(dtype), torch.randn(rows, dim, generator=g).to(dtype)
    index = lists(tokens, rows, 70, g)
    whole = ops.sparse_attention(q, kv, index, max(1, dim - 3), 0.3)
    t = int(torch.randint(tokens, (), generator=g))
    alone = index[t : t + 1, : int((index[t] >= 0).sum())]
    same(whole[t : t + 1], ops.sparse_attention(q[t : t + 1], kv, alone, max(1, dim - 3), 0.3))
    moved = torch.randperm(rows, generator=g)  # the same rows elsewhere, as pages of a cache are
    where = torch.argsort(moved)
    there = torch.where(alone >= 0, where[alone.long()].int(), -1)
    same(whole[t : t + 1], ops.sparse_attention(q[t : t + 1], kv[moved], there, max(1, dim - 3), 0.3))


def test_forward_and_backward_against_float64():
    g = torch.Generator().manual_seed(3)
    q, kv = torch.randn(9, 3, 20, generator=g, requires_grad=True), torch.randn(50, 20, generator=g, requires_grad=True)
    index, do = lists(9, 50, 33, g), torch.randn(9, 3, 16, generator=g)
    ops.sparse_attention(q, kv, index, 16, 0.25).backward(do)
    q64, kv64 = q.detach().double().requires_grad_(), kv.detach().double().requires_grad_()
    rows = []
    for t in range(9):
        chosen = kv64[index[t][index[t] >= 0].long()]
        rows.append(torch.softmax(0.25 * q64[t] @ chosen.t(), dim=1) @ chosen[:, :16])
    o64 = torch.stack(rows)
    o64.backward(do.double())
    o = ops.sparse_attention(q, kv, index, 16, 0.25)
    for ours, theirs in ((o, o64), (q.grad, q64.grad), (kv.grad, kv64.grad)):
        assert float((ours.detach().double() - theirs.detach()).abs().max()) < 2e-5


def test_grad_mode_and_threads_do_not_show():
    g = torch.Generator().manual_seed(4)
    q, kv = torch.randn(40, 4, 24, generator=g, requires_grad=True), torch.randn(60, 24, generator=g, requires_grad=True)
    index, do = lists(40, 60, 48, g), torch.randn(40, 4, 16, generator=g)
    seen = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            o = ops.sparse_attention(q, kv, index, 16, 0.2)
            with torch.no_grad():
                same(o.detach(), ops.sparse_attention(q, kv, index, 16, 0.2))
            seen.append((o.detach(), *torch.autograd.grad(o, (q, kv), do)))
    finally:
        torch.set_num_threads(before)
    for a, b in zip(*seen, strict=True):
        same(a, b)


def test_order_of_the_list_is_part_of_the_result():
    g = torch.Generator().manual_seed(5)
    q, kv = torch.randn(30, 4, 24, generator=g), torch.randn(60, 24, generator=g)
    index = torch.stack([torch.randperm(60, generator=g)[:48].sort().values for _ in range(30)]).int()
    assert bits.judge(ops.sparse_attention(q, kv, index, 24, 0.5), ops.sparse_attention(q, kv, index.flip(1), 24, 0.5)).status == "FAIL"


def test_the_border_of_a_selection_goes_to_the_lower_position():
    scores = torch.tensor([[0.0, 5.0, 0.0, -0.0, 7.0, 0.0], [1.0, 1.0, 1.0, 9.0, 9.0, 9.0]])
    chosen = ops.select(scores, torch.tensor([6, 3]), 4)
    assert chosen.tolist() == [[0, 1, 2, 4], [0, 1, 2, -1]]
    with pytest.raises(ValueError, match="row 1 hold NaN"):
        ops.select(torch.tensor([[1.0, float("nan")], [float("nan"), 1.0]]), torch.tensor([1, 1]), 1)


@settings(max_examples=10, deadline=None)
@given(tokens=st.integers(2, 30), keys=st.integers(1, 90), seed=st.integers(0, 999))
def test_index_scores_of_a_token_do_not_know_the_others(tokens, keys, seed):
    g = torch.Generator().manual_seed(seed)
    q, k, w = torch.randn(tokens, 4, 32, generator=g).bfloat16(), torch.randn(keys, 32, generator=g).bfloat16(), torch.randn(tokens, 4, generator=g).bfloat16()
    whole, t, s = ops.index_scores(q, k, w), int(torch.randint(tokens, (), generator=g)), int(torch.randint(1, keys + 1, (), generator=g))
    same(whole[t : t + 1, :s].contiguous(), ops.index_scores(q[t : t + 1], k[:s], w[t : t + 1]))
    x = torch.randn(tokens, 32, generator=g).bfloat16()
    norm = ops.layer_norm(x, torch.ones(32).bfloat16(), torch.zeros(32).bfloat16(), 1e-6)
    same(norm[t : t + 1], ops.layer_norm(x[t : t + 1], torch.ones(32).bfloat16(), torch.zeros(32).bfloat16(), 1e-6))
    exact = torch.nn.functional.layer_norm(x.double(), (32,), eps=1e-6)
    assert float((norm.double() - exact).abs().max()) < 2e-2  # one bf16 rounding of values up to about 4


@pytest.mark.parametrize("kind", ["sigmoid", "softmax"])
@settings(max_examples=10, deadline=None)
@given(tokens=st.integers(2, 40), seed=st.integers(0, 999))
def test_a_token_is_routed_alone(kind, tokens, seed):
    g = torch.Generator().manual_seed(seed)
    x, w, bias = torch.randn(tokens, 24, generator=g).bfloat16(), torch.randn(20, 24, generator=g).bfloat16(), torch.randn(20, generator=g) * 0.1
    scores = ops.router_scores(x, w, kind)
    exact = torch.sigmoid(x.double() @ w.double().t()) if kind == "sigmoid" else torch.softmax(x.double() @ w.double().t(), 1)
    assert float((scores.double() - exact).abs().max()) < 1e-6
    ids, weights = ops.route(scores, 4, bias_E=bias, scaling=2.5)
    t = int(torch.randint(tokens, (), generator=g))
    ids1, weights1 = ops.route(ops.router_scores(x[t : t + 1], w, kind), 4, bias_E=bias, scaling=2.5)
    same(ids[t : t + 1], ids1)
    same(weights[t : t + 1], weights1)
    rows = torch.randn(tokens, 4, 24, generator=g).bfloat16()
    same(ops.combine_slots(rows, weights)[t : t + 1], ops.combine_slots(rows[t : t + 1], weights1))


def test_ties_go_to_the_lower_expert_and_bf16_scores_are_refused():
    ids, weights = ops.route(torch.tensor([[0.5, 0.75, 0.5, 0.75]]), 3)
    assert ids.tolist() == [[1, 3, 0]] and weights.tolist() == [[0.375, 0.375, 0.25]]
    with pytest.raises(TypeError, match="FP32"):
        ops.route(torch.zeros(1, 4, dtype=torch.bfloat16), 2)
    with pytest.raises(ValueError, match="token 0 hold NaN"):
        ops.route(torch.full((1, 4), float("nan")), 2)


def test_groups_limit_the_choice():
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.6, 0.7, 0.2, 0.0, 0.3]])
    ids, _ = ops.route(scores, 2, groups=4, top_groups=1)
    assert ids.tolist() == [[2, 3]]  # the pair with the largest sum, not the single best expert


def test_the_fp8_cache_rounds_a_row_alone_and_passes_the_gradient():
    g = torch.Generator().manual_seed(6)
    x = (torch.randn(20, 200, generator=g) * 3).bfloat16()
    q, scale = ops.quantise_blocks(x[:, :192])
    assert q.dtype is torch.float8_e4m3fn and scale.shape == (20, 2)
    for t in range(20):
        q1, s1 = ops.quantise_blocks(x[t : t + 1, :192])
        same(q[t : t + 1].view(torch.uint8), q1.view(torch.uint8))
        same(scale[t : t + 1], s1)
    row = x.clone().requires_grad_()
    seen = ops.through_fp8_cache(row, 192)
    same(seen[:, 192:].detach(), x[:, 192:])
    same(seen[:, :192].detach(), ops.dequantise_blocks(q, scale, torch.bfloat16))
    assert float(((seen.detach() - x).abs() / x.abs().clamp(min=0.05)).max()) > 0  # it does round
    seen.backward(torch.ones_like(seen))
    same(row.grad, torch.ones_like(row))
    q0, s0 = ops.quantise_blocks(torch.zeros(2, 128))
    assert s0.tolist() == [[1.0], [1.0]] and not q0.float().any()
