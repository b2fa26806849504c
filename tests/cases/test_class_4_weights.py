"""Class 4: weights that were right when they left."""
from __future__ import annotations

import math

import pytest
import torch

from alignment import layers, logprobs, weights
from alignment.verdict import Status


class TestCase25ScrambledExperts:
    def hf(self) -> dict[str, torch.Tensor]:
        out = {"model.embed_tokens.weight": torch.ones(4, 4)}
        for layer in range(2):
            out[f"model.layers.{layer}.self_attn.q_proj.weight"] = torch.full((4, 4), 9.0 + layer)
            out[f"model.layers.{layer}.mlp.gate.weight"] = torch.full((8, 4), 0.5)
            for e in range(8):
                ramp = torch.arange(16.0).reshape(4, 4) / 64
                out[f"model.layers.{layer}.mlp.experts.{e}.up_proj.weight"] = e + 1 + ramp + 100 * layer
        return out

    def scrambled(self) -> dict[str, torch.Tensor]:
        out = self.hf()
        for layer in range(2):
            for to, source in ((2, 0), (7, 1)):
                name = f"model.layers.{layer}.mlp.experts.{{}}.up_proj.weight"
                out[name.format(to)] = out[name.format(source)].clone()
        return out

    def shards(self) -> dict[str, dict[str, torch.Tensor]]:
        full = self.hf()
        out: dict[str, dict[str, torch.Tensor]] = {f"ep{r}": {} for r in range(4)}
        for name, tensor in full.items():
            owners = [int(name.split("experts.")[1].split(".")[0]) // 2] if "experts" in name else range(4)
            for r in owners:
                out[f"ep{r}"][name] = tensor
        return out

    def test_first_bad_stage(self):
        bad = self.scrambled()
        v = weights.judge_stages({"S0 HF1": self.hf(), "S1 local shards": self.shards(), "S2 EP gather": bad,
                                  "S3 convert": dict(bad), "S4 HF2": dict(bad)}, ep=4)  # fmt: skip
        assert v.status is Status.FAIL
        assert v.first_bad.stage == "S2 EP gather"
        assert (v.first_bad.layer, v.first_bad.expert, v.first_bad.rank) == (0, 2, {"ep": 1})
        assert v.info["stages"] == {"S0 HF1": "PASS", "S1 local shards": "PASS", "S2 EP gather": "FAIL",
                                    "S3 convert": "downstream", "S4 HF2": "downstream"}  # fmt: skip
        assert [row["duplicates"] for row in v.info["experts"]] == [[[0, 2], [1, 7]]] * 2
        assert [row["lost"] for row in v.info["experts"]] == [[2, 7]] * 2
        assert "duplicated {0,2} {1,7}, content lost {2,7}" in v.cause
        dense = v.children[2].info["tensors"]
        assert all(row["status"] == "PASS" for n, row in dense.items() if "experts" not in n)

    def test_permutation_is_shown_as_one(self):
        good, bad = self.hf(), self.hf()
        names = [f"model.layers.1.mlp.experts.{e}.up_proj.weight" for e in range(8)]
        for to, source in enumerate([1, 0, 2, 3, 4, 6, 7, 5]):
            bad[names[to]] = good[names[source]]
        v = weights.judge(good, bad)
        assert v.causes[0].kind == "expert_permutation" and "0←1, 1←0, 5←6, 6←7, 7←5" in v.cause

    def test_cloned_experts_are_no_duplicates(self):
        good = self.hf()
        for layer in range(2):
            good[f"model.layers.{layer}.mlp.experts.3.up_proj.weight"] = good[f"model.layers.{layer}.mlp.experts.4.up_proj.weight"]
        assert weights.judge_stages({"HF1": good, "HF2": dict(good)}).status is Status.PASS
        bad = dict(good)
        bad["model.layers.0.mlp.experts.0.up_proj.weight"] = bad["model.layers.0.mlp.experts.1.up_proj.weight"]
        v = weights.judge_stages({"HF1": good, "HF2": bad})
        assert v.info["experts"][0]["duplicates"] == [[0, 1]] and v.info["experts"][0]["lost"] == [0]

    @pytest.mark.parametrize("control", ["EP1", "PP1"])
    def test_clean_twin(self, control):
        shards = {"ep0": self.hf()} if control == "EP1" else self.shards()
        v = weights.judge_stages({"S0 HF1": self.hf(), "S1 local shards": shards, "S2 EP gather": self.hf(), "S4 HF2": self.hf()}, ep=4)
        assert v.status is Status.PASS


class TestCase26PackedProjectionSplitEvenly:
    components = {"Q": 4, "K": 4, "V": 8, "Z": 8, "B": 2, "A": 2}  # noqa: RUF012
    full = torch.arange(28.0)[:, None].expand(28, 3).contiguous()

    def test_shard_content(self):
        v = weights.judge_shards(self.full, list(self.full.chunk(2)), components=self.components, name="in_proj")
        assert v.status is Status.FAIL
        assert (v.first_bad.stage, v.first_bad.tensor, v.first_bad.rank, v.first_bad.row) == ("TP split", "in_proj", {"tp": 0}, 2)
        assert "has Q row 2, wants K row 0" in v.reason
        assert v.info["round_trip_equal"] is True and "does not see" in v.info["round_trip"]

    def test_tp1_passes(self):
        assert weights.judge_shards(self.full, [self.full], components=self.components).status is Status.PASS

    def test_clean_twin(self):
        right = weights.split_components(self.full, 2, self.components)
        assert weights.judge_shards(self.full, right, components=self.components, name="in_proj").status is Status.PASS


class TestCase28SquareTransposed:
    g = torch.Generator().manual_seed(6)
    w, x = torch.randn(64, 64, generator=g), torch.randn(5, 64, generator=g)

    def test_round_trip_is_blind_and_the_stage_is_not(self):
        key = "layers.0.mlp.experts.down_proj.weight"
        stages = {"HF1": {key: self.w}, "HF→Megatron import": {key: self.w}, "HF2": {key: self.w}}
        assert weights.judge(stages["HF1"], stages["HF2"]).status is Status.PASS
        v = weights.judge_stages(stages, truth={"HF→Megatron import": {key: self.w.T.contiguous()}})
        assert v.status is Status.FAIL
        assert v.first_bad.stage == "HF→Megatron import"
        assert "matches after transpose" in v.cause
        assert "round trip does not see" in v.info["round_trip"]

    def test_forward(self):
        key = "layers.0.mlp.experts.down_proj.output"
        a, b = {"layers.0.mlp.input": self.x, key: self.x @ self.w.T}, {"layers.0.mlp.input": self.x, key: self.x @ self.w}
        v = layers.judge(a, b, inputs={key: self.x}, weights={key: self.w})
        assert v.status is Status.FAIL and v.first_bad.tensor == key
        assert "matches after transpose" in v.cause

    def test_not_square_is_a_shape(self):
        w = torch.randn(64, 96)
        v = weights.judge({"w": w}, {"w": w.T.contiguous()})
        assert v.status is Status.INVALID and "shape" in v.reason and "matches after transpose" in v.cause

    def test_clean_twin(self):
        key = "w"
        right = {key: self.w.T.contiguous()}
        v = weights.judge_stages({"HF1": {key: self.w}, "import": right, "HF2": {key: self.w}}, truth={"import": right})
        assert v.status is Status.PASS


class TestCase29HeadMajorQKV:
    g = torch.Generator().manual_seed(29)
    q, k, v = torch.randn(16, 8, generator=g), torch.randn(8, 8, generator=g), torch.randn(8, 8, generator=g)
    table = {"q0": "q0", "q1": "q1", "k0": "q2", "v0": "q3", "q2": "k0", "q3": "k1", "k1": "v0", "v1": "v1"}  # noqa: RUF012

    def grouped(self) -> torch.Tensor:
        q, k, v = self.q.chunk(4), self.k.chunk(2), self.v.chunk(2)
        return torch.cat([q[0], q[1], k[0], v[0], q[2], q[3], k[1], v[1]])

    def test_slots(self):
        fused = torch.cat([self.q, self.k, self.v])
        v = weights.judge_qkv(self.q, self.k, self.v, fused, heads=4, kv_heads=2)
        assert v.status is Status.FAIL
        assert v.info["slots"] == self.table
        assert "5 of 8 slots wrong: k0←q2, v0←q3, q2←k0, q3←k1, k1←v0" in v.reason
        assert v.first_bad.module == "linear_qkv"
        assert v.causes[0].kind == "qkv_layout" and "round trip does not see" in v.info["round_trip"]

    def test_labels(self):
        stored, read = ["q0", "q1", "q2", "q3", "k0", "k1", "v0", "v1"], ["q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1"]
        v = weights.judge_slots(read, stored, name="linear_qkv")
        assert v.status is Status.FAIL and v.info["slots"] == self.table

    def test_whole_tensor_is_explained(self):
        v = weights.judge({"linear_qkv.weight": self.grouped()}, {"linear_qkv.weight": torch.cat([self.q, self.k, self.v])})
        assert v.causes[0].kind == "qkv_layout" and v.causes[0].evidence["heads"] == 4

    def test_forward_fails_at_the_split(self):
        x = torch.randn(3, 8)
        read = weights.split_qkv(torch.cat([self.q, self.k, self.v]), 4, 2)
        right = weights.split_qkv(self.grouped(), 4, 2)
        a, b = ({"layers.0.linear_qkv.input": x, **{f"layers.0.split.{s}": x @ w.T for s, w in side.items()}} for side in (right, read))
        v = layers.judge(a, b)
        assert v.status is Status.FAIL and v.first_bad.tensor == "layers.0.split.k0"

    def test_clean_twin(self):
        v = weights.judge_qkv(self.q, self.k, self.v, self.grouped(), heads=4, kv_heads=2)
        assert v.status is Status.PASS and str(v.coverage["slots"]) == "8/8"


class TestCase31BufferResetByWarmReload:
    def model(self) -> torch.nn.Module:
        m = torch.nn.Module()
        m.router = torch.nn.Linear(4, 4, bias=False)
        m.router.register_buffer("root_size", torch.tensor(0.018798828125, dtype=torch.bfloat16), persistent=False)
        return m

    def test_place(self):
        m = self.model()
        before = weights.snapshot(m)
        new = torch.randn(4, 4)
        with torch.no_grad():
            m.router.weight.copy_(new)
        m.router.root_size.fill_(1.0)
        v = weights.judge_update(before, weights.snapshot(m), {"router.weight": new}, update=2)
        assert v.status is Status.FAIL
        assert (v.first_bad.tensor, v.first_bad.step) == ("router.root_size", 2)
        assert "0.0187988 → 1" in v.cause
        assert v.info["tensors"]["router.weight"]["status"] == "PASS"
        assert "router.root_size" not in m.state_dict()  # what a comparison of state dicts cannot see

    def test_an_update_that_changes_nothing_shows_nothing(self):
        before = weights.snapshot(self.model())
        v = weights.judge_update(before, dict(before), {"router.weight": before["router.weight"]})
        assert v.status is Status.NOT_RUN

    def test_clean_twin(self):
        m = self.model()
        before = weights.snapshot(m)
        new = torch.randn(4, 4)
        with torch.no_grad():
            m.router.weight.copy_(new)
        assert weights.judge_update(before, weights.snapshot(m), {"router.weight": new}).status is Status.PASS


class TestCase33PaddedVocabulary:
    g = torch.Generator().manual_seed(33)
    real = torch.randn(10, 4, generator=g)
    padded = torch.cat([real, torch.zeros(6, 4)])
    names = ("model.embed_tokens.weight", "lm_head.weight")

    def test_shape(self):
        v = weights.judge({n: self.real for n in self.names}, {n: self.padded for n in self.names})
        assert v.status is Status.INVALID
        assert "shape [10, 4] vs [16, 4]" in v.reason
        assert v.first_bad.tensor == self.names[0] and v.first_bad.stage == "export (un-pad)"
        assert [p.tensor for p in v.downstream] == [self.names[1]]
        assert "stage export (un-pad)" in v.cause and "10 to 15 (all zero)" in v.cause

    def test_the_rank_is_named(self):
        v = weights.judge({self.names[0]: self.real}, {self.names[0]: self.padded}, tp=2)
        assert v.first_bad.rank == {"tp": 1} and "tp rank 1" in v.cause

    def test_logprobs(self):
        z = torch.cat([torch.ones(3, 10), torch.zeros(3, 6)], -1)
        a, b = torch.log_softmax(z[:, :10], -1), torch.log_softmax(z, -1)[:, :10]
        v = logprobs.judge(a, b)
        assert v.stats["max_abs"] == pytest.approx(0.1994, abs=1e-4)
        assert v.causes[0].kind in ("truncated_softmax", "constant_offset")

    def test_clean_twin(self):
        assert weights.judge({n: self.real for n in self.names}, {n: self.padded[:10] for n in self.names}).status is Status.PASS


class TestCase35Fp8WithoutScales:
    w = torch.arange(8, dtype=torch.int8)

    @pytest.mark.parametrize("scale", [math.nan, 1.0])
    def test_not_received(self, scale):
        state = {"w": self.w, "w_scale": torch.tensor([scale])}
        v = weights.judge_received(["w", "w_scale"], received=["w"], state=state)
        assert v.status is Status.FAIL
        assert v.first_bad.tensor == "w_scale"
        assert "w_scale neither received nor retained" in v.reason
        assert str(v.children[0].coverage["tensors"]) == "1/2"
        if math.isnan(scale):
            assert v.children[1].status is Status.INVALID and "non-finite" in v.children[1].reason

    def test_clean_twins(self):
        state = {"w": self.w, "w_scale": torch.tensor([0.5])}
        assert weights.judge_received(["w", "w_scale"], ["w", "w_scale"], state=state).status is Status.PASS
        assert weights.judge_received(["w", "w_scale"], ["w"], retained=["w_scale"], state=state).status is Status.PASS


class TestCase36DraftNeverUpdated:
    old = {"target.a": torch.zeros(3), "target.b": torch.ones(3), "draft.m": torch.full((3,), 2.0)}  # noqa: RUF012
    new = {n: t + 0.5 for n, t in old.items()}  # noqa: RUF012

    def test_path(self):
        v = weights.judge_paths({"ipc": self.new, "nccl": {**self.new, "draft.m": self.old["draft.m"]}}, self.new, self.old)
        assert v.status is Status.FAIL
        assert (v.first_bad.run, v.first_bad.tensor) == ("nccl", "draft.m")
        assert v.causes[0].kind == "stale" and "bitwise equal to the version before" in v.cause
        assert {p: row["verdict"] for p, row in v.info["paths"].items()} == {"ipc": "PASS", "nccl": "FAIL"}
        target = {n: t for n, t in self.new.items() if n.startswith("target")}
        assert weights.judge(target, dict(target)).status is Status.PASS  # cannot be the only gate

    def test_every_path_is_listed(self):
        v = weights.judge_paths({"ipc": self.new}, self.new, self.old, required=("ipc", "nccl", "disk"))
        assert v.status is Status.NOT_RUN
        assert [row["verdict"] for row in v.info["paths"].values()] == ["PASS", "NOT_RUN", "NOT_RUN"]

    def test_clean_twin(self):
        assert weights.judge_paths({"ipc": self.new, "nccl": dict(self.new)}, self.new, self.old).status is Status.PASS
