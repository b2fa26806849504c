"""``vime compare`` through its command function: one process a case would cost seconds each."""
from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from vime.cli import app


def run(*args) -> tuple[int, dict]:
    result = CliRunner().invoke(app, ["compare", *map(str, args), "--json"])
    return result.exit_code, json.loads(result.stdout) if result.stdout.strip().startswith("{") else {}


@pytest.fixture
def two(tmp_path):
    x = {"layers.0.output": torch.ones(3, 4), "layers.1.output": torch.arange(12.0).reshape(3, 4)}

    def write(change=None):
        y = {n: t.clone() for n, t in x.items()}
        if change is not None:
            change(y)
        save_file(x, tmp_path / "a.safetensors")
        save_file(y, tmp_path / "b.safetensors")
        return tmp_path / "a.safetensors", tmp_path / "b.safetensors"

    return write


def test_pass(two):
    code, out = run(*two())
    assert code == 0 and out["verdict"] == "PASS" and out["coverage"]["layers"] == {"compared": 2, "expected": 2}
    assert out["first_bad"] is None and out["cause"] is None


def test_fail_has_place_and_cause(two):
    code, out = run(*two(lambda y: y["layers.1.output"].mul_(2)))
    assert code == 1 and out["verdict"] == "FAIL"
    assert out["first_bad"]["tensor"] == "layers.1.output" and out["first_bad"]["layer"] == 1 and "layers.1" in out["first_bad"]["text"]
    assert "times 2" in out["cause"]


def test_invalid(two):
    a, b = two(lambda y: y["layers.0.output"].fill_(float("nan")))
    assert run(b, b)[0] == 10
    assert run(a, b)[0] == 1
    b.write_bytes(b.read_bytes()[:-3])
    code, out = run(a, b)
    assert code == 10 and "truncated" in out["reason"]


def test_not_run(tmp_path):
    save_file({}, tmp_path / "e.safetensors")
    code, out = run(tmp_path / "e.safetensors", tmp_path / "e.safetensors")
    assert code == 11 and out["verdict"] == "NOT_RUN"


def test_tier(two):
    pair = two(lambda y: y["layers.0.output"].add_(2e-7))
    assert run(*pair)[0] == 1
    code, out = run(*pair, "--tier", "1e-6")
    assert code == 0 and out["tier"] == "1e-6"


@pytest.mark.parametrize("args", [("--tier", "loose"), ("--kind", "pictures"), ("--map", "nothing.json")])
def test_wrong_usage(two, args):
    from vime.errors import WRONG_USAGE, exit_code_of

    result = CliRunner().invoke(app, ["compare", *map(str, two()), *args])
    assert result.exit_code == WRONG_USAGE or (result.exception is not None and exit_code_of(result.exception) == WRONG_USAGE)


def test_a_mapping_file_that_holds_null_is_no_missing_one(two, tmp_path):
    from vime.errors import WRONG_USAGE, exit_code_of

    (tmp_path / "null.json").write_text("null")
    for option in ("--map", "--map-b"):
        result = CliRunner().invoke(app, ["compare", *map(str, two()), option, str(tmp_path / "null.json")])
        assert result.exception is not None and exit_code_of(result.exception) == WRONG_USAGE and "holds null" in str(result.exception)


def test_logprobs_beside_other_tensors(tmp_path):
    base = {"token_ids": torch.tensor([[5, 6, 7]]), "logprobs": torch.tensor([[-0.1, -0.2, -0.3]]), "values": torch.ones(1, 3)}
    save_file(base, tmp_path / "a.safetensors")
    save_file({**base, "values": torch.zeros(1, 3)}, tmp_path / "b.safetensors")
    code, out = run(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert code == 1 and out["first_bad"]["tensor"] == "values"  # what lies beside the log-probs counts too
    save_file({**base, "token_ids": torch.tensor([[5, 6, 8]])}, tmp_path / "b.safetensors")
    code, out = run(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert code == 1 and out["first_bad"]["position"] == 2


def test_jsonl(tmp_path):
    rows = [{"request_id": "r1", "token_ids": [1, 2], "logprobs": [-0.5, -0.25]}, {"request_id": "r2", "token_ids": [3], "logprobs": [-1.0]}]
    for name, content in (("a", rows), ("b", rows[::-1]), ("c", [rows[0], rows[0]])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, content)))
    assert run(tmp_path / "a.jsonl", tmp_path / "b.jsonl")[0] == 0  # matched by request, not by order
    assert run(tmp_path / "a.jsonl", tmp_path / "c.jsonl")[0] == 10
