"""Files as trainers and rollout workers leave them: other names, packed buffers with a tail, masks, text beside numbers."""
from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from alignment import Status, logprobs, match
from alignment.compare import compare_runs
from alignment.sources import as_pair

LP = [-0.5, -1.25, -2.0]


@pytest.fixture
def saved(tmp_path):
    """The verdict on two contents, saved as a file of that suffix each."""
    def compare(a, b, suffix="pt", suffix_b=None, **kwargs):
        paths = []
        for side, content, ext in (("a", a, suffix), ("b", b, suffix_b or suffix)):
            paths.append(tmp_path / f"{side}.{ext}")
            if ext == "pt":
                torch.save(content, paths[-1])
            elif ext == "safetensors":
                save_file(content, paths[-1])
            elif ext == "npz":
                np.savez(paths[-1], **content)
            else:
                paths[-1].write_text(json.dumps(content) if ext == "json" else "\n".join(map(json.dumps, content)))
        return compare_runs(*paths, **kwargs)

    return compare


def row(request="a", tokens=(5, 6, 7), **fields):
    return {"request_id": request, "token_ids": list(tokens), "logprobs": LP, **fields}


class TestPacked:
    tokens, values = torch.arange(5, 15), -torch.arange(1.0, 11)

    def side(self, bounds=(0, 3, 10), **fields):
        return {"tokens": self.tokens, "logprobs": self.values, "cu_seqlens": torch.tensor(bounds), **fields}

    def test_a_tail_behind_the_last_bound_is_told(self, saved):
        v = saved(self.side((0, 3, 7)), self.side((0, 3, 7), logprobs=self.values - (torch.arange(10) > 7).float()))
        assert v.status is Status.PASS and v.coverage["tokens"].expected == 7
        assert v.info["left_out"]["a"] == "3 of 10 rows are in no sequence, 3 of them behind the last bound" and "3 of 10 rows" in v.reason
        whole = saved(self.side(), self.side(logprobs=self.values.clone()))
        assert whole.status is Status.PASS and "left_out" not in whole.info and not whole.reason

    def test_padding_between_sequences_is_told(self):
        packed = match.Packed(self.tokens, [0, 3, 7], [0, 4, 9], values=self.values)
        v = logprobs.judge(packed, match.Packed(self.tokens, [0, 3, 7], [0, 4, 9], values=self.values.clone()))
        assert v.info["left_out"]["b"] == "3 of 10 rows are in no sequence, 1 of them behind the last bound"

    def test_a_mask_beside_the_bounds_counts(self, saved):
        mask = torch.arange(10) > 2
        changed = self.values - (torch.arange(10) < 3) * 0.5
        v = saved(self.side(loss_mask=mask), self.side(loss_mask=mask, logprobs=changed))
        assert v.status is Status.PASS and v.coverage["tokens"].compared == 7 and "3 of 10 places are masked" in v.reason
        v = saved(self.side(loss_mask=mask), self.side(loss_mask=torch.arange(10) > 3))
        assert v.status is Status.FAIL and (v.first_bad.tensor, v.first_bad.request, v.first_bad.position) == ("mask", "1", 0)
        assert saved(self.side(loss_mask=mask), self.side()).status is Status.INVALID
        v = saved(self.side(loss_mask=mask), self.side(loss_mask=mask, logprobs=self.values - (torch.arange(10) == 4).float()))
        assert v.status is Status.FAIL and (v.first_bad.request, v.first_bad.position, v.first_bad.token) == ("1", 1, 9)
        none = torch.zeros(10, dtype=torch.bool)
        assert saved(self.side(loss_mask=none), self.side(loss_mask=none, logprobs=changed)).status is Status.NOT_RUN


class TestComplex:
    z = torch.complex(torch.arange(4.0), torch.ones(4))

    @pytest.mark.parametrize("field", ["logprobs", "temperature", "token_ids"])
    def test_what_is_no_real_number_is_a_message(self, saved, field):
        a = {"token_ids": torch.arange(4), "logprobs": -torch.arange(4.0), "temperature": torch.tensor(0.7), field: self.z[1] if field == "temperature" else self.z}
        v = saved(a, a)
        assert v.status is Status.INVALID and ("complex" in v.reason or "1j" in v.reason)

    def test_logits_are_no_evidence_for_a_cause(self, saved):
        a = {"token_ids": torch.arange(4), "logprobs": -torch.arange(4.0), "logits": self.z[None].expand(4, 4).contiguous()}
        v = saved(a, {**a, "logprobs": -(torch.arange(4.0) ** 2) - 1})
        assert v.status is Status.FAIL and v.first_bad.position == 0

    def test_parts_are_counted_as_parts(self, saved):
        v = saved({"h": self.z}, {"h": self.z + (1 + 1j)})
        assert "8/8 real and imaginary parts differ" in v.reason and v.coverage["elements"].expected == 4


class TestRequests:
    @pytest.mark.parametrize("key", ["log_probs", "rollout_log_probs", "old_log_probs", "response_logprobs"])
    @pytest.mark.parametrize("ids", ["response_ids", "completion_ids"])
    def test_names_of_other_frameworks(self, saved, key, ids):
        a = [{"rid": "a", ids: [5, 6, 7], key: LP}]
        v = saved(a, [{**a[0], key: [*LP[:2], -2.5]}], "jsonl")
        assert v.status is Status.FAIL and (v.first_bad.request, v.first_bad.position, v.first_bad.token) == ("a", 2, 7)
        assert saved(a, [{"request_id": "a", "token_ids": [5, 6, 7], "logprobs": LP}], "jsonl").status is Status.PASS
        assert saved(a, [dict(a[0])], "jsonl").status is Status.PASS

    @pytest.mark.parametrize("suffix", ["jsonl", "json", "pt"])
    @pytest.mark.parametrize("key", ["request_id", "id", "uid", "index"])
    def test_the_order_of_records_is_nothing(self, saved, suffix, key):
        a = [{key: i, "token_ids": [i, 6, 7], "logprobs": LP} for i in range(3)]
        assert saved(a, a[::-1], suffix).status is Status.PASS
        v = saved(a, [{**r, "logprobs": [-9.0, *LP[1:]]} if r[key] == 1 else r for r in a[::-1]], suffix)
        assert v.status is Status.FAIL and (v.first_bad.request, v.first_bad.position) == ("1", 0)
        if key == "uid":  # of a prompt, for all its samples: names no request
            assert saved([{**r, key: 0} for r in a], [{**r, key: 0} for r in a], suffix).status is Status.PASS

    def test_a_record_that_is_there_twice(self, saved):
        a = [{"id": i, "token_ids": [i, 6, 7], "logprobs": LP} for i in range(3)]
        v = saved(a, [*a, a[1]], "jsonl")
        assert v.status is Status.INVALID and v.first_bad.request == "1" and v.causes[0].kind == "duplicate"

    @pytest.mark.parametrize("suffix", ["json", "pt"])
    def test_a_rollout_with_prompt_and_response_in_one_list(self, saved, suffix):
        one = {"index": 0, "tokens": [1, 2, 5, 6, 7], "response_length": 3, "rollout_log_probs": LP, "loss_mask": [1, 1, 1], "prompt": "x"}
        a = {"rollout_id": 3, "samples": [one, {**one, "index": 1, "tokens": [1, 2, 8, 6, 7]}]}
        assert saved(a, {**a, "samples": a["samples"][::-1]}, suffix).status is Status.PASS
        v = saved(a, {**a, "samples": [one, {**a["samples"][1], "rollout_log_probs": [-0.5, -1.0, -2.0]}]}, suffix)
        assert v.status is Status.FAIL and (v.first_bad.request, v.first_bad.position, v.first_bad.token) == ("1", 3, 6)
        v = saved(a, {**a, "samples": [{**one, "tokens": [1, 3, 5, 6, 7]}, a["samples"][1]]}, suffix)
        assert v.status is Status.FAIL and (v.first_bad.request, v.first_bad.position) == ("0", 1)

    def test_masks_of_records(self, saved):
        assert saved([row(loss_mask=[0, 1, 1])], [row(loss_mask=[0, 1, 1], logprobs=[-9.0, *LP[1:]])], "jsonl").status is Status.PASS
        v = saved([row(loss_mask=[1, 1, 1])], [row(loss_mask=[1, 0, 1])], "jsonl")
        assert v.status is Status.FAIL and (v.first_bad.tensor, v.first_bad.request, v.first_bad.position) == ("mask", "a", 1)

    def test_fields_that_nothing_compares_are_named_with_their_difference(self, saved):
        v = saved([row(weight_version=1, reward=2)], [row(weight_version=2, reward=2)], "jsonl")
        assert v.status is Status.PASS and v.info["not_compared"] == ["reward", "weight_version"] and v.info["differ_too"] == ["weight_version"]
        assert "weight_version" in v.reason.partition("not the same")[2]

    @pytest.mark.parametrize("values", [[{"5": -0.5}] * 3, {"content": [{"logprob": -0.5}]}, ["-0.5"] * 3, "ab"])
    def test_log_probs_that_are_objects_or_text(self, saved, values):
        v = saved([row(logprobs=values)], [row(logprobs=values)], "jsonl")
        assert v.status is Status.INVALID and "a list of numbers, one a token" in v.reason

    def test_records_and_tensors_are_two_kinds(self, saved):
        v = saved([row()], {"token_ids": torch.tensor([5, 6, 7]), "logprobs": torch.tensor(LP)}, "jsonl", "safetensors")
        assert v.status is Status.INVALID and "two of one kind" in v.reason


class TestDumps:
    def test_padded_batches_with_several_log_probs_and_masks(self, saved):
        ids, lp = torch.arange(20).reshape(2, 10), -torch.arange(1.0, 9).reshape(2, 4)
        mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
        a = {"input_ids": ids, "responses": ids[:, 6:].contiguous(), "rollout_log_probs": lp, "old_log_probs": lp.clone(),
             "attention_mask": torch.ones(2, 10, dtype=torch.int64), "response_mask": mask}  # fmt: skip
        padding = lp - (1 - mask)
        v = saved(a, {**a, "old_log_probs": padding, "rollout_log_probs": padding.clone()}, "safetensors")
        assert v.status is Status.PASS and v.coverage["tokens"].compared == 10 and "3 of 8 places are masked" in v.reason
        v = saved(a, {**a, "rollout_log_probs": lp - torch.tensor([[0, 0, 0, 0], [0, 0.5, 0, 0]])}, "safetensors")
        assert v.status is Status.FAIL and "rollout_log_probs" in v.reason and (v.first_bad.row, v.first_bad.position, v.first_bad.token) == (1, 1, 17)

    @pytest.mark.parametrize("suffix", ["json", "pt"])
    def test_text_is_named_as_not_compared(self, saved, suffix):
        a = {"layers.0.output": [1.0, 2.0], "text": "one", "tags": ["x"], "none": None}
        v = saved(a, {**a, "text": "two"}, suffix)
        assert v.status is Status.PASS and v.info["not_compared"] == ["none", "tags", "text"] and v.info["differ_too"] == ["text"] and "text" in v.reason
        assert saved(a, {**a, "none": [1.0]}, suffix).status is Status.INVALID

    @pytest.mark.parametrize("suffix", ["json", "pt"])
    @pytest.mark.parametrize("names", [("layers.0.output",), ("token_ids", "logprobs")])
    def test_plain_numbers_take_the_dtype_of_the_other_side(self, saved, suffix, names):
        x = torch.tensor([-0.1, -0.7, -2.0]).bfloat16()
        a = {n: [1, 2, 3] if n == "token_ids" else x.tolist() for n in names}
        b = {n: torch.tensor([1, 2, 3]) if n == "token_ids" else x for n in names}
        assert saved(a, b, suffix, "safetensors").status is Status.PASS
        rounded = {n: v if n == "token_ids" else [round(y, 3) for y in v] for n, v in a.items()}
        assert saved(rounded, b, suffix, "safetensors").status is Status.FAIL

    def test_true_is_no_number(self):
        assert [s.dtype for s in as_pair(True, 1)] == ["bool", "int64"] and [s.dtype for s in as_pair([1], [1.0])] == ["float64"] * 2

    def test_a_dtype_that_numpy_has_no_name_for(self, saved):
        a = {"layers.0.output": torch.arange(8.0).bfloat16().view(torch.uint16).numpy().view("V2")}
        assert "name the true dtype in a mapping file" in saved(a, a, "npz").reason
        rules = {"dtypes": {"layers.0.output": "bfloat16"}}
        assert saved(a, {n: v.copy() for n, v in a.items()}, "npz", rules_a=rules, rules_b=rules).status is Status.PASS
        b = {"layers.0.output": torch.arange(1.0, 9).bfloat16().view(torch.uint16).numpy().view("V2")}
        assert saved(a, b, "npz", rules_a=rules, rules_b=rules).status is Status.FAIL

    @pytest.mark.parametrize("tensor", [torch.ones(1).expand(1 << 40), torch.nested.nested_tensor([torch.ones(3), torch.ones(2)])], ids=["expanded", "nested"])
    def test_tensors_that_hold_less_or_other_than_they_say(self, saved, tensor):
        v = saved({"a": tensor}, {"a": tensor})
        assert v.status is Status.INVALID and "a " in v.reason

    @pytest.mark.parametrize(("file", "said"), [("rank0.pt", "but .pt"), ("__0_0.distcp", "convert_torch_dist_to_hf")])
    def test_a_folder_of_other_files(self, tmp_path, file, said):
        for side in "ab":
            (tmp_path / side).mkdir()
            (tmp_path / side / file).write_bytes(b"x")
        v = compare_runs(tmp_path / "a", tmp_path / "b")
        assert v.status is Status.INVALID and said in v.reason
