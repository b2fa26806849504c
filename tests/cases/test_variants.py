"""More of each kind: the same mechanisms in other shapes, through the same public functions."""
from __future__ import annotations

import math

import pytest
import torch

from alignment import bits, layers, logprobs, match, rerun, weights
from alignment.match import Packed
from alignment.rerun import Run
from alignment.verdict import Status

G = torch.Generator().manual_seed(44)
Z = torch.randn(6, 100, generator=G) * 3
IDS = Z.argmax(-1)


def drawn(z: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(z, -1).gather(-1, IDS[:, None])[:, 0]


@pytest.mark.parametrize(("top_p", "top_k"), [(0.5, None), (1.0, 3), (0.5, 5)])
def test_truncated_softmax_at_one_token_a_position(top_p, top_k):
    cut = Z.clone()
    if top_k:
        cut[cut < cut.topk(top_k).values[:, -1:]] = -math.inf
    order = cut.sort(dim=-1, descending=True)
    p = order.values.softmax(-1)
    drop = torch.zeros_like(Z, dtype=torch.bool).scatter(-1, order.indices, (p.cumsum(-1) - p) >= top_p)
    v = logprobs.judge(drawn(Z), drawn(cut.masked_fill(drop, -math.inf)), tokens=IDS, logits=Z, top_p=top_p, top_k=top_k)
    assert v.status is Status.FAIL and v.causes[0].kind == "truncated_softmax"


@pytest.mark.parametrize("t", [0.6, 1.3])
def test_temperature_in_bf16(t):
    v = logprobs.judge(torch.log_softmax(Z, -1).bfloat16(), torch.log_softmax(Z / t, -1).bfloat16())
    assert v.causes[0].kind == "temperature"
    assert v.causes[0].evidence["temperature"] == pytest.approx(t, rel=0.01)


def test_lag_of_one_token():
    x = torch.randn(20, generator=G)
    v = logprobs.judge(x[:-1], x[1:], tokens=range(19))
    assert v.causes[0].kind == "lag" and v.causes[0].evidence["lag"] == -1


def test_requests_in_another_order_are_equal_and_swapped_ones_are_not():
    a = {"a": [1, 2, 7], "b": [3, 4, 8]}
    assert match.judge(a, {"b": [3, 4, 8], "a": [1, 2, 7]}).status is Status.PASS
    v = match.judge(a, {"a": [3, 4, 8], "b": [1, 2, 7]})
    assert v.status is Status.FAIL and v.causes[0].kind == "request_swap"


def test_padding_on_either_side_meets_under_masks():
    tokens = ([[0, 0, 5, 6]], [[5, 6, 0, 0]])
    masks = ([[0, 0, 1, 1]], [[1, 1, 0, 0]])
    assert match.judge(*tokens, mask_a=masks[0], mask_b=masks[1]).status is Status.PASS
    values = (torch.tensor([[9.0, 9, -1, -2]]), torch.tensor([[-1.0, -2, 7, 7]]))
    v = logprobs.judge(*values, tokens_a=tokens[0], tokens_b=tokens[1], mask_a=masks[0], mask_b=masks[1])
    assert v.status is Status.PASS and str(v.coverage["tokens"]) == "2/2"
    v = logprobs.judge(values[0], values[1] - 1, tokens_a=tokens[0], tokens_b=tokens[1], mask_a=masks[0], mask_b=masks[1])
    assert v.status is Status.FAIL and (v.first_bad.position, v.first_bad.token) == (0, 5)
    assert match.judge([0, 0, 5, 6, 7], [5, 6, 7]).causes[0].kind == "padding"


def test_packed_with_padded_bounds():
    buffer = [1, 2, 3, 0, 4, 5, 0, 0]
    right = Packed(buffer, [0, 3, 5], [0, 4, 8])
    assert match.judge(right, {"0": [1, 2, 3], "1": [4, 5]}).status is Status.PASS
    v = match.judge(right, Packed(buffer, [0, 4, 8]))  # the padded bounds taken for the real ones
    assert v.status is Status.INVALID and v.causes[0].kind == "padding"
    assert match.judge(right, Packed(buffer, [0, 3, 5])).status is Status.FAIL  # the real bounds used as offsets


def test_prompts_are_part_of_the_identity():
    a = {"r": {"prompt_token_ids": [1, 2, 3], "token_ids": [7], "logprobs": [-0.5]}}
    b = {"r": {"prompt_token_ids": [1, 9, 3], "token_ids": [7], "logprobs": [-0.5]}}
    v = logprobs.judge(a, b)
    assert v.status is Status.FAIL and v.first_bad.position == 1 and v.children[1].status is Status.NOT_RUN
    assert logprobs.judge(a, {"r": dict(a["r"])}).status is Status.PASS


def test_explicit_positions():
    a = {"r": {"token_ids": [1, 2, 3], "positions": [4, 5, 6]}}
    v = match.judge(a, {"r": {"token_ids": [1, 3], "positions": [4, 6]}})
    assert v.status is Status.INVALID and v.first_bad.position == 5 and v.causes == []
    v = match.judge({"r": {"token_ids": [1, 2], "positions": [3, 3]}}, a)
    assert v.status is Status.INVALID and "recorded twice" in v.reason
    assert match.judge(a, {"r": {"token_ids": [3, 1, 2], "positions": [6, 4, 5]}}).status is Status.PASS


def test_key_sets():
    one = torch.ones(2)
    assert weights.judge({"a": one, "b": one}, {"a": one}).status is Status.INVALID
    assert weights.judge({"a": one}, {"a": one, "c": one}).first_bad.tensor == "c"
    assert weights.judge({}, {}).status is Status.NOT_RUN
    assert weights.judge({"e": one, "h": one}, {"e": one}, tied=[("e", "h")]).status is Status.PASS
    v = weights.judge({"e": one, "h": one}, {"e": one, "h": one * 2}, tied=[("e", "h")])
    assert v.status is Status.FAIL and v.first_bad.tensor == "h"


@pytest.mark.parametrize(("order", "kind"), [([1, 0, 2, 3], "expert_permutation"), ([0, 0, 2, 3], "expert_duplicates")])
def test_experts_stacked_in_one_tensor(order, kind):
    e = torch.randn(4, 3, 3, generator=G)
    v = weights.judge({"layers.0.mlp.experts.w13_weight": e}, {"layers.0.mlp.experts.w13_weight": e[order]})
    assert v.status is Status.FAIL and v.causes[0].kind == kind


def test_vocabulary_shards_name_the_rank_with_the_padding():
    full = torch.randn(10, 4, generator=G)
    v = weights.judge_shards(full, list(torch.cat([full, torch.zeros(6, 4)]).chunk(4)), name="embed_tokens")
    assert v.status is Status.INVALID and v.first_bad.rank == {"tp": 2} and v.first_bad.stage == "export (un-pad)"


def test_runs_that_cannot_be_compared():
    one = torch.ones(2)
    assert rerun.judge([{"x": one}]).status is Status.NOT_RUN
    assert rerun.judge([{"x": one, "y": one}, {"x": one}]).status is Status.INVALID
    v = rerun.judge([Run({"x": one}, axes={"batch": 2}), Run({"x": one * 2}, axes={"batch": 2})])
    assert v.causes[0].kind == "nondeterministic"
    v = rerun.judge([{"x": one}, {"x": torch.tensor([1.0, math.inf])}])
    assert v.status is Status.FAIL and "finite→infinity" in v.cause


def test_a_third_rank_and_a_missing_field():
    v = rerun.judge_configs({0: {"n": {"block": 1}}, 1: {"n": {"block": 1}}, 2: {"n": {"block": 2}}})
    assert v.first_bad.rank == {"rank": 2} and "rank0≠rank2" in v.cause
    assert rerun.judge_configs({0: {"n": {"block": 1}}, 1: {"n": {"block": 1, "warps": 4}}}).status is Status.FAIL


def test_first_bad_layer_is_explained_not_the_next():
    a = {"layers.0.output": torch.randn(3, 4, generator=G), "layers.1.output": torch.randn(3, 4, generator=G)}
    b = {"layers.0.output": a["layers.0.output"].clone(), "layers.1.output": a["layers.1.output"] + 1}
    b["layers.0.output"][1, 2] += 0.5
    v = layers.judge(a, b)
    assert v.first_bad.tensor == "layers.0.output" and v.causes == []


def test_bits_alone_names_a_cause():
    x = torch.randn(64, generator=G)
    assert "bfloat16" in bits.judge(x, x.bfloat16().float()).cause
