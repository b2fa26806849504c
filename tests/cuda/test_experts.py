"""On a GPU: the indexer's scores, the steps around latent attention, router and experts: rows alone against rows together."""
from __future__ import annotations

import pytest
import torch

from vime import ops
from vime.ops.cuda import grouped, sparse_index

ROWS = (1, 2, 3, 17, 64, 130)


def normal(*size: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*size, device="cuda", generator=torch.Generator(device="cuda").manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("heads, dim", [(16, 32), (32, 128)])
def test_a_score_of_the_indexer_is_made_of_its_query_and_its_key(heads: int, dim: int) -> None:
    q, k, w = normal(150, heads, dim), normal(701, dim, seed=2), normal(150, heads, seed=3)
    whole = ops.index_scores(q, k, w)
    dots = torch.relu(torch.einsum("thd,sd->ths", q.double(), k.double()) * dim**-0.5)
    want = (dots * w.double()[:, :, None] * heads**-0.5).sum(1)
    assert float((whole.double() - want).norm() / want.norm()) < 1e-6
    for size in ROWS:
        for keys in (1, 63, 64, 65, 300, 701):
            part = ops.index_scores(q[7:7 + size], k[:keys], w[7:7 + size])
            assert torch.equal(part, whole[7:7 + size, :keys]), (size, keys)
    assert torch.equal(sparse_index.index_scores(q, k, w), whole)


@pytest.mark.parametrize("heads, nope, v, rank", [(4, 32, 32, 256), (8, 192, 256, 512)])
def test_the_way_into_the_latent_space_and_out(heads: int, nope: int, v: int, rank: int) -> None:
    q, o, kv_b = normal(150, heads, nope), normal(150, heads, rank, seed=2), normal(heads, nope + v, rank, seed=3)
    into, out = ops.into_latent(q, kv_b), ops.out_of_latent(o, kv_b, nope)
    for size in ROWS:
        part = slice(5, 5 + size)
        assert torch.equal(ops.into_latent(q[part], kv_b), into[part]) and torch.equal(ops.out_of_latent(o[part], kv_b, nope), out[part])


@pytest.mark.parametrize("kind", ["sigmoid", "softmax"])
@pytest.mark.parametrize("experts, hidden, top_k", [(16, 128, 4), (256, 6144, 8)])
def test_a_token_is_routed_alone_as_among_others(kind: str, experts: int, hidden: int, top_k: int) -> None:
    x, weight = normal(200, hidden), normal(experts, hidden, seed=2) * hidden**-0.5
    bias = normal(experts, seed=3, dtype=torch.float32) * 0.1
    scores = ops.router_scores(x, weight, kind)
    ids, weights = ops.route(scores, top_k, bias_E=bias)
    exact = x.double() @ weight.double().t()
    want = torch.sigmoid(exact) if kind == "sigmoid" else torch.softmax(exact, 1)
    assert float((scores.double() - want).norm() / want.norm()) < 1e-5
    for size in ROWS:
        part = ops.router_scores(x[3:3 + size], weight, kind)
        assert torch.equal(part, scores[3:3 + size])
        again = ops.route(part, top_k, bias_E=bias)
        assert torch.equal(again[0], ids[3:3 + size]) and torch.equal(again[1], weights[3:3 + size])


@pytest.mark.parametrize("experts, hidden, ffn, top_k", [(16, 128, 64, 4), (8, 1024, 512, 3)])
def test_a_row_of_an_expert_does_not_see_the_others(experts: int, hidden: int, ffn: int, top_k: int) -> None:
    expert_rows = pytest.importorskip("vime.vllm.experts", reason="vLLM is not installed").expert_rows
    x, up = normal(200, hidden), normal(experts, 2 * ffn, hidden, seed=2) * hidden**-0.5
    down = normal(experts, hidden, ffn, seed=3) * ffn**-0.5
    ids = torch.rand(200, experts, device="cuda", generator=torch.Generator(device="cuda").manual_seed(4)).argsort(1)[:, :top_k]
    whole = expert_rows(x, ids, up, down)
    for size in ROWS:
        assert torch.equal(expert_rows(x[9:9 + size], ids[9:9 + size], up, down), whole[9:9 + size]), size


@pytest.mark.parametrize("rows", [1, 7, 64, 333])
def test_the_gradient_of_a_weight_comes_out_again(rows: int) -> None:
    dy, x = normal(rows, 128), normal(rows, 256, seed=2)
    first = ops.weight_gradient(dy, x)
    want = dy.double().t() @ x.double()
    assert float((first.double() - want).norm() / want.norm()) < 5e-3
    assert all(torch.equal(first, ops.weight_gradient(dy.clone(), x.clone())) for _ in range(4))


@pytest.mark.parametrize("experts, top_k", [(16, 4), (128, 8), (256, 8)])
def test_a_choice_and_a_sum_in_one_launch_are_those_in_steps(experts: int, top_k: int) -> None:
    """What runs where no gradient is wanted against what runs where one is; with ties."""
    logits = normal(700, experts, dtype=torch.float32)
    scores = torch.sigmoid(torch.where(logits > 1, logits.round(), logits))
    for bias in (None, normal(experts, seed=3, dtype=torch.float32).round() * 0.125):
        for options in ({}, {"normalise": False, "scaling": 2.5}):
            in_steps = ops.route(scores.clone().requires_grad_(), top_k, bias_E=bias, **options)
            at_once = ops.route(scores, top_k, bias_E=bias, **options)
            assert torch.equal(at_once[0], in_steps[0]) and torch.equal(at_once[1], in_steps[1].detach())
    rows, weights = normal(700, top_k, 6144, seed=4), at_once[1]
    total = rows[:, 0].float() * weights[:, 0, None]
    for slot in range(1, top_k):
        total = total + rows[:, slot].float() * weights[:, slot, None]
    assert torch.equal(ops.combine_slots(rows, weights), total.bfloat16())


@pytest.mark.parametrize("tokens, experts", [(1, 256), (37, 16), (256, 128)])
def test_a_plan_by_counting_is_the_one_by_sorting(tokens: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(0, experts, (tokens, 8), device="cuda", generator=torch.Generator(device="cuda").manual_seed(tokens))
    counted = grouped.plan(ids, experts)
    monkeypatch.setattr(grouped, "_COUNTED", 0)
    by_sort = grouped.plan(ids, experts)
    assert torch.equal(counted.place_R, by_sort.place_R) and torch.equal(counted.row_end_E, by_sort.row_end_E)
