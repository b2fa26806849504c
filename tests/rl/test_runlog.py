"""What the ledger writes: one changed bit changes the digest of its quantity and of no other, and is named by its part."""
from __future__ import annotations

import contextlib
import copy
import json
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment import runlines, runlog, runs
from alignment.runlog import QUANTITIES
from alignment.verdict import Cause, Coverage, Place, Status, Verdict
from tests.rl.tiny import write_checkpoint
from vime.commands import train
from vime.rl import earlier
from vime.rl.batch import Trajectory
from vime.rl.config import TrainConfig
from vime.rl.loop import StepResult
from vime.rl.runlog import RunLog, short

FACTS = {"topology": {"ranks": 1}, "recipe": {"lr": 1}, "versions": {"v": 1}, "hardware": {"cpu": "x"}, "conditions": {}, "resumed_from": None}


def material():
    """One step of two prompts and two samples each, as the loop hands it to the ledger."""
    batch = [Trajectory(f"s0/p{p}/{s}", f"p{p}", s, [1 + p, 2, 3, 4 + s, 5], 3, np.array([-1.5, -0.25], np.float32), 0, seed=7 + 2 * p + s,
                        reward=0.5 * s, advantage=s - 0.5) for p in range(2) for s in range(2)]
    stats = types.SimpleNamespace(loss=0.125, grad_norm=2.0, grad_norm_bits="4000000000000000", gradients={"w": "xxh3:1", "v": "xxh3:2"},
                                  composition=[["s0/p0/0", "s0/p0/1"], ["s0/p1/0", "s0/p1/1"]], digest_s=0.0)
    update = types.SimpleNamespace(trainer={"w": "a", "v": "b"}, engine={"w": "a", "v": "b"})
    states = [{"optimizer": {"m": "xxh3:3", "": "xxh3:4"}, "rng": {"torch": "xxh3:5", "python": "xxh3:6"}}]
    return types.SimpleNamespace(prompts=[("p0", None), ("p1", None)], batch=batch, logprobs=[t.rollout_logprobs.copy() for t in batch],
                                 stats=[stats], update=update, states=states)


def write(folder, m):
    log = RunLog(str(folder))
    log.start(FACTS)
    log.begin_step()
    log.rollout(m.prompts, m.batch)
    log.scored(m.batch, m.logprobs)
    log.trained(m.stats, m.update, m.states)
    log.end_step(0, True, {"reward": 0.5, "loss": float("nan")}, {"engine": ["k"]}, 1)
    log.end(1, "PASS", "")
    log.close()
    return folder


def next_float(array, at):
    array[at] = np.nextafter(array[at], np.float32(0))


CHANGES = {
    "seeds": lambda m: setattr(m.batch[1], "seed", 99), "sampled_tokens": lambda m: m.batch[2].token_ids.__setitem__(4, 6),
    "rollout_logprobs": lambda m: next_float(m.batch[3].rollout_logprobs, 1), "train_logprobs": lambda m: next_float(m.logprobs[0], 0),
    "rewards": lambda m: setattr(m.batch[1], "reward", np.nextafter(0.5, 0)), "advantages": lambda m: setattr(m.batch[0], "advantage", -0.50001),
    "batch_composition": lambda m: m.stats[0].composition[1].reverse(), "loss": lambda m: setattr(m.stats[0], "loss", np.nextafter(0.125, 0)),
    "gradients": lambda m: m.stats[0].gradients.__setitem__("v", "xxh3:9"), "grad_norm": lambda m: setattr(m.stats[0], "grad_norm_bits", "4000000000000001"),
    "optimizer": lambda m: m.states[0]["optimizer"].__setitem__("m", "xxh3:9"),
    "engine_weights": lambda m: m.update.engine.__setitem__("v", "c"), "rng": lambda m: m.states[0]["rng"].__setitem__("python", "xxh3:9"),
    "prompts": lambda m: m.prompts.reverse(),
    "weights": lambda m: (m.update.trainer.__setitem__("w", "c"), m.update.engine.__setitem__("w", "c")),
}
#: The part that is named, where the quantity has parts.
PARTS = {"seeds": "s0/p0/1", "sampled_tokens": "s0/p1/0", "rollout_logprobs": "s0/p1/1", "train_logprobs": "s0/p0/0", "rewards": "s0/p0/1",
         "advantages": "s0/p0/0", "batch_composition": "rank 0, microbatch 1", "gradients": "v", "optimizer": "m", "weights": "w",
         "engine_weights": "v", "rng": "python"}


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_one_change_is_found_in_its_quantity_and_part_and_in_no_other(tmp_path, quantity):
    changed = copy.deepcopy(material())
    CHANGES[quantity](changed)
    verdict = runs.compare(write(tmp_path / "a", material()), write(tmp_path / "b", changed))
    expected = {"weights": ["weights", "engine_weights"]}.get(quantity, [quantity])
    step = next(c for c in verdict.children if c.name == "step 0")
    assert step.info["differing"] == expected
    place = verdict.first_bad
    assert place.stage == quantity
    if quantity in PARTS:
        assert PARTS[quantity] in (place.request, place.tensor, place.module)


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(4)))
def test_the_order_in_which_samples_are_held_is_no_quantity_but_that_of_the_batch(tmp_path_factory, order):
    m = material()
    m.batch, m.logprobs = [m.batch[i] for i in order], [m.logprobs[i] for i in order]
    folder = tmp_path_factory.mktemp("order")
    a, b = (runlog.read(write(folder / name, x)).steps[0]["digests"] for name, x in (("a", material()), ("b", m)))
    assert a == b


def test_a_line_holds_every_quantity_and_what_it_cost(tmp_path):
    read = runlog.read(write(tmp_path, material()))
    assert read.problems == [] and set(read.steps[0]["digests"]) == set(QUANTITIES)
    assert 0 < read.steps[0]["cost"]["ledger_s"] <= read.steps[0]["cost"]["step_s"] and 0 < read.end["cost"]["share"] <= 1
    assert read.steps[0]["metrics"]["loss"] == "nan"  # strict JSON has no NaN


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("", material())
    assert list(tmp_path.iterdir()) == []


def said(status="PASS", step=0):
    return Verdict(f"logprobs after update {step}", Status(status), "" if status == "PASS" else "they differ", coverage={"tokens": Coverage(6, 6)},
                   first_bad=None if status == "PASS" else Place(step=step, request="s0/p0/0", position=3), causes=[Cause("stale", "an old cache")])


def test_a_verdict_in_a_line_counts_as_the_one_it_was():
    verdict = said("FAIL", 1)
    verdict.coverage["tokens"] = Coverage(np.int64(6), np.int64(6))
    verdict.first_bad = Place(step=1, position=np.int64(3), index=(np.int64(2), 1))
    verdict.stats["max"], verdict.children, verdict.downstream = float("nan"), [said()], [Place(tensor="w")] * 3
    back = Verdict.from_dict(runlog.parse(runlog.line({"kind": "step", "v": short(verdict)})[:-1])["v"])
    assert (back.name, back.status, back.reason, str(back.coverage["tokens"]), back.cause) == (verdict.name, Status.FAIL, "they differ", "6/6", "an old cache")
    assert back.first_bad == Place(step=1, position=3, index=(2, 1)) and not back.children and not back.downstream


class Killed(BaseException):
    pass


class Steps:
    """A loop whose steps have given verdicts, and which a kill ends right after the ledger's line of a step."""

    verdicts: tuple = ()
    first_step, killed_at, loss = 0, -1, 0.5

    def __init__(self, config, session, problems, progress, record_layers_at, log):
        self.config, self.log = config, log
        log.start({**FACTS, "resumed_from": self.first_step if log.continued else None})

    def run(self):
        for step in range(self.first_step, self.config.num_rollout):
            m, metrics = material(), {"tokens": 6, "loss": self.loss + step}
            self.log.begin_step()
            self.log.rollout(m.prompts, m.batch)
            self.log.scored(m.batch, m.logprobs)
            self.log.trained(m.stats, m.update, m.states)
            verdict = said(self.verdicts[step], step)
            self.log.end_step(step, True, metrics, {}, step + 1, [verdict])
            if step == self.killed_at:
                raise Killed
            yield StepResult(step, True, {**metrics, "seconds": {"rollout": 0.25 + self.first_step}}, [verdict], [])


@pytest.fixture
def go(tmp_path, monkeypatch):
    """``go(verdicts, first_step, killed_at, folder)``: one part of a run; its verdict, or None where it was killed."""
    model = write_checkpoint(tmp_path / "model")
    monkeypatch.setattr(train, "Session", lambda *args: contextlib.nullcontext(types.SimpleNamespace(fingerprint="", left_out="")))
    monkeypatch.setattr(train, "describe", lambda result: "a step")
    (tmp_path / "ck" / "step-000001").mkdir(parents=True)

    def part(verdicts, first_step=0, killed_at=-1, folder="run", steps=4):
        monkeypatch.setattr(train, "Loop", type("Loop", (Steps,), {"verdicts": verdicts, "first_step": first_step, "killed_at": killed_at}))
        ck = str(tmp_path / "ck")
        config = TrainConfig(str(model), num_rollout=steps, save=ck, load=ck, ops=(), output_dir=str(tmp_path / folder))
        with contextlib.suppress(Killed):
            return train.run(config)[0]
        return None

    return part


def metrics_in(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("status", ["FAIL", "NOT_RUN", "INVALID"])
def test_a_run_that_was_not_green_before_a_restart_does_not_end_as_pass(tmp_path, go, status):
    assert go(("PASS", status, "PASS"), killed_at=2) is None
    assert [m["step"] for m in metrics_in(tmp_path / "run")] == [0, 1]
    verdict = go(("PASS",) * 4, first_step=3)  # the checkpoint after step 2 was written, its metrics were not
    assert verdict.status is Status(status) and verdict.exit_code != 0 and verdict.first_bad.step == 1
    assert str(verdict.coverage["tokens"]) == "24/24"
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["verdict"] == status and [s["step"] for s in report["steps"]] == [0, 1, 2, 3]
    ledger = runlog.read(tmp_path / "run")
    assert ledger.end["verdict"] == status and ledger.end["reason"] == verdict.reason and not ledger.problems
    assert [(m["step"], m["loss"], m.get("seconds")) for m in metrics_in(tmp_path / "run")] == [
        (0, 0.5, {"rollout": 0.25}), (1, 1.5, {"rollout": 0.25}), (2, 2.5, None), (3, 3.5, {"rollout": 3.25})]


def test_a_step_that_is_done_again_replaces_its_verdict_and_metrics(tmp_path, go):
    go(("PASS", "PASS", "FAIL"), killed_at=2)
    assert go(("PASS",) * 4, first_step=1, killed_at=1) is None
    assert go(("PASS",) * 4, first_step=2).status is Status.PASS
    assert [(m["step"], m["loss"]) for m in metrics_in(tmp_path / "run")] == [(s, 0.5 + s) for s in range(4)]
    assert go(("PASS",) * 4, first_step=4).green  # and a run that is over is judged by what it did
    assert len(metrics_in(tmp_path / "run")) == 4


def test_metrics_are_json_where_a_number_is_none(tmp_path, go, monkeypatch):
    """Strictly, as they are read after a restart: else what the ledger does not hold of that step would be lost."""
    monkeypatch.setattr(Steps, "loss", float("nan"))
    go(("PASS",) * 2, killed_at=1, steps=2)
    go(("PASS",) * 2, first_step=1, steps=2)
    lines = [runlines.parse(line) for line in (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines()]
    assert [(m["loss"], m["seconds"]["rollout"]) for m in lines] == [("nan", 0.25), ("nan", 1.25)]


def test_steps_that_nobody_judged_are_not_run(tmp_path, go):
    go(("PASS",) * 3, killed_at=2)
    file = tmp_path / "run" / runlog.FILE
    whole = file.read_bytes().split(b"\n")
    line = runlog.parse(whole[2])
    changed = {"an earlier version wrote it": {k: v for k, v in line.items() if k not in ("sum", "verdicts")},
               "has only a comparison of step 1": {**line, "trained": False},
               "have a form that this version does not know": {**line, "verdicts": [{"verdict": "GREEN"}]}}
    for text, body in changed.items():
        file.write_bytes(b"\n".join([*whole[:2], runlog.line(body)[:-1], *whole[3:]]))
        verdict = go(("PASS",) * 4, first_step=3)
        assert verdict.status is Status.NOT_RUN and text in verdict.reason and verdict.reason.startswith("step 1: "), verdict.reason
    file.write_bytes(b"\n".join([*whole[:2], whole[2][:-9], *whole[3:]]))
    assert "the ledger has no line of step 1" in go(("PASS",) * 4, first_step=3).reason


def test_a_run_that_goes_on_in_another_folder_says_from_which_step_it_is_judged(tmp_path, go):
    verdict = go(("PASS",) * 4, first_step=2, folder="elsewhere")
    assert verdict.green and verdict.reason.startswith("from step 2 on: ")
    assert [m["step"] for m in metrics_in(tmp_path / "elsewhere")] == [2, 3]
    log = RunLog("")
    assert earlier.steps(log, 2) == []


def test_two_runs_are_not_compared_by_their_verdicts(tmp_path):
    def one(name, status):
        m, log = material(), RunLog(str(tmp_path / name))
        log.start(FACTS)
        log.begin_step()
        log.rollout(m.prompts, m.batch)
        log.scored(m.batch, m.logprobs)
        log.trained(m.stats, m.update, m.states)
        log.end_step(0, True, {}, {}, 1, [said(status)])
        log.end(1, "PASS", "")
        log.close()
        return tmp_path / name

    verdict = runs.compare(one("a", "PASS"), one("b", "FAIL"))
    assert verdict.status is Status.PASS, verdict.summary()
