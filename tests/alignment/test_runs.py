"""Two ledgers: what differs first is named, and what cannot be compared is never green. Ledgers are made by hand."""
from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment import runlog, runs
from alignment.errors import InputError
from alignment.runlog import QUANTITIES
from alignment.verdict import Status

START = {"kind": "start", "schema": 1, "topology": {"ranks": 1}, "recipe": {"lr": 0.1, "model": "m"}, "versions": {"torch": "2.13"},
         "hardware": {"cpu": "x"}, "conditions": {"folder": "a", "arrival": "given"}, "resumed_from": None}


def step_of(number, quantities=QUANTITIES):
    return {"kind": "step", "step": number, "digests": {q: f"xxh3:{number}-{q}" for q in quantities},
            "parts": {q: {"x": f"{number}{q}", "y": "1"} for q in quantities}, "numbers": {"loss": 0.5}, "kernels": {"engine": ["k"]}}


def lines_of(steps=3, **start):
    return [{**START, **start}, *(step_of(i) for i in range(steps)), {"kind": "end", "steps": steps, "verdict": "PASS"}]


def write(path, lines, tail=b""):
    path.write_bytes(b"".join(runlog.line(x) for x in lines) + tail)
    return path


def compared(tmp_path, a, b, **options):
    return runs.compare(write(tmp_path / "a.jsonl", a), write(tmp_path / "b.jsonl", b), **options)


def test_equal_ledgers_pass_with_their_coverage(tmp_path):
    verdict = compared(tmp_path, lines_of(), lines_of())
    assert verdict.status is Status.PASS
    assert str(verdict.coverage["steps"]) == "3/3" and str(verdict.coverage["quantities"]) == f"{3 * len(QUANTITIES)}/{3 * len(QUANTITIES)}"


@settings(max_examples=60, deadline=None)
@given(st.sets(st.tuples(st.integers(0, 3), st.sampled_from(QUANTITIES)), min_size=1, max_size=6))
def test_the_first_difference_in_the_order_of_causation_is_named(tmp_path_factory, faults):
    a, b = lines_of(4), copy.deepcopy(lines_of(4))
    for number, quantity in faults:
        b[1 + number]["digests"][quantity] += "!"
        b[1 + number]["parts"][quantity]["y"] = "2"
    verdict = compared(tmp_path_factory.mktemp("runs"), a, b)
    step, quantity = min(faults, key=lambda f: (f[0], QUANTITIES.index(f[1])))
    assert verdict.status is Status.FAIL
    assert (verdict.first_bad.step, verdict.first_bad.stage) == (step, quantity)
    assert "y" in (verdict.first_bad.request, verdict.first_bad.tensor, verdict.first_bad.module)
    assert {(p.step, p.stage) for p in verdict.downstream} == faults - {(step, quantity)}


def test_a_gradient_comes_before_the_token_it_led_to(tmp_path):
    b = copy.deepcopy(lines_of())
    b[2]["digests"]["gradients"] = b[3]["digests"]["sampled_tokens"] = b[3]["digests"]["prompts"] = "xxh3:other"
    verdict = compared(tmp_path, lines_of(), b)
    assert (verdict.first_bad.step, verdict.first_bad.stage) == (1, "gradients")
    assert verdict.causes[0].kind == "add_order"


@pytest.mark.parametrize(("field", "value", "word"), [
    ("recipe", {"lr": 0.2, "model": "m"}, "lr 0.1 in A, 0.2 in B"), ("recipe", {"lr": 0.1}, "model 'm' in A, None in B"),
    ("topology", {"ranks": 2}, "ranks 1 in A, 2 in B"), ("versions", {"torch": "2.14"}, "--across versions"),
    ("hardware", {"cpu": "y"}, "--across hardware")])
def test_other_runs_are_not_compared(tmp_path, field, value, word):
    verdict = compared(tmp_path, lines_of(), lines_of(**{field: value}))
    assert verdict.status is Status.INVALID and f"different {field}" in verdict.reason and word in verdict.reason
    assert verdict.coverage["steps"].compared == 0


def test_across_versions_compares_and_says_so(tmp_path):
    other = lines_of(versions={"torch": "2.14"})
    verdict = compared(tmp_path, lines_of(), other, across=["versions"])
    assert verdict.status is Status.PASS and verdict.reason.startswith("across versions (torch '2.13' in A, '2.14' in B)")
    other[3]["digests"]["loss"] = "f64:1"
    verdict = compared(tmp_path, lines_of(), other, across=["versions"])
    assert verdict.status is Status.FAIL and verdict.reason.startswith("across versions") and verdict.first_bad.step == 2
    with pytest.raises(InputError, match="across recipe; expected some of versions, hardware"):
        compared(tmp_path, lines_of(), other, across=["recipe"])


def test_ledgers_of_different_length_say_so(tmp_path):
    """Also where the shorter one's last check stands beside a training step of the longer one."""
    short = lines_of()
    for check in (False, True):
        if check:
            short.insert(-1, {**step_of(3, QUANTITIES[:7]), "trained": False})
        verdict = compared(tmp_path, short, lines_of(5))
        assert verdict.status is Status.INVALID and "every step: A ended after 3 steps, B after 5" in verdict.reason, verdict.reason
        verdict = compared(tmp_path, lines_of(5), short)
        assert verdict.status is Status.INVALID and "A ended after 5 steps, B after 3" in verdict.reason
    verdict = compared(tmp_path, short, lines_of(4))
    assert verdict.status is Status.INVALID and "A ended after 3 steps, B after 4; run both" in verdict.reason
    other = lines_of(5)
    other[4]["digests"]["rewards"] = "xxh3:other"
    verdict = compared(tmp_path, short, other)
    assert verdict.status is Status.FAIL and (verdict.first_bad.step, verdict.first_bad.stage) == (3, "rewards")


def test_a_training_step_beside_a_check_is_not_hidden_where_both_say_one_length(tmp_path):
    short = lines_of()
    short[3] = {**step_of(2, QUANTITIES[:7]), "trained": False}
    verdict = compared(tmp_path, short, lines_of())
    assert verdict.status is Status.INVALID and "batch composition is recorded on one side only" in verdict.reason


@pytest.mark.parametrize("cut", [1, 7, 30, 200])
def test_a_truncated_ledger_is_recognised_wherever_it_is_cut(tmp_path, cut):
    whole = write(tmp_path / "a.jsonl", lines_of()).read_bytes()
    (tmp_path / "b.jsonl").write_bytes(whole[:-cut])
    verdict = runs.compare(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert verdict.status is Status.INVALID, verdict.summary()
    assert "truncated" in verdict.reason or "cut" in verdict.reason


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_changed_byte_is_green(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("bytes")
    whole = write(folder / "a.jsonl", lines_of()).read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1:]
    (folder / "b.jsonl").write_bytes(changed)
    assert not runs.compare(folder / "a.jsonl", folder / "b.jsonl").green


def test_an_unfinished_an_empty_and_a_missing_ledger(tmp_path):
    verdict = compared(tmp_path, lines_of(), lines_of()[:-1])
    assert verdict.status is Status.INVALID and "no end line: the run stopped after step 2" in verdict.reason
    verdict = compared(tmp_path, lines_of(), [])
    assert verdict.status is Status.INVALID
    assert any("empty: no step was recorded" in c.reason for c in verdict.children)
    with pytest.raises(InputError, match=r"holds no ledger; expected ledger.jsonl"):
        runs.compare(tmp_path / "a.jsonl", tmp_path / "none")


def test_a_step_twice_and_a_missing_step(tmp_path):
    twice = lines_of()
    twice.insert(2, step_of(0))
    assert "step 0 is there twice" in compared(tmp_path, lines_of(), twice).reason
    gap = lines_of()
    del gap[2]
    verdict = compared(tmp_path, gap, gap)
    assert verdict.status is Status.INVALID and "step 1 is missing" in verdict.reason


def test_two_runs_in_one_ledger(tmp_path):
    verdict = compared(tmp_path, lines_of(), lines_of() + lines_of())
    assert verdict.status is Status.INVALID and any("starts another run" in c.reason for c in verdict.children)


def test_a_part_of_another_recipe_is_no_continuation(tmp_path):
    lines = [*lines_of()[:2], {**START, "resumed_from": 1, "recipe": {"lr": 9}}, *lines_of()[2:]]
    verdict = compared(tmp_path, lines_of(), lines)
    assert verdict.status is Status.INVALID and "goes on with another recipe" in verdict.reason


def test_one_and_the_same_ledger_is_no_comparison(tmp_path):
    path = write(tmp_path / "a.jsonl", lines_of())
    assert runs.compare(path, path).status is Status.NOT_RUN


def test_more_steps_on_one_side(tmp_path):
    verdict = compared(tmp_path, lines_of(3), lines_of(2))
    assert verdict.status is Status.INVALID and "step 2 is in A only" in verdict.reason


def test_a_number_that_is_not_finite_proves_nothing(tmp_path):
    a = lines_of()
    a[1]["numbers"]["loss"] = "nan"
    verdict = compared(tmp_path, a, a)
    assert verdict.status is Status.INVALID and "loss is not finite" in verdict.reason


def continued(tail=b""):
    """A run that was killed in step 2, and went on from a checkpoint after step 1."""
    first = b"".join(runlog.line(x) for x in lines_of()[:3]) + tail
    second = [{**START, "resumed_from": 1}, step_of(1), step_of(2), lines_of()[-1]]
    return first + (b"\n" if tail else b"") + b"".join(runlog.line(x) for x in second)


@pytest.mark.parametrize("tail", [b"", b'{"kind":"step","st'])
def test_a_continued_run_is_one_run(tmp_path, tail):
    (tmp_path / "b.jsonl").write_bytes(continued(tail))
    verdict = runs.compare(write(tmp_path / "a.jsonl", lines_of()), tmp_path / "b.jsonl")
    assert verdict.status is Status.PASS, verdict.summary()
    assert bool(verdict.info["notes"]) == bool(tail)


def test_a_step_done_again_has_to_be_what_it_was(tmp_path):
    data = continued().split(b"\n")
    other = step_of(1)
    other["digests"]["train_logprobs"] = "xxh3:other"
    data[2] = runlog.line(other).rstrip()
    (tmp_path / "b.jsonl").write_bytes(b"\n".join(data))
    verdict = runs.compare(write(tmp_path / "a.jsonl", lines_of()), tmp_path / "b.jsonl")
    assert verdict.status is Status.FAIL and "done again" in verdict.reason and verdict.first_bad.stage == "train_logprobs"


def test_a_condition_that_did_not_move_was_not_tried(tmp_path):
    other = lines_of(conditions={"folder": "b", "arrival": "given"})
    assert compared(tmp_path, lines_of(), other, moved=["folder"]).status is Status.PASS
    verdict = compared(tmp_path, lines_of(), other, moved=["folder", "arrival"])
    assert verdict.status is Status.NOT_RUN and "'given' in both runs: it was not tried" in verdict.reason


@pytest.mark.parametrize(("condition", "key", "word"), [("concurrency", "in_flight", "as many requests were in flight in every step"),
                                                        ("arrival", "order", "requests were sent in one order in every step")])
def test_what_was_sent_decides_whether_requests_went_otherwise(tmp_path, condition, key, word):
    """And is no quantity: that it differs makes no difference between two runs."""
    def lines(value, *sent):
        made = lines_of(conditions={condition: value})
        for line, s in zip(made[1:], sent, strict=False):
            line["sent"] = {key: s}
        return made

    one = lines("x", 2, 2, 2)
    for other, status in ((lines("y", 2, 2, 2), Status.NOT_RUN), (lines("y", 2, 1, 2), Status.PASS), (lines("x", 1, 1, 1), Status.NOT_RUN)):
        verdict = compared(tmp_path, one, other, moved=[condition])
        assert verdict.status is status, verdict.summary()
    assert word in compared(tmp_path, one, lines("y", 2, 2, 2), moved=[condition]).reason
    assert "what was sent is recorded in no step of both" in compared(tmp_path, one, lines("y"), moved=[condition]).reason
    odd = lines("y", [1])
    assert compared(tmp_path, one, odd, moved=[condition]).status is Status.INVALID


def test_other_kernels_and_a_run_that_was_itself_red_are_causes(tmp_path):
    b = copy.deepcopy(lines_of())
    b[2]["digests"]["rollout_logprobs"], b[2]["kernels"] = "xxh3:other", {"engine": ["stock"]}
    b[-1] |= {"verdict": "FAIL", "reason": "logprobs after update 1"}
    kinds = [c.kind for c in compared(tmp_path, lines_of(), b).causes]
    assert kinds == ["engine", "kernels", "own_verdict"]
