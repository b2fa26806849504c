"""Word problems: generation, reading, and what a bad line gets."""
from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rl.tiny import write_jsonl
from vime.rl import data
from vime.rl.reward import gate_reward, math_reward, reward


def test_generated_problems_are_solved_and_do_not_depend_on_their_number():
    many = data.generate(300, seed=3)
    assert data.generate(7, seed=3) == many[:7]
    assert data.generate(7, seed=4) != many[:7]
    assert len({p.prompt_id for p in many}) == 300
    for p in many:
        step = p.answer.splitlines()[0]
        left, right = step.split(" = ")
        assert eval(left) == int(right) == int(p.target)
        assert int(p.target) >= 0


def test_what_is_written_is_read_again(tmp_path):
    problems = data.generate(5)
    write_jsonl(problems, tmp_path / "made.jsonl")
    found = data.load(tmp_path / "made.jsonl")
    assert [(p.question, p.answer) for p in found] == [(p.question, p.answer) for p in problems]


def test_parquet_and_folders(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [{"question": f"{i}?", "answer": f"so\n#### 1,{i}00"} for i in range(3)]
    (tmp_path / "main").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "main" / "train-00000-of-00001.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:1]), tmp_path / "main" / "test-00000-of-00001.parquet")
    assert [p.target for p in data.load(tmp_path)] == ["1000", "1100", "1200"]


@pytest.mark.parametrize(("line", "message"), [
    ({"question": "q?"}, r"bad.jsonl, line 2: field 'answer' is missing \(found: question; expected: question, answer\)"),
    ({"prompt": "q?", "answer": "#### 1"}, r"line 2: field 'question' is missing \(found: answer, prompt"),
    ({"question": "", "answer": "#### 1"}, "line 2: field 'question' is '', expected text"),
    ({"question": "q?", "answer": 42}, "line 2: field 'answer' is 42, expected text"),
    ({"question": "q?", "answer": "forty-two"}, "line 2: field 'answer' has no final line like '#### 42'"),
    ([1], "line 2: found list, expected an object"),
    ({"question": "q \ud83d?", "answer": "#### 1"}, r"bad.jsonl, line 2: field 'question' holds '\\ud83d' at character 3, half of a surrogate pair"),
    ({"question": "q?", "answer": "\udc00\n#### 1"}, r"line 2: field 'answer' holds '\\udc00' at character 1"),
    ({"question": "q?", "answer": f"#### -{'9' * 309}"}, r"line 2: the number after #### in field 'answer' ends in \.\.\.'9+' and is too large"),
])
def test_a_bad_line_is_named(tmp_path, line, message):
    good = json.dumps({"question": "q?", "answer": "#### 1"})
    (tmp_path / "bad.jsonl").write_text(f"{good}\n{json.dumps(line)}\n")
    with pytest.raises(data.DataError, match=message):
        data.load(tmp_path / "bad.jsonl")


def test_what_is_no_data_is_told(tmp_path):
    with pytest.raises(data.DataError, match="does not exist"):
        data.load(tmp_path / "none.jsonl")
    with pytest.raises(data.DataError, match="holds no data file"):
        data.load(tmp_path)
    (tmp_path / "x.jsonl").write_text("{not json\n")
    with pytest.raises(data.DataError, match=r"x\.jsonl, line 1: not JSON"):
        data.load(tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").write_bytes('{"question": "1?", "answer": "#### 1"}\n{"question": "café", "answer": "#### 1"}\n'.encode("latin-1"))
    with pytest.raises(data.DataError, match=r"x\.jsonl, line 2: byte 0xe9 at column 18 is not UTF-8"):
        data.load(tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").write_text("\n")
    with pytest.raises(data.DataError, match="holds no line"):
        data.load(tmp_path / "x.jsonl")
    (tmp_path / "y.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(data.DataError, match=r"y\.parquet cannot be read as parquet"):
        data.load(tmp_path / "y.parquet")


def test_the_largest_number_and_a_whole_surrogate_pair_are_taken(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"question": "\U0001f600?", "answer": f"#### {'1' * 308}"}))
    (problem,) = data.load(tmp_path / "x.jsonl")
    assert problem.question == "\U0001f600?" and math_reward(problem, f"#### {'9' * 400}") == 0.1


@pytest.mark.parametrize(("value", "message"), [
    ("9" * 5000, r"x\.jsonl, line 2: cannot be read \(Exceeds the limit \(4300 digits\).*expected question and answer as text"),
    ("[" * 200000, r"x\.jsonl, line 2: cannot be read \(.*expected question and answer as text"),
], ids=["digits", "brackets"])
def test_json_that_python_does_not_read_is_named(tmp_path, value, message):
    good = json.dumps({"question": "q?", "answer": "#### 1"})
    (tmp_path / "x.jsonl").write_text(f'{good}\n{{"question": "q?", "answer": {value}}}\n')
    with pytest.raises(data.DataError, match=message):
        data.load(tmp_path / "x.jsonl")


def test_parquet_whose_text_is_not_utf8_is_named(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"question": pa.array([b"caf\xe9"]).view(pa.string()), "answer": ["#### 1"]}), tmp_path / "x.parquet")
    with pytest.raises(data.DataError, match=r"x\.parquet cannot be read as parquet: .*utf-8"):
        data.load(tmp_path / "x.parquet")


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "x.jsonl").write_text("{}\n")

    def denied(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(data, "open", denied, raising=False)  # a superuser may read every file
    with pytest.raises(data.DataError, match=r"x\.jsonl cannot be read: Permission denied; expected"):
        data.load(tmp_path / "x.jsonl")


def test_files_of_one_name_have_ids_of_their_own_and_the_others_keep_theirs(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_jsonl(data.generate(2), tmp_path / folder / "train.jsonl")
    write_jsonl(data.generate(1), tmp_path / "a" / "train-more.jsonl")
    ids = [p.prompt_id for p in data.load(tmp_path)]
    assert ids == ["train-more.jsonl-1", "a/train.jsonl-1", "a/train.jsonl-2", "b/train.jsonl-1", "b/train.jsonl-2"]
    assert [p.prompt_id for p in data.load(tmp_path / "b")] == ["train.jsonl-1", "train.jsonl-2"]


@pytest.mark.parametrize(("text", "expected"), [
    ("so 12 and then 7", "7"), ("#### 1,200", "1200"), ("-3.50", "-3.5"), ("it is 42.", "42"), ("none", None), ("7.0", "7"),
])
def test_last_number(text, expected):
    assert data.last_number(text) == expected


def test_rewards():
    problem = data.Problem("p", "q", "#### 40")
    right, close, far, silent = (math_reward(problem, r) for r in ("#### 40", "about 41", "-1000000", "I do not know"))
    assert right == pytest.approx(1.2) and right > close > far >= silent == 0.0
    assert math_reward(problem, "it is 40") == pytest.approx(1.1)
    with pytest.raises(ValueError, match="unknown reward"):
        reward("nice", problem, "", 0)


@given(st.text(max_size=30), st.integers(2, 8))
def test_gate_rewards_vary_within_every_group_by_construction(response, samples):
    for problem in data.generate(8):
        assert len({gate_reward(problem, response, s) for s in range(samples)}) > 1
