"""Faults of the kinds of the public reports, planted in dumps and checkpoints: verdict, place and cause; and clean twins.

Every case here was once answered without its cause, with another one, or not at all. Weights, layers and shapes;
``test_breaker4.py`` has rotary embeddings, products, log-probs and files.
"""
from __future__ import annotations

import math

import pytest
import torch

from alignment import Status, diagnose

G = torch.Generator().manual_seed(77)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=G)


def kind(verdict):
    return verdict.causes[0].kind if verdict.causes else None


def checkpoint(layers_: int = 3) -> dict[str, torch.Tensor]:
    out = {"model.embed_tokens.weight": rand(40, 16), "lm_head.weight": rand(40, 16), "model.norm.weight": 1 + 0.1 * rand(16)}
    for i in range(layers_):
        out |= {f"model.layers.{i}.input_layernorm.weight": 1 + 0.1 * rand(16), f"model.layers.{i}.mlp.down_proj.weight": rand(16, 32)}
    return out


class TestPacked:
    @pytest.mark.parametrize("order", [[1, 0], [0, 2, 4, 6, 1, 3, 5, 7], [0, 4, 1, 5, 2, 6, 3, 7], [7, 6, 5, 4, 3, 2, 1, 0]])
    @pytest.mark.parametrize("axis", [0, 1])
    @pytest.mark.parametrize("made", ["int8", "uint8", "dequantised"])
    def test_nibbles_that_were_unpacked(self, files, order, axis, made):
        q = torch.randint(0, 16, (32, 64), generator=G, dtype=torch.uint8)
        w = q if made == "uint8" else (q.to(torch.int8) - 8) if made == "int8" else (q.float() - 8) * rand(32, 1).repeat(1, 64)
        if made == "dequantised" and axis == 0:
            w = ((q.float() - 8) * rand(1, 64)).contiguous()
        name = "model.layers.1.mlp.up_proj.weight"
        moved = w.unflatten(axis, (-1, len(order))).index_select(axis + 1, torch.tensor(order)).flatten(axis, axis + 1)
        v = files({name: w}, {name: moved})
        assert v.status is Status.FAIL and v.first_bad.layer == 1 and kind(v) == "nibble_order" and v.causes[0].evidence["axis"] == axis

    def test_a_permutation_of_plain_weights_is_none(self):
        w = rand(16, 64)
        assert diagnose.tensor(w, w.unflatten(1, (-1, 2)).flip(-1).flatten(1), "up_proj.weight", weights=True)[0].kind == "permutation"

    def test_few_bytes(self):
        few = torch.tensor([[0x12, 0x12, 0x34, 0x34], [0x12, 0x34, 0x12, 0x34]], dtype=torch.uint8)
        assert diagnose.tensor(few, (few >> 4) | (few << 4))[0].kind == "nibble_order"

    @pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv", "k_scale", "scales"])
    def test_scales_left_at_one(self, files, name):
        a = {"model.layers.1.mlp.up_proj.weight": rand(8, 8).to(torch.float8_e4m3fn), f"model.layers.1.mlp.up_proj.{name}": rand(2, 2).abs() * 0.01 + 0.001}
        for new in (torch.ones(2, 2), torch.cat([a[f"model.layers.1.mlp.up_proj.{name}"][:1], torch.ones(1, 2)])):
            v = files(a, {**a, f"model.layers.1.mlp.up_proj.{name}": new})
            assert v.status is Status.FAIL and v.first_bad.tensor == f"model.layers.1.mlp.up_proj.{name}" and kind(v) == "scale_default"

    def test_exponents_left_at_one(self, files):
        e8 = torch.randint(110, 126, (4, 4), generator=G, dtype=torch.uint8)
        v = files({"layers.0.w.weight_scale": e8}, {"layers.0.w.weight_scale": torch.full((4, 4), 127, dtype=torch.uint8)})
        assert v.status is Status.FAIL and kind(v) == "scale_default"


class TestExperts:
    stacked = {"model.layers.0.mlp.experts.gate_up_proj": rand(8, 16, 8), "model.layers.0.mlp.experts.gate_up_proj_bias": rand(8, 8),  # noqa: RUF012
               "model.layers.0.mlp.experts.down_proj": rand(8, 4, 16)}  # fmt: skip

    @pytest.mark.parametrize("name", ["gate_up_proj", "gate_up_proj_bias", "down_proj"])
    def test_stacked_in_one_tensor(self, files, name):
        name = f"model.layers.0.mlp.experts.{name}"
        v = files(self.stacked, {**self.stacked, name: self.stacked[name][[0, 1, 2, 4, 3, 5, 6, 7]]})
        assert v.status is Status.FAIL and kind(v) == "expert_permutation" and (v.first_bad.layer, v.first_bad.expert) == (0, 3)

    def test_rows_that_are_tokens_are_no_experts(self, files):
        x = {"layers.0.mlp.experts.output": rand(8, 16)}
        v = files(x, {n: t[[1, 0, 2, 3, 4, 5, 6, 7]] for n, t in x.items()})
        assert v.status is Status.FAIL and kind(v) == "permutation" and v.first_bad.expert is None

    @pytest.mark.parametrize(("leaf", "slots"), [("input_ids", False), ("token_ids", False), ("position_ids", False), ("topk_ids", True)])
    def test_the_order_of_tokens_is_no_order_of_slots(self, files, leaf, slots):
        ids = torch.tensor([[5, 3, 9, 2], [1, 2, 3, 4]])
        v = files({f"layers.0.{leaf}": ids}, {f"layers.0.{leaf}": ids[:, [1, 0, 2, 3]]}, kind="layers")
        assert v.status is Status.FAIL and (kind(v) == "slot_order") is slots

    def test_chosen_experts_under_other_numbers(self, files):
        z = rand(32, 8)
        ids, new = z.topk(2).indices, torch.tensor([3, 0, 6, 1, 7, 2, 5, 4])
        a = {"layers.1.mlp.router.logits": z, "layers.1.mlp.router.topk_ids": ids}
        v = files(a, {**a, "layers.1.mlp.router.topk_ids": new[ids]})
        assert v.status is Status.FAIL and kind(v) == "expert_permutation" and v.causes[0].evidence["map"][0] == 3

    @pytest.mark.parametrize(("scores", "ids"), [("router.weight_logits", "router.topk_ids"), ("gate.output", "gate.top_k_index"), ("router_logits", "topk_ids"),
                                                 ("gating_output", "router.top1")])  # fmt: skip
    def test_a_tie_by_scores_of_any_name(self, files, scores, ids):
        z = rand(12, 8)
        z[5] = torch.tensor([0.1, 2, 2, 0.3, 0.4, 0.5, 0.6, 0.7])
        a = {f"layers.1.mlp.{scores}": z, f"layers.1.mlp.{ids}": z.topk(1).indices}
        other = a[f"layers.1.mlp.{ids}"].clone()
        other[5] = 3 - other[5]
        v = files(a, {**a, f"layers.1.mlp.{ids}": other})
        assert v.status is Status.FAIL and (v.first_bad.layer, v.first_bad.row) == (1, 5) and kind(v) == "tie"
        other[5] = 7  # a choice that no score explains
        assert kind(files(a, {**a, f"layers.1.mlp.{ids}": other})) != "tie"


class TestLayersThatMoved:
    one = {f"layers.{i}.output": rand(6, 8) for i in range(5)}  # noqa: RUF012

    @pytest.mark.parametrize("name", ["layers.{}.output", "model.layers.{}.mlp.down_proj.weight", "hidden_states.{}"])
    @pytest.mark.parametrize("how", ["rotated", "the last is new", "from one", "the first left out"])
    def test_off_by_one(self, files, name, how):
        a = {name.format(i): t for i, t in enumerate(self.one.values())}
        b = {"rotated": {name.format(i): a[name.format((i + 1) % 5)] for i in range(5)},
             "the last is new": {**{name.format(i): a[name.format(i + 1)] for i in range(4)}, name.format(4): rand(6, 8)},
             "from one": {name.format(i + 1): a[name.format(i)] for i in range(5)},
             "the first left out": {name.format(i): a[name.format(i + 1)] for i in range(4)}}[how]
        v = files(a, b)
        assert not v.green and v.first_bad.tensor == name.format(0) and kind(v) == "layer_shift"
        assert v.causes[0].evidence["shift"] == (1 if how == "from one" else -1)

    def test_two_exchanged_layers_and_equal_layers_are_none(self, files):
        a = dict(self.one)
        v = files(a, {**a, "layers.1.output": a["layers.3.output"], "layers.3.output": a["layers.1.output"]})
        assert v.first_bad.layer == 1 and kind(v) == "swapped"
        same = {n: a["layers.0.output"] for n in a}
        assert kind(files(same, {**same, "layers.2.output": rand(6, 8)})) != "layer_shift"


class TestShapes:
    @pytest.mark.parametrize(("cut", "want"), [
        (lambda t: t[:32], "truncated"), (lambda t: t[:20], "shard"), (lambda t: t[20:], "shard"), (lambda t: t[:, :15], "truncated"), (lambda t: t[:, 8:], "shard"),
        (lambda t: t[1:], "truncated"), (lambda t: torch.cat([t, torch.zeros(8, 16)]), "padded_vocabulary"), (lambda t: torch.cat([t, rand(8, 16)]), "padded_vocabulary"),
        (lambda t: torch.cat([t, torch.zeros(40, 8)], 1), "padded_vocabulary"),
    ])  # fmt: skip
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
    def test_a_part_of_the_head(self, files, cut, want, dtype):
        a = checkpoint()
        b = {**a, "lm_head.weight": cut(a["lm_head.weight"])}
        v = files(*({n: t.to(dtype) for n, t in side.items()} for side in (a, b)))
        assert v.status is Status.INVALID and v.first_bad.tensor == "lm_head.weight" and kind(v) == want

    @pytest.mark.parametrize("fill", [0.0, -math.inf])
    def test_logits_with_padding(self, files, fill):
        z = {"lm_head.logits": rand(6, 50)}
        v = files(z, {"lm_head.logits": torch.nn.functional.pad(z["lm_head.logits"], (0, 14), value=fill)})
        assert v.status is Status.INVALID and kind(v) == "padded_vocabulary" and v.causes[0].evidence["padding"] == 14

    def test_other_content_is_no_part(self, files):
        v = files({"lm_head.weight": rand(40, 16)}, {"lm_head.weight": rand(20, 16)})
        assert v.status is Status.INVALID and v.causes == []

    @pytest.mark.parametrize(("part", "whole"), [
        (torch.tensor([7]), torch.arange(100)), (rand(1), rand(1 << 21)), (torch.ones(3, 1, 4), torch.ones(3, 6, 4)), (torch.full((2, 3), 0.5), torch.full((2, 6), 0.5)),
    ], ids=["one id", "one number of very many", "ones", "halves"])  # fmt: skip
    def test_a_few_numbers_are_a_part_of_anything(self, files, part, whole):
        v = files({"layers.0.mlp.ids": part}, {"layers.0.mlp.ids": whole})
        assert v.status is Status.INVALID and v.causes == []

    def test_wrapped_rows_and_heads(self, files):
        w = rand(32, 16)
        v = files({"layers.0.q_proj.weight": w}, {"layers.0.q_proj.weight": w.view(4, 2, 4, 16).transpose(1, 2).reshape(32, 16)})
        assert kind(v) == "rotary_layout" and v.causes[0].evidence == {"heads": 4, "rows": 8}
        v = files({"layers.0.output": w}, {"layers.0.output": w.roll(1, 0)})
        assert kind(v) == "lag" and v.causes[0].evidence["lag"] == 1

    @pytest.mark.parametrize(("a", "b", "want"), [
        (torch.arange(6), torch.arange(6).int(), "dtype_cast"), (torch.arange(6) + 250, (torch.arange(6) + 250).to(torch.uint8), "dtype_cast"),
        (torch.arange(6) > 2, torch.arange(6) <= 2, "negated"), (torch.arange(6), torch.arange(6).float(), "dtype_cast"), (torch.arange(6), torch.arange(1, 7).int(), None),
    ])  # fmt: skip
    def test_integers_and_masks(self, files, a, b, want):
        v = files({"layers.0.ids": a}, {"layers.0.ids": b})
        assert v.status is Status.FAIL and kind(v) == want
