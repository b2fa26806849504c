"""Run by ``test_interpreted.py`` under TRITON_INTERPRET=1."""
from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime import ops
from vime.ops import quantise_blocks, quantise_weight_blocks, reference, row_blocks
from vime.ops.cuda import (
    activation,
    attention,
    blockwise,
    embedding,
    gemm_triton,
    grouped,
    norm,
    quantise,
    rope,
    router,
    sampling,
    softmax,
    sparse,
    sparse_index,
)

assert os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-6) -> None:
    error = float((got.detach().double() - want.detach().double()).norm() / want.detach().double().norm())
    assert error < tolerance, error


def check_gradients(run, exact, data: list[torch.Tensor]) -> None:
    """Values and gradients of ``run`` in fp32 against ``exact`` in float64."""
    ours, theirs = ([x.detach().clone().to(t).requires_grad_() for x in data] for t in (torch.float32, torch.float64))
    got, want = run(*ours), exact(*theirs)
    near(got, want)
    upstream = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(got, ours, upstream.float()), torch.autograd.grad(want, theirs, upstream), strict=True):
        near(a, b, 3e-6)


@pytest.mark.parametrize("width", [576, 100])
def test_rms_norm(width: int) -> None:
    check_gradients(lambda x, w: norm.rms_norm(x, w, 1e-5), lambda x, w: reference.rms_norm(x, w, 1e-5), [torch.randn(7, width), torch.randn(width)])


def test_add_rms_norm() -> None:
    check_gradients(lambda x, r, w: torch.cat(norm.add_rms_norm(x, r, w, 1e-5)), lambda x, r, w: torch.cat(reference.add_rms_norm(x, r, w, 1e-5)),
                    [torch.randn(7, 576), torch.randn(7, 576), torch.randn(576)])
    x, r, w = (torch.randn(*s) for s in ((5, 576), (5, 576), (576,)))
    y, s = norm.add_rms_norm(x, r, w, 1e-5)
    assert torch.equal(s, x + r) and torch.equal(y, norm.rms_norm(s, w, 1e-5))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(interleaved: bool) -> None:
    cos, sin = torch.randn(5, 16), torch.randn(5, 16)
    check_gradients(lambda x: rope.apply_rope(x, cos, sin, interleaved), lambda x: reference.apply_rope(x, cos, sin, interleaved),
                    [torch.randn(5, 3, 40)])


def test_silu_and_mul() -> None:
    check_gradients(activation.silu_and_mul, reference.silu_and_mul, [torch.randn(5, 300)])


def test_logprob() -> None:
    ids, temperature = torch.tensor([0, 4499, 4096, 17]), torch.tensor([1, 0.7, 1.3, 2.0])
    logits = torch.randn(4, 4500) * 3
    logits[0, 5:4200] = float("-inf")  # a whole chunk that is masked
    run = lambda x: softmax.token_logprob(x, ids, temperature)[0]  # noqa: E731
    near(run(logits), reference.token_logprob(logits.double(), ids, temperature))
    check_gradients(run, lambda x: reference.token_logprob(x, ids, temperature), [logits[1:2].expand(4, -1).contiguous()])
    check_gradients(lambda x: softmax.log_softmax(x, temperature), lambda x: reference.log_softmax(x, temperature), [torch.randn(4, 900)])
    lp, entropy = softmax.token_logprob(logits, ids, temperature, True)
    assert torch.equal(softmax.log_softmax(logits, temperature).gather(1, ids[:, None])[:, 0], lp)
    full = reference.log_softmax(logits[1:].double(), temperature[1:])
    near(entropy[1:], -(full.exp() * full).sum(-1))


@pytest.mark.parametrize("top_k, top_p", [(None, None), ([50, 3, 0, 1], None), (None, [0.9, 0.5, 1.0, 0.01]), ([40] * 4, [0.8] * 4)])
def test_sample_draws_what_float64_draws(top_k, top_p) -> None:
    logits, seed, position = torch.randn(4, 4500) * 3, torch.tensor([1, -5, 2**40 + 3, 7]), torch.tensor([0, 1, 2**33, 3])
    temperature = torch.tensor([1, 0.7, 0.0, 2.0])
    got = sampling.sample(logits, seed, position, temperature, None if top_k is None else torch.tensor(top_k),
                          None if top_p is None else torch.tensor(top_p))
    want = [reference.sample(logits[i], int(seed[i]), int(position[i]), float(temperature[i]), 0 if top_k is None else top_k[i],
                             1.0 if top_p is None else top_p[i]) for i in range(4)]
    assert got.tolist() == want


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = torch.zeros(1, 9000)
    logits[0, [4100, 8200]] = 1.0
    assert sampling.sample(logits, torch.tensor([1]), torch.tensor([0]), torch.tensor([0.0])).tolist() == [4100]


def test_embedding_adds_in_order() -> None:
    ids = torch.randint(0, 50, (4, 30))
    check_gradients(lambda w: embedding.embedding(ids, w), lambda w: reference.embedding(ids, w), [torch.randn(50, 70)])


def test_gemm() -> None:
    a, b = torch.randn(70, 100), torch.randn(90, 100)
    near(gemm_triton.mm(a, b.t()), a.double() @ b.double().t())
    for which in range(len(gemm_triton.FEW[torch.float32])):
        near(gemm_triton.few(a[:21], b.t(), which), a[:21].double() @ b.double().t())


def test_cache_slots() -> None:
    cache = torch.zeros(attention.kv_cache_shape(5, 16, 3, 24, torch.float32))
    k, v, slots = torch.randn(5, 3, 24), torch.randn(5, 3, 24), torch.tensor([0, 17, -1, 33, 79])
    attention.kv_cache_write(k, v, cache, slots)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(cache[slot // 16, :, slot % 16], torch.stack((k[row], v[row])))
    assert int((cache != 0).any(-1).any(-1).sum()) == 8


def _lists(tokens: int, rows: int, width: int, longest: int) -> torch.Tensor:
    """Rising lists of 0 to ``longest`` rows, ``-1`` after that."""
    out = torch.full((tokens, width), -1, dtype=torch.int32)
    for t in range(tokens):
        n = t * longest // max(tokens - 1, 1)
        out[t, :n] = torch.randperm(rows)[:n].sort().values.int()
    return out


def _exact_sparse(q, kv, index, value_dim, scale):
    out = []
    for t in range(q.shape[0]):
        rows = kv[index[t][index[t] >= 0].long()]
        out.append(torch.softmax(scale * q[t] @ rows.t(), 1) @ rows[:, :value_dim] if len(rows) else q[t, :, :value_dim] * 0)
    return torch.stack(out)


@pytest.mark.parametrize("heads, dim, value_dim, rows, width, longest", [(3, 20, 16, 90, 70, 70), (18, 40, 32, 50, 33, 33), (1, 5, 4, 3, 2, 2)])
def test_sparse_attention(heads, dim, value_dim, rows, width, longest) -> None:
    index = _lists(6, rows, width, longest)
    data = [torch.randn(6, heads, dim), torch.randn(rows, dim)]
    check_gradients(lambda q, kv: sparse.sparse_attention(q, kv, index, value_dim, 0.3),
                    lambda q, kv: _exact_sparse(q, kv, index, value_dim, 0.3), data)


def test_a_query_of_sparse_attention_sees_its_own_list_only() -> None:
    index, q, kv = _lists(5, 80, 75, 75), torch.randn(5, 3, 20), torch.randn(80, 20)
    whole = sparse.sparse_attention(q, kv, index, 16, 0.3)
    moved = torch.randperm(80)
    there = torch.argsort(moved)
    for t in range(5):
        n = int((index[t] >= 0).sum())
        alone = torch.cat([index[t:t + 1, :n], torch.full((1, 1), -1, dtype=torch.int32), index[t:t + 1, :n]], 1)  # the tail is not read
        assert torch.equal(sparse.sparse_attention(q[t:t + 1], kv, alone, 16, 0.3), whole[t:t + 1])
        lists = torch.where(alone >= 0, there[alone.long()].int(), -1)
        assert torch.equal(sparse.sparse_attention(q[t:t + 1], kv[moved], lists, 16, 0.3), whole[t:t + 1])
    assert not whole[0].any()  # an empty list gives zeros


def test_chunks_of_the_backward_change_no_bit(monkeypatch) -> None:
    index, q, kv = _lists(7, 40, 30, 30), torch.randn(7, 3, 20), torch.randn(40, 20)
    upstream = torch.randn(7, 3, 16)

    def gradients() -> list[torch.Tensor]:
        leaves = [q.clone().requires_grad_(), kv.clone().requires_grad_()]
        sparse.sparse_attention(*leaves, index, 16, 0.3).backward(upstream)
        return [x.grad for x in leaves]

    whole = gradients()
    for tokens in (1, 2, 3):
        monkeypatch.setattr(sparse, "SHARE_BYTES", tokens * 30 * 20 * 4)
        assert all(torch.equal(a, b) for a, b in zip(whole, gradients(), strict=True))


def test_scores_of_a_router() -> None:
    check_gradients(sparse.sigmoid, torch.sigmoid, [torch.randn(5, 700) * 4])
    check_gradients(sparse.exp, torch.exp, [torch.randn(5, 30)])


@pytest.mark.parametrize("tokens, heads, dim, rows", [(5, 4, 32, 70), (2, 3, 20, 64), (1, 1, 128, 3)])
def test_index_scores(tokens: int, heads: int, dim: int, rows: int) -> None:
    """Against float64; and a score depends on its token and its key alone, however many others there are."""
    q, k, w = torch.randn(tokens, heads, dim), torch.randn(rows, dim), torch.randn(tokens, heads)
    got = sparse_index.index_scores(q, k, w)
    dots = torch.einsum("thd,sd->ths", q.double(), k.double()) * dim**-0.5
    near(got, (torch.relu(dots) * w.double()[:, :, None] * heads**-0.5).sum(1))
    for first, last in ((0, 1), (rows // 2, rows), (rows - 1, rows)):
        part = sparse_index.index_scores(q[-1:], k[first:last], w[-1:])
        assert torch.equal(part, got[-1:, first:last])


def test_an_index_score_of_nan_stays_nan() -> None:
    q, k, w = torch.randn(2, 2, 16), torch.randn(3, 16), torch.ones(2, 2)
    k[1, 5] = float("nan")
    assert sparse_index.index_scores(q, k, w).isnan().tolist() == [[False, True, False]] * 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_a_choice_of_experts_in_one_launch_is_the_one_in_steps(data) -> None:
    """Bit for bit, with ties, both zeros and infinities."""
    tokens, experts = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    top_k, normalise = data.draw(st.integers(1, min(9, experts))), data.draw(st.booleans())
    values = st.one_of(st.sampled_from([0.0, -0.0, 0.5, 0.25, 1e-30, 1e-45]), st.floats(0, 1, width=32))
    draw = st.lists(st.lists(values, min_size=experts, max_size=experts), min_size=tokens, max_size=tokens)
    scores = torch.tensor(data.draw(draw))
    odd = st.lists(st.sampled_from([0.0, 0.125, -0.5, float("inf"), float("-inf")]), min_size=experts, max_size=experts)
    bias = torch.tensor(data.draw(odd)) if data.draw(st.booleans()) else None
    scaling = data.draw(st.sampled_from([1.0, 2.5, 0.1]))
    ids, weights, nan = router.route(scores, top_k, bias, normalise, scaling)
    want_ids, want = ops.route(scores, top_k, bias_E=bias, normalise=normalise, scaling=scaling)
    assert torch.equal(ids, want_ids) and torch.equal(weights.view(torch.int32), want.view(torch.int32)) and not nan.any()
    scores[-1, data.draw(st.integers(0, experts - 1))] = float("nan")
    assert router.route(scores, top_k, bias, normalise, scaling)[2].tolist() == [0] * (tokens - 1) + [1]


@pytest.mark.parametrize("tokens, slots, hidden", [(3, 8, 1500), (1, 1, 7), (2, 4, 1024)])
def test_a_sum_over_slots_in_one_launch_is_the_one_in_steps(tokens: int, slots: int, hidden: int) -> None:
    rows, weights = torch.randn(tokens, slots, hidden), torch.randn(tokens, slots)
    assert torch.equal(router.combine_slots(rows, weights), ops.combine_slots(rows, weights))
    check_gradients(router.combine_slots, lambda x, w: (x * w[:, :, None]).sum(1), [rows, weights])


@pytest.mark.parametrize("tokens, heads, width, rows", [(70, 2, 40, 100), (1, 3, 100, 20)])
def test_heads(tokens: int, heads: int, width: int, rows: int) -> None:
    """Each head times its own weight, whichever way the weight lies; and a token alone, in numbers that add exactly: the
    interpreter adds by numpy, which sees a row's place."""
    data = [torch.randn(tokens, heads, width), torch.randn(heads, rows, width)]
    check_gradients(grouped.linear_heads, lambda x, w: torch.einsum("thk,hnk->thn", x, w), data)
    x, w = (torch.randint(-8, 9, one.shape).float() for one in data)
    whole = grouped.linear_heads(x, w)
    assert torch.equal(whole, grouped.linear_heads(x, w.transpose(1, 2).contiguous().transpose(1, 2)))
    for t in {0, tokens // 2, tokens - 1}:
        assert torch.equal(grouped.linear_heads(x[t:t + 1], w), whole[t:t + 1])


@pytest.mark.parametrize("experts, slots, chosen", [(5, 2, 5), (20, 3, 4), (3, 1, 1)])
def test_experts(experts: int, slots: int, chosen: int) -> None:
    """Each row times the weight of its expert, with experts that get none, one and more than a tile of rows; and alone."""
    tokens = 150
    x, w = torch.randn(tokens, 72), torch.randn(experts, 50, 72)
    ids = torch.rand(tokens, chosen).argsort(1)[:, :slots] * (experts // chosen)
    ids[0] = ids[1] = ids[2]
    plan = grouped.plan(ids, experts)
    own = torch.arange(tokens * slots)
    got = grouped.grouped_linear(x, w, plan.token_R, plan.place_R, plan.row_end_E).view(tokens, slots, -1)
    near(got, torch.einsum("tk,tsnk->tsn", x.double(), w.double()[ids]))
    in_order = grouped.grouped_linear(x, w, plan.token_R, own, plan.row_end_E)
    assert torch.equal(in_order[plan.place_R.argsort()].view_as(got), got)
    x, w = (torch.randint(-8, 9, one.shape).float() for one in (x, w))  # as in test_heads
    got = grouped.grouped_linear(x, w, plan.token_R, plan.place_R, plan.row_end_E).view(tokens, slots, -1)
    for e in ids.unique().tolist():
        rows = (ids == e).nonzero()[:, 0]
        assert torch.equal(grouped.expert_linear(x[rows], w[e]), got[ids == e])
    assert grouped.grouped_linear(x[:0], w, own[:0], own[:0], torch.zeros(experts, dtype=torch.int64)).shape == (0, 50)


@pytest.mark.parametrize("rows, width, blocks", [(300, 300, None), (130, 128, "parts"), (140, 72, "mixed")])
def test_blocks_of_fp8_weights(rows: int, width: int, blocks: str | None) -> None:
    """Values and scales are those of ``vime.ops``, whatever the blocks, for each expert alone; a block of zeros has scale 1."""
    w = torch.randn(2, rows, width) * torch.rand(2, rows, 1) * 10
    w[1, :128] = 0
    block_N = None if blocks is None else row_blocks([100, rows - 100])
    if blocks == "mixed":
        block_N = block_N[torch.randperm(rows)]
    q, scale, block = quantise.quantise_weights(w, block_N, torch.float32)  # not yet rounded to E4M3
    for e in range(2):
        want, want_scale = quantise_weight_blocks(w[e], block_N)
        assert torch.equal(q[e].to(torch.float8_e4m3fn).float(), want.float())
        assert torch.equal(scale[block + e * rows], want_scale)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Nothing kept; two experts at a time are quantised as one is."""
    monkeypatch.setattr(quantise, "_AT_ONCE", 140 * 256 + 5)
    monkeypatch.setattr(quantise, "_kept", found := {})
    return found


def test_a_kept_weight_is_renewed_where_it_lies(store: dict[Any, Any]) -> None:
    """By its memory, shape and blocks, and no longer than it lives; a write that nobody announced is found."""
    experts, other, square = torch.randn(2, 140, 256), torch.randn(140, 256), torch.randn(140, 140)
    blocks, plain = row_blocks([70, 70]), row_blocks([140])
    quantise.keep("square", square, plain, torch.float32)
    for name, weight, block in (("experts", experts, blocks), ("other", other, plain)):
        quantise.keep(name, weight, block, torch.float32)  # not yet rounded to E4M3, as everywhere here
    first = quantise.kept(experts.detach(), blocks)
    assert first is not None and quantise.kept(other.view(140, 256), plain) is not None
    for weight, block in ((experts, plain), (experts, None), (experts[0], blocks), (experts.clone(), blocks), (other[:70], plain), (square.t(), plain)):
        assert quantise.kept(weight, block) is None
    assert quantise.stale() == []
    experts.data[1, 3, 5] = 99.0
    assert quantise.stale() == ["experts"] and quantise.refresh() == ["square", "experts", "other"] and quantise.stale() == []
    again = quantise.kept(experts, blocks)
    assert again is not None and all(a is b for a, b in zip(again, first, strict=True)), "a graph reads that memory"
    assert all(torch.equal(a, b) for a, b in zip(again, quantise.quantise_weights(experts, blocks, torch.float32), strict=True))
    again[1][1] += 1.0  # a scale
    assert quantise.stale() == ["experts"]
    quantise.refresh()
    other.data = other.data.clone()
    assert quantise.stale() == ["other"] and quantise.kept(other, plain) is None, "a graph would not see where it lies now"
    address, block_again = experts.untyped_storage(), blocks
    del experts
    assert quantise.kept(torch.empty(0).set_(address, 0, (2, 140, 256)), block_again) is None, "its memory is another's now"
    assert quantise.refresh() == ["square"] and len(store) == 1
    with pytest.raises(ValueError, match="part: a weight that is kept has to be contiguous"):
        quantise.keep("part", other[:, :128], plain)


def test_scales_are_fp32_whatever_the_default_dtype() -> None:
    """vLLM loads a model with the model's dtype as torch's default, and that is when an engine quantises what it keeps."""
    w, x = torch.randn(1, 130, 200), torch.randn(5, 200)
    want = *quantise.quantise_weights(w, None, torch.float32), *quantise.quantise_rows(x, torch.float32)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = *quantise.quantise_weights(w, None, torch.float32), *quantise.quantise_rows(x, torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_a_weight_that_is_nan_stays_nan_in_fp8() -> None:
    w = torch.randn(1, 130, 200)
    w[0, 3, 150] = float("nan")
    q, _, _ = quantise.quantise_weights(w, None, torch.float32)
    assert q[0].isnan().nonzero().tolist() == [[3, 150]] and quantise_weight_blocks(w[0], None)[0].float()[3, 150].isnan()


@pytest.mark.parametrize(("rows", "width"), [(1, 128), (11, 300), (20, 512)])
def test_rows_are_quantised_as_by_the_composite(rows: int, width: int) -> None:
    """Zeros, the largest and the smallest numbers, NaN and infinity included; before the rounding to E4M3, which is the chip's own instruction."""
    x = torch.randn(rows, width) * torch.logspace(-12, 12, rows)[:, None]
    x[0, :128] = 0.0
    if rows > 5:
        x[3, 5], x[4, 200], x[5] = float("nan"), float("inf"), 1e-44
    q, scale = quantise.quantise_rows(x, torch.float32)
    want, want_scale = quantise_blocks(x)
    assert torch.equal(scale, want_scale) and scale.stride(0) == 1
    assert torch.equal(q.to(torch.float8_e4m3fn).view(torch.uint8), want.view(torch.uint8))


def test_products_of_fp8_blocks() -> None:
    """The equation, against float64; blocks of K by rising K; an expert's rows with its own scales; a row alone."""
    tokens, experts, rows, width = 90, 3, 140, 300
    x, w = torch.randn(tokens, width) * torch.rand(tokens, 1) * 9, torch.randn(experts, rows, width)
    ids = torch.randint(0, 2, (tokens, 1))  # one expert has no rows
    plan = grouped.plan(ids, experts)
    xq, sx = quantise_blocks(x)
    q, scale, block = quantise.quantise_weights(w, None, torch.float32)
    weight = (q.to(torch.float8_e4m3fn).float(), scale, block)
    got = blockwise.multiply((xq.float(), sx), weight, plan.token_R, plan.place_R, plan.row_end_E, torch.float32)
    xd = xq.double() * sx.double().repeat_interleave(128, 1)[:, :width]
    for t in range(tokens):
        wq, sw = quantise_weight_blocks(w[ids[t, 0]])
        near(got[t], (wq.double() * sw.double().repeat_interleave(128, 1)[:, :width]) @ xd[t])
    total = torch.zeros(rows)
    for b in range(3):  # in numbers that add exactly within a block, the order of the blocks decides
        part = slice(128 * b, 128 * b + 128)
        total = total + (weight[0][ids[5, 0], :, part].double() @ xq[5, part].double()).float() * (sx[5, b] * scale[block + ids[5, 0] * rows, b])
    assert float((got[5] - total).abs().max()) <= 4e-7 * float(total.abs().max())


def test_gradients_of_one_expert() -> None:
    check_gradients(grouped.expert_linear, lambda x, w: x @ w.t(), [torch.randn(70, 40), torch.randn(30, 40)])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("groups", [0, 1, 2])
def test_rotate_is_apply_rope_by_position(interleaved: bool, groups: int) -> None:
    """Bit for bit, whatever the strides of the table and of a slice of a fused projection."""
    table = torch.randn(11, 1, 2, 16)
    cos, sin, positions = table[:, 0, 0], table[:, 0, 1], torch.tensor([3, 0, 10, 3, 7])
    fused = torch.randn(5, (3 + groups) * 40)
    q, k = fused[:, :120].view(5, 3, 40), fused[:, 120:].view(5, groups, 40) if groups else None
    got_q, got_k = rope.rotate(q, k, cos, sin, positions, interleaved)
    assert torch.equal(got_q, rope.apply_rope(q, cos[positions], sin[positions], interleaved))
    if k is not None:
        assert torch.equal(got_k, rope.apply_rope(k, cos[positions], sin[positions], interleaved))
        check_gradients(lambda a, b: torch.cat(rope.rotate(a, b, cos, sin, positions, interleaved), 1),
                        lambda a, b: torch.cat([reference.apply_rope(x, cos.double()[positions], sin.double()[positions], interleaved)
                                                for x in (a, b)], 1), [q, k])


@pytest.mark.parametrize("tokens, slots, experts", [(1, 8, 256), (5, 2, 3), (40, 4, 17), (130, 1, 2), (16, 128, 20)])
def test_a_plan_by_counting_is_the_one_by_sorting(monkeypatch, tokens: int, slots: int, experts: int) -> None:
    """The same places and ends, with experts that get none; and where the tiles of each expert end."""
    ids = torch.randint(0, max(1, experts - 1), (tokens, slots))
    counted = grouped.plan(ids, experts)
    monkeypatch.setattr(grouped, "_COUNTED", 0)
    by_sort = grouped.plan(ids, experts)
    assert torch.equal(counted.place_R, by_sort.place_R) and torch.equal(counted.row_end_E, by_sort.row_end_E)
    counts = torch.bincount(ids.reshape(-1), minlength=experts)
    assert grouped.tile_ends(by_sort.row_end_E, 64).tolist() == ((counts + 63) // 64).cumsum(0).tolist()
