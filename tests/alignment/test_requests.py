"""Records of requests and dumps whose fields are of another form: never green, never a traceback."""
from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from alignment import diagnose
from alignment.compare import compare_runs
from alignment.verdict import Status

GOOD = [{"request_id": "q", "prompt_token_ids": [5], "token_ids": [6, 1], "logprobs": [-0.5, -0.25]},
        {"request_id": "r", "prompt_token_ids": [1], "token_ids": [1, 3], "logprobs": [-1.0, -2.0]}]


def verdict(tmp_path, change, both):
    other = [dict(row) for row in GOOD]
    other[1].update(change)
    for side, rows in (("a", other if both else GOOD), ("b", other)):
        (tmp_path / f"{side}.json").write_text(json.dumps(rows))
    return compare_runs(tmp_path / "a.json", tmp_path / "b.json")


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(("change", "says"), [
    ({"logprobs": [[-1.0], [-2.0]]}, "several shapes a token"),  # a column, where the other request has a row
    ({"logprobs": [[], []]}, "several shapes a token"),
    ({"logprobs": [-1.0, True]}, "true and false"), ({"token_ids": [True, 3]}, "true and false among numbers"),
    ({"prompt_token_ids": [True, 7]}, "true and false among numbers")])
def test_a_field_of_another_form_is_invalid(tmp_path, change, says, both):
    said = verdict(tmp_path, change, both)
    assert said.status is Status.INVALID and says in said.reason, said


def test_all_of_one_shape_are_compared(tmp_path):
    assert verdict(tmp_path, {}, True).green
    said = verdict(tmp_path, {"logprobs": [-1.0, -2.5]}, False)
    assert said.status is Status.FAIL and (said.first_bad.request, said.first_bad.token) == ("r", 3)


@pytest.mark.parametrize("form", ["list", "lines", "mapping"])
@pytest.mark.parametrize("both", [False, True])
def test_a_record_that_lost_its_tokens_is_no_list_of_numbers(tmp_path, form, both):
    other = [GOOD[0], {k: v for k, v in GOOD[1].items() if k != "token_ids"}]
    for side, rows in (("a", other if both else GOOD), ("b", other)):
        text = "\n".join(map(json.dumps, rows)) if form == "lines" else json.dumps(rows if form == "list" else dict(zip("qr", rows, strict=True)))
        (tmp_path / f"{side}.{'jsonl' if form == 'lines' else 'json'}").write_text(text)
    said = compare_runs(*sorted(tmp_path.iterdir()))
    assert said.status is Status.INVALID and "entry 1 of 2 has no token ids and others have" in said.reason, said


def test_one_number_is_not_the_log_probs_of_several_tokens(tmp_path):
    for side in "ab":
        save_file({"logprobs": torch.tensor(-1.0), "token_ids": torch.arange(6)}, tmp_path / f"{side}.safetensors")
    said = compare_runs(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert said.status is Status.INVALID and "logprobs is a single number beside 6 token ids" in said.reason


def test_a_selection_that_takes_one_twice_breaks_no_diagnosis(tmp_path):
    a, b = torch.tensor([[1, 1, 2]]), torch.tensor([[1, 2, 2]])
    assert diagnose.topk(a, b) is None and diagnose.topk(a, b, torch.rand(1, 4)) is None
    for side, ids in (("a", a), ("b", b)):
        save_file({"layers.0.topk_ids": ids}, tmp_path / f"{side}.safetensors")
    assert compare_runs(tmp_path / "a.safetensors", tmp_path / "b.safetensors").status is Status.FAIL
