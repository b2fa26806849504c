"""The logic of ``vime explain`` on a pair of sides whose mismatch and cost are known."""
from __future__ import annotations

import io
import json
import time
import types

import numpy as np
import pytest
from rich.console import Console

from vime.commands import explain as command
from vime.errors import VimeError
from vime.explain import explain, show

OPS = ("linear", "norm", "rope", "activation")


class Sides:
    """Stands for :class:`gates.harness.Harness`: the trainer is off by the mismatch of each operation left stock."""

    off = {"linear": 0.3, "norm": 0.1, "rope": 0.0, "activation": 0.0}  # noqa: RUF012
    seconds = {"linear": 0.004, "norm": 0.0, "rope": 0.012, "activation": 0.006}  # noqa: RUF012
    together = ()  # operations that are harmless alone and differ when all of them are stock
    refuses = ()
    started: list = []  # noqa: RUF012

    def __init__(self, profile, device, dtype, *, ops):
        self.profile, self.ops = profile, ops

    def __enter__(self):
        if any(op not in self.ops for op in self.refuses):
            raise VimeError(f"cannot leave {self.refuses[0]} stock\nlong story")
        self.started.append(self.ops)
        return self

    def __exit__(self, *error):
        pass

    def requests(self, prompts, samples):
        return prompts * samples

    def generate(self, count):
        time.sleep(sum(self.seconds[op] for op in self.ops) + 0.004)
        return [types.SimpleNamespace(request_id=f"r{i}", prompt_token_ids=[1], token_ids=[2, 3], logprobs=[-1.0, -2.0],
                                      weight_version=0) for i in range(count)]

    def logprobs(self, samples):
        stock = [op for op in OPS if op not in self.ops]
        wrong = sum(self.off[op] for op in stock) + (0.7 if self.together and set(self.together) <= set(stock) else 0)
        return [{"request_id": s.request_id, "prompt_token_ids": [1], "token_ids": s.token_ids,
                 "logprobs": np.array(s.logprobs, dtype=np.float32) + np.float32(wrong)} for s in samples]


@pytest.fixture
def sides(monkeypatch):
    class Fresh(Sides):
        started: list = []  # noqa: RUF012

    monkeypatch.setattr("gates.harness.Harness", Fresh)
    return Fresh


def test_each_operation_gets_its_share(sides):
    said = []
    found = explain("dense-tiny", ops=OPS, say=said.append)
    assert found.verdict.green and found.off.differing == 16
    assert {r.stock[0]: r.differing for r in found.rows} == {"linear": 16, "norm": 16, "rope": 0, "activation": 0}
    costs = {r.stock[0]: r.cost for r in found.rows}
    assert costs["rope"] > costs["activation"] > 1.05
    assert len(said) >= 6 and "rope stock" in " ".join(said)


def test_the_cheapest_set_is_run_as_a_whole(sides):
    found = explain("dense-tiny", ops=OPS)
    assert found.cheapest == ("linear", "norm")
    assert ("linear", "norm") in sides.started
    sides.together = ("rope", "activation")
    found = explain("dense-tiny", ops=OPS)
    assert found.cheapest == ("linear", "norm", "activation")  # rope is the dearer of the two


def test_zero_out_of_reach(sides, monkeypatch):
    monkeypatch.setattr(sides, "logprobs", lambda self, samples: [
        {"request_id": s.request_id, "prompt_token_ids": [1], "token_ids": s.token_ids,
         "logprobs": np.array([-1.5, -2.0], dtype=np.float32)} for s in samples])
    found = explain("dense-tiny", ops=OPS)
    assert found.cheapest is None and not found.verdict.green
    out = io.StringIO()
    show(found, Console(file=out, width=110))
    assert "zero was not reached" in out.getvalue() and "first bad" in out.getvalue()


def test_a_refused_configuration_is_said(sides):
    sides.refuses = ("linear",)
    found = explain("dense-tiny", ops=OPS)
    refused = [r for r in found.rows if r.refused]
    assert [r.stock for r in refused] == [("linear",)] and found.off.refused
    out = io.StringIO()
    show(found, Console(file=out, width=110))
    assert "refused: cannot leave linear stock" in out.getvalue() and "long story" not in out.getvalue()


def test_a_small_input_and_few_operations(sides):
    found = explain("dense-tiny", ops=OPS, only=["rope", "norm"], prompts=1, samples=2, tokens=3, pairs=2)
    assert [r.stock for r in found.rows] == [("norm",), ("rope",)] and found.verdict.coverage["tokens"].expected == 4
    assert set(found.cheapest) == {"linear", "norm", "activation"}  # what was not tried stays aligned
    for row in [found.off, *found.rows]:
        assert row.spread[0] <= row.cost <= row.spread[1]


def test_a_stock_configuration_that_breaks_does_not_end_it(sides, monkeypatch):
    work = sides.logprobs

    def breaks(self, samples):
        if "norm" not in self.ops:
            raise ZeroDivisionError("stock is broken")
        return work(self, samples)

    monkeypatch.setattr(sides, "logprobs", breaks)
    found = explain("dense-tiny", ops=OPS, pairs=1)
    assert found.verdict.green and found.off.refused == "ZeroDivisionError: stock is broken"
    assert [r.refused for r in found.rows] == ["", "ZeroDivisionError: stock is broken", "", ""]


def test_json_and_screen(sides):
    found = explain("dense-tiny", ops=OPS)
    data = json.loads(json.dumps(found.to_dict()))
    assert {"verdict", "coverage", "first_bad", "cause", "cheapest", "leave_one_out"} <= data.keys()
    out = io.StringIO()
    show(found, Console(file=out, width=110))
    assert len(out.getvalue().splitlines()) < 16 and "cheapest set" in out.getvalue()


def test_bad_input(sides):
    with pytest.raises(VimeError, match="no profile"):
        explain("dense-tinny")
    with pytest.raises(VimeError, match="runs on cuda"):
        explain("dense-7b", device="cpu")
    with pytest.raises(VimeError, match="runs in bfloat16 on cuda, not in float32"):
        explain("smollm2-135m", device="cuda", dtype="float32")
    for wrong, text in (({"only": ["moe"]}, "moe is not an operation"), ({"prompts": 0}, "prompts is 0"), ({"pairs": -1}, "pairs is -1")):
        with pytest.raises(VimeError, match=text):
            explain("dense-tiny", ops=OPS, **wrong)
    with pytest.raises(VimeError, match="unknown operation"):
        explain("dense-tiny", ops=["linaer"])


def test_json_is_strict_where_a_number_is_none(monkeypatch, capsys):
    found = types.SimpleNamespace(to_dict=lambda: {"max_abs": float("nan"), "cost_spread": (1.0, float("inf"))}, verdict=types.SimpleNamespace(exit_code=10))
    monkeypatch.setattr("vime.explain.explain", lambda *args, **options: found)
    assert command.run("dense-tiny", "cpu", None, True, pairs=1) == 10
    assert json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) == {
        "max_abs": "nan", "cost_spread": [1.0, "inf"]}
