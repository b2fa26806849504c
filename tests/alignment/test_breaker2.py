"""Ledgers and dumps that a person or another program wrote, with good checksums: no false green, and no traceback."""
from __future__ import annotations

import copy
import json
import math
import os

import numpy as np
import pytest
import torch
import xxhash

from alignment import InputError, layers, logprobs, rerun, runlog, runs, weights
from alignment.compare import compare_runs
from alignment.rerun import Run
from alignment.runlog import QUANTITIES
from alignment.verdict import Status
from tests.alignment.test_runs import START, compared, continued, lines_of, step_of, write


def changed(at, **fields):
    lines = copy.deepcopy(lines_of())
    lines[at].update(fields)
    return lines


def sealed(text: str) -> bytes:
    return text[:-1].encode() + f',"sum":"{xxhash.xxh3_64_hexdigest(text.encode())}"}}\n'.encode()


def both(tmp_path, lines):
    return compared(tmp_path, lines, copy.deepcopy(lines))


ALL = step_of(1)["digests"]


@pytest.mark.parametrize("fields", [
    {"digests": {q: None for q in QUANTITIES}}, {"digests": {q: "" for q in QUANTITIES}}, {"digests": {q: "xxh3:" for q in QUANTITIES}},
    {"digests": {**ALL, "loss": 0}}, {"digests": {**ALL, "loss": ["f64:1"]}}, {"digests": {}}, {"digests": {"loss": "f64:1"}},
    {"digests": {q: d for q, d in ALL.items() if q != "gradients"}},
    {"trained": False, "digests": {q: ALL[q] for q in QUANTITIES[:6]}},
    {"digests": {**ALL, "loss": "f64:7ff8000000000000"}, "numbers": {}}, {"digests": {**ALL, "grad_norm": "f64:fff0000000000000"}, "numbers": {}},
    {"numbers": {"loss": "nan"}}, {"parts": {"rewards": {"r": "7ff8000000000001"}}},
    {"step": -1}, {"step": True}, {"step": 1.0}, {"step": "1"}, {"step": 10**13}, {"step": 10**400},
    *({f: v} for f in ("parts", "numbers", "kernels") for v in ([1], "x", None, 5, {"weights": [1]}, {"weights": {"x": None}})),
])  # fmt: skip
def test_a_step_whose_content_proves_nothing(tmp_path, fields):
    lines = changed(2, **fields)
    assert both(tmp_path, lines).status is Status.INVALID
    lines[2]["digests"] = {**lines[2]["digests"], "weights": "xxh3:other"}
    assert not compared(tmp_path, lines_of(), lines).green


def test_a_last_turn_that_only_compares_has_fewer(tmp_path):
    lines = lines_of()
    lines.insert(4, {**step_of(3, QUANTITIES[:7]), "trained": False})
    assert both(tmp_path, lines).status is Status.PASS


def test_a_quantity_of_nothing_is_no_evidence(tmp_path):
    lines = changed(2, digests={**ALL, "engine_weights": runs._NOTHING})
    verdict = both(tmp_path, lines)
    assert verdict.status is Status.NOT_RUN and verdict.first_bad.stage == "engine_weights"
    assert verdict.coverage["quantities"].compared == 3 * len(QUANTITIES) - 1


@pytest.mark.parametrize("start", [
    *({f: v} for f in ("recipe", "topology", "versions", "hardware", "conditions") for v in ([1], "x")), {"conditions": None},
    {"resumed_from": "abc"}, {"resumed_from": {}}, {"resumed_from": -5}, {"resumed_from": 1e20}, {"resumed_from": True},
    {"schema": 2}, {"schema": "1"}, {"schema": True}, {"schema": None},
])  # fmt: skip
def test_a_start_line_of_another_form(tmp_path, start):
    assert both(tmp_path, lines_of(**start)).status is Status.INVALID


def test_facts_that_are_all_unknown_say_nothing(tmp_path):
    assert both(tmp_path, lines_of(hardware={"cpu": None})).status is Status.NOT_RUN
    assert compared(tmp_path, lines_of(recipe={"a": 1}), lines_of(recipe={"a": True})).status is Status.INVALID
    assert compared(tmp_path, lines_of(recipe={"a": 1, "b": None}), lines_of(recipe={"a": 1})).status is Status.INVALID


@pytest.mark.parametrize("end", [{"steps": 5}, {"steps": 1}, {"steps": None}, {"steps": 10**18}, {"verdict": None}, {"verdict": ["PASS"]}])
def test_an_end_line_that_does_not_fit(tmp_path, end):
    assert both(tmp_path, changed(4, **end)).status is Status.INVALID


def test_a_run_that_could_not_judge_itself_and_one_that_was_red(tmp_path):
    assert both(tmp_path, changed(4, verdict="INVALID", reason="NaN")).status is Status.INVALID
    verdict = both(tmp_path, changed(4, verdict="FAIL", reason="logprobs"))  # vime off: the same bits, and wrong ones
    assert verdict.status is Status.PASS and "run A was itself FAIL: logprobs" in verdict.reason


def test_lines_in_another_order(tmp_path):
    lines = lines_of()
    lines[1], lines[2] = lines[2], lines[1]
    verdict = both(tmp_path, lines)
    assert verdict.status is Status.INVALID and "step 0 comes after step 1" in verdict.reason


def test_a_continued_part_with_an_odd_number(tmp_path):
    lines = [*lines_of()[:3], {**START, "resumed_from": "1"}, step_of(1), step_of(2), lines_of()[-1]]
    assert both(tmp_path, lines).status is Status.INVALID
    (tmp_path / "b.jsonl").write_bytes(continued())
    assert runs.compare(write(tmp_path / "a.jsonl", lines_of()), tmp_path / "b.jsonl").status is Status.PASS


@pytest.mark.parametrize("text", [
    '{"kind":"step","digests":{"loss":"xxh3:evil"},' + json.dumps(step_of(0))[1:],
    '{"kind":"step","step":0,"digests":{},"x":' + "[" * 100_000 + "]" * 100_000 + "}",
    '{"kind":"step","step":0,"digests":{"loss":NaN}}', '{"kind":"step","step":' + "9" * 5000 + ',"digests":{}}',
])  # fmt: skip
def test_json_that_is_not_strict(tmp_path, text):
    data = [runlog.line(x) for x in lines_of()]
    (tmp_path / "b.jsonl").write_bytes(b"".join([data[0], sealed(text), *data[2:]]))
    assert runs.compare(write(tmp_path / "a.jsonl", lines_of()), tmp_path / "b.jsonl").status is Status.INVALID


@pytest.mark.parametrize("fields", [{"numbers": {"loss": 9.0}}, {"parts": {}}, {"parts": {**step_of(1)["parts"], "weights": {"x": "1weights", "y": "2"}}}])
def test_a_line_that_contradicts_itself(tmp_path, fields):
    verdict = compared(tmp_path, lines_of(), changed(2, **fields))
    assert verdict.status is Status.INVALID and verdict.first_bad.step == 1 and "edited" in verdict.reason


def test_equal_bits_of_other_kernels(tmp_path):
    other = changed(2, kernels={"engine": ["stock"]})
    verdict = compared(tmp_path, lines_of(), other)
    assert verdict.status is Status.FAIL and (verdict.first_bad.step, verdict.first_bad.stage) == (1, "kernels")
    other[0]["versions"] = {"torch": "2.14"}
    assert compared(tmp_path, lines_of(), other, across=["versions"]).status is Status.PASS


def test_a_missing_cause_before_a_difference_is_told(tmp_path):
    a, b = lines_of(), copy.deepcopy(lines_of())
    a[2]["trained"] = b[2]["trained"] = False
    del a[2]["digests"]["gradients"]
    b[2]["digests"]["weights"] = "xxh3:other"
    verdict = compared(tmp_path, a, b)
    assert verdict.status is Status.FAIL and "gradients before it: recorded on one side only" in verdict.reason


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_one_file_under_two_names(tmp_path, link):
    link(write(tmp_path / "a.jsonl", lines_of()), tmp_path / "b.jsonl")
    assert runs.compare(tmp_path / "a.jsonl", tmp_path / "b.jsonl").status is Status.NOT_RUN


def test_a_copy_is_no_second_run(tmp_path):
    timed = lines_of()
    for i, line in enumerate(timed[1:-1]):
        line["cost"] = {"ledger_s": 0.001, "step_s": 0.1 + i}
    verdict = compared(tmp_path, timed, copy.deepcopy(timed))
    assert verdict.status is Status.NOT_RUN and "a copy of the other" in verdict.reason
    other = copy.deepcopy(timed)
    other[2]["cost"]["step_s"] += 1e-6
    verdict = compared(tmp_path, timed, other)
    assert verdict.status is Status.PASS and "one recording that both ledgers hold" in verdict.info["notes"][0]
    ledger = runlog.read(tmp_path / "a.jsonl")
    assert runs.compare(ledger, ledger).status is Status.NOT_RUN


def test_from_a_step_on_is_said(tmp_path):
    assert compared(tmp_path, lines_of(), lines_of(), from_step=2).reason == "from step 2 on: equal"
    assert "from step 9 on" in compared(tmp_path, lines_of(), lines_of(), from_step=9).reason


class TestRerun:
    def test_a_call_that_fills_one_buffer(self):
        buffer, calls = torch.zeros(4), iter(range(9))

        def call() -> torch.Tensor:
            buffer.fill_(float(next(calls)))
            return buffer

        verdict = rerun.judge_self(call)
        assert verdict.status is Status.FAIL and verdict.first_bad.module == "output"
        assert rerun.judge_self(lambda: buffer).status is Status.PASS

    @pytest.mark.parametrize("pair", [(1, 1.0), (1, True), (1, "1"), (math.nan, math.nan), ([1], (1,)), (None, 1)])
    def test_an_axis_that_only_looks_moved(self, pair):
        runs = [Run({"o": torch.ones(2)}, {"batch": x}) for x in pair]
        assert rerun.judge(runs, require=["batch"]).status is Status.NOT_RUN

    @pytest.mark.parametrize("runs", [None, 5, "ab"])
    def test_runs_that_are_none(self, runs):
        with pytest.raises(InputError, match="list of runs"):
            rerun.judge(runs)


class TestWeights:
    full = torch.arange(64.0).reshape(16, 4)

    def test_overlapping_ranks(self):
        verdict = weights.judge_shards(self.full, [self.full[:9], self.full[7:]])
        assert verdict.status is Status.INVALID and verdict.first_bad.rank == {"tp": 0} and verdict.causes[0].kind == "wrong_shard"
        assert "rows 0 to 8" in verdict.cause
        verdict = weights.judge_shards(self.full, [self.full[:8], self.full[7:15]])
        assert verdict.status is Status.FAIL and verdict.first_bad.rank == {"tp": 1} and verdict.causes[0].kind == "moved_rows"

    @pytest.mark.parametrize("dim", [1, -1])
    def test_columns_of_swapped_ranks(self, dim):
        left, right = self.full.chunk(2, 1)
        assert weights.judge_shards(self.full, [left, right], dim=dim).status is Status.PASS
        verdict = weights.judge_shards(self.full, [right, left], dim=dim)
        assert verdict.status is Status.FAIL and verdict.causes[0].kind == "wrong_shard" and "swapped" in verdict.cause

    def test_ranks_by_name(self):
        assert weights.judge_shards(self.full, {"tp1": self.full[8:], "tp0": self.full[:8]}).status is Status.PASS
        assert weights.judge_shards(self.full, {"tp0": self.full[:8], "tp1": self.full[:8]}).first_bad.rank == {"tp": 1}
        with pytest.raises(InputError, match="with tp in it"):
            weights.judge_shards(self.full, {"dp0": self.full[:8]})

    def test_local_numbers_of_experts(self):
        def name(e: int) -> str:
            return f"layers.0.mlp.experts.{e}.weight"
        experts = {name(e): self.full + e for e in range(8)}
        verdict = weights.judge(experts, {name(0): experts[name(2)], name(1): experts[name(3)]}, ep=4)
        assert verdict.status is Status.FAIL and verdict.first_bad.expert == 0 and verdict.causes[0].kind == "expert_permutation"
        assert "local numbers" in verdict.cause

    def test_an_update_of_nothing(self):
        held = {"w": self.full}
        assert weights.judge_update(held, held).status is weights.judge_update(held, held, {}).status is Status.NOT_RUN

    def test_arguments_that_are_none(self):
        with pytest.raises(InputError):
            weights.judge_stages({"a": None, "b": None})
        with pytest.raises(InputError):
            weights.judge_received("ab", "ab")
        with pytest.raises(InputError):
            weights.judge_qkv(self.full, self.full, self.full, self.full, heads=0, kv_heads=0)


class TestLayersAndLogprobs:
    def test_a_block_that_was_never_written(self):
        cache = torch.randn(6, 4, 2, 8, generator=torch.Generator().manual_seed(1))
        torn = cache * (torch.arange(6) != 3)[:, None, None, None]
        verdict = layers.judge({"layers.0.kv_cache": cache}, {"layers.0.kv_cache": torn})
        assert verdict.first_bad.index[0] == 3 and verdict.causes[0].kind == "zero_rows" and "row [3, 0, 0]" in verdict.cause

    def test_the_input_beside_a_norm_explains_it(self):
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(1)) * torch.tensor([0.001, 0.01, 0.1, 1, 2, 3])[:, None]

        def dump(eps: float) -> dict[str, torch.Tensor]:
            return {"layers.0.norm.input": x, "layers.0.norm.output": x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)}

        verdict = layers.judge(dump(1e-6), dump(1e-5))
        assert verdict.first_bad.tensor == "layers.0.norm.output" and verdict.causes[0].kind == "epsilon"
        assert layers.judge(dump(1e-6), dump(1e-6)).status is Status.PASS

    def test_a_mask_that_is_nan(self):
        with pytest.raises(InputError, match="NaN"):
            logprobs.judge(torch.zeros(3), torch.zeros(3), mask=torch.tensor([1, math.nan, 0]))

    def test_a_place_under_one_mask_is_one_of_the_array(self, tmp_path):
        keep, values = np.arange(8) >= 4, -np.arange(1.0, 9, dtype=np.float32)
        for side, x in (("a", values), ("b", values / 2)):
            np.savez(tmp_path / f"{side}.npz", logprobs=np.where(keep | (side == "a"), x, 0), token_ids=np.arange(8), loss_mask=keep)
        verdict = compare_runs(tmp_path / "a.npz", tmp_path / "b.npz")
        assert verdict.status is Status.FAIL and (verdict.first_bad.position, verdict.first_bad.token) == (4, 4)

    def test_a_field_that_nothing_compares_is_named(self, tmp_path):
        for side, entropy in (("a", 1.0), ("b", 2.0)):
            record = {"r1": {"token_ids": [5, 6], "logprobs": [-0.1, -0.2], "entropy": [entropy, 0.0]}}
            (tmp_path / f"{side}.json").write_text(json.dumps(record))
        verdict = compare_runs(tmp_path / "a.json", tmp_path / "b.json")
        assert verdict.info["not_compared"] == ["entropy"] and "not compared: entropy" in verdict.reason

    def test_bare_arrays_have_no_name(self, tmp_path):
        x = np.arange(1, 4, dtype=np.float32)
        for name, values in (("trainer", x), ("engine", x), ("torn", np.array([1, 9, 3], np.float32))):
            np.save(tmp_path / f"{name}.npy", values)
        assert compare_runs(tmp_path / "trainer.npy", tmp_path / "engine.npy").status is Status.PASS
        verdict = compare_runs(tmp_path / "trainer.npy", tmp_path / "torn.npy")
        assert verdict.status is Status.FAIL and verdict.first_bad.index == (1,)

    def test_a_metric_over_nobody_knows_how_many_tokens(self):
        assert logprobs.gate_metrics({"abs_diff": 0.0}, "abs_diff").status is Status.NOT_RUN
        assert logprobs.gate_metrics({"abs_diff": 0.0}, "abs_diff", tokens=3).status is Status.PASS

    @pytest.mark.parametrize("positions", [[], [1], [1] * 5])
    def test_positions_of_other_rows(self, positions):
        x = {"layers.0.output": torch.ones(4, 2)}
        with pytest.raises(InputError, match="one a row"):
            layers.judge(x, x, positions=positions)
        assert layers.judge(x, x, positions=[0, 1, 2, 3]).status is Status.PASS


@pytest.mark.parametrize(("values", "status"), [([True, True], Status.INVALID), ([], Status.NOT_RUN), (None, Status.NOT_RUN), ([-1.0], Status.INVALID)])
def test_requests_whose_log_probs_are_none(tmp_path, values, status):
    row = {"request_id": "r", "prompt_token_ids": [1], "token_ids": [2, 3], **({} if values is None else {"logprobs": values})}
    for side in "ab":
        (tmp_path / f"{side}.json").write_text(json.dumps([row]))
    assert compare_runs(tmp_path / "a.json", tmp_path / "b.json").status is status


@pytest.mark.parametrize("change", [
    lambda d: d["entries"].pop(), lambda d: d["entries"][1].update(tensor="000000"), lambda d: d["entries"].append(dict(d["entries"][0])),
    lambda d: d["entries"][0].update(step="1"), lambda d: d["entries"][0].update(step=True), lambda d: d["entries"][0].update(request=5),
    lambda d: d["entries"][0].update({"ste ": None}), lambda d: d.update(kind="other"), lambda d: d.update(kernals={}),
    lambda d: d["entries"][1].update(name=d["entries"][0]["name"]), lambda d: d["entries"].clear(),
])  # fmt: skip
def test_an_index_of_records_that_was_changed_on_both_sides(tmp_path, change):
    from alignment.records import RecordWriter

    for side in "ab":
        with RecordWriter(tmp_path / side) as w:
            for i in range(3):
                w.add("layer", f"layers.{i}.output", torch.ones(2, 3) * (i + 1), request="r", tokens=[4, 5], positions=[0, 1])
    assert compare_runs(tmp_path / "a", tmp_path / "b").status is Status.PASS
    for side in "ab":
        index = next((tmp_path / side).glob("*.index.json"))
        document = json.loads(index.read_text())
        change(document)
        index.write_text(json.dumps(document))
    assert compare_runs(tmp_path / "a", tmp_path / "b").status is Status.INVALID
