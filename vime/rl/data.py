"""Word problems with an answer that can be checked.

Without a data set at hand the project makes its own, in GSM8K's layout (``question``, ``answer`` whose last line is
``#### 42``), from a counter: problem ``i`` of seed ``s`` is the same everywhere. A GSM8K file or folder (parquet or
JSON lines) can take its place.

Layout: Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021.
"""
from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from vime.errors import BadInput
from vime.rl.seeds import kept_hash

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_FINAL = re.compile(r"####\s*(\S.*?)\s*$", re.MULTILINE)
_SUFFIXES = (".jsonl", ".json", ".parquet")


class DataError(BadInput):
    """A data file is missing or unreadable, or has a line without the fields or with text or a number that cannot be used."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One prompt. ``prompt_id`` names it for seeds and records, ``target`` is the number after ``####``."""

    prompt_id: str
    question: str
    answer: str

    @property
    def target(self) -> str:
        return final_answer(self.answer) or ""


def final_answer(text: str) -> str | None:
    """The normalised number after the last ``####``, or None."""
    marked = _FINAL.findall(text)
    return normalise(marked[-1]) if marked else None


def last_number(text: str) -> str | None:
    """The normalised last number of ``text``, or None."""
    found = _NUMBER.findall(text)
    return normalise(found[-1]) if found else None


def normalise(number: str) -> str | None:
    """``"1,200.00"`` -> ``"1200"``; None if there is no number in it."""
    match = _NUMBER.search(number)
    if match is None:
        return None
    value = float(match.group().replace(",", ""))
    return str(int(value)) if value.is_integer() else repr(value)


# Each template: the question, the step that solves it, and what that step gives; a >= b + c, so nothing is negative.
_TEMPLATES = (
    ("{n} has {a} {t} and buys {b} more. How many {t} does {n} have now?", "{a} + {b} = {r}", lambda a, b, c: a + b),
    ("{n} has {a} {t} and gives away {b}. How many {t} are left?", "{a} - {b} = {r}", lambda a, b, c: a - b),
    ("There are {b} boxes with {c} {t} in each. How many {t} are there in all?", "{b} * {c} = {r}", lambda a, b, c: b * c),
    ("{n} had {a} {t}, found {b} and lost {c}. How many {t} does {n} have?", "{a} + {b} - {c} = {r}", lambda a, b, c: a + b - c),
    ("{n} reads {c} pages a day for {b} days. How many pages is that?", "{c} * {b} = {r}", lambda a, b, c: b * c),
)
_NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana")
_THINGS = ("apples", "books", "coins", "marbles", "pencils", "shells", "stamps")


def generate(count: int, seed: int = 0) -> list[Problem]:
    """``count`` problems of ``seed``. Problem ``i`` does not depend on ``count``."""
    problems = []
    for i in range(count):
        def pick(label: str, size: int, i: int = i) -> int:
            return kept_hash("problem", seed, i, label) % size

        text, step, solve = _TEMPLATES[pick("template", len(_TEMPLATES))]
        b, c = 2 + pick("b", 9), 2 + pick("c", 9)
        a = b + c + pick("a", 40)
        words = {"n": _NAMES[pick("name", len(_NAMES))], "t": _THINGS[pick("thing", len(_THINGS))], "a": a, "b": b, "c": c}
        result = solve(a, b, c)
        problems.append(Problem(f"made-{seed}-{i}", text.format(**words), f"{step.format(r=result, **words)}\n#### {result}"))
    return problems


def load(source: str | Path) -> list[Problem]:
    """Problems of a file or a folder. Raises :class:`DataError` naming file, line and field."""
    path = Path(source)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in _SUFFIXES)
        train = [p for p in files if "train" in p.name]  # GSM8K ships train and test side by side
        files = train or files
        if not files:
            raise DataError(f"{path} holds no data file; expected *.jsonl or *.parquet with the fields question and answer")
    elif path.is_file():
        files = [path]
    else:
        raise DataError(f"data {path} does not exist; expected a .jsonl or .parquet file in GSM8K's layout, or a folder of such")
    times = Counter(file.name for file in files)  # a name that is there once stays the whole name: seeds are derived from it
    problems = [problem for file in files for problem in _read(file, file.name if times[file.name] == 1 else file.relative_to(path).as_posix())]
    if not problems:
        raise DataError(f"{path} holds no line; expected at least one with the fields question and answer")
    return problems


def _read(file: Path, name: str) -> Iterator[Problem]:
    """The problems of one file; ``name`` is its part of their ids."""
    for line, row in _rows(file):
        where = f"{file}, line {line}"
        if not isinstance(row, dict):
            raise DataError(f"{where}: found {type(row).__name__}, expected an object with the fields question and answer")
        for field in ("question", "answer"):
            if field not in row:
                found = ", ".join(sorted(map(str, row))) or "none"
                raise DataError(f"{where}: field {field!r} is missing (found: {found}; expected: question, answer)")
            if not isinstance(row[field], str) or not row[field].strip():
                raise DataError(f"{where}: field {field!r} is {row[field]!r}, expected text that is not empty")
            try:
                row[field].encode()
            except UnicodeEncodeError as error:
                raise DataError(f"{where}: field {field!r} holds {row[field][error.start]!r} at character {error.start + 1}, half of a surrogate "
                                "pair, which is no text; expected a whole character: write it anew or take it out") from None
        target = final_answer(row["answer"])
        if target is None:
            raise DataError(f"{where}: field 'answer' has no final line like '#### 42' (found ...{row['answer'][-40:]!r})")
        if not math.isfinite(float(target)):
            raise DataError(f"{where}: the number after #### in field 'answer' ends in ...{row['answer'].rstrip()[-20:]!r} and is too large for a "
                            "float64; expected one below 1.8e308 in size: correct it or take the line out")
        yield Problem(f"{name}-{line}", row["question"], row["answer"])


def _rows(file: Path) -> Iterator[tuple[int, object]]:
    if file.suffix == ".parquet":
        try:
            import pyarrow
            import pyarrow.parquet as parquet
        except ImportError:
            raise DataError(f"{file} is parquet and pyarrow is not installed; do: pip install pyarrow, or give JSON lines") from None
        try:
            rows = parquet.read_table(file).to_pylist()
        except (OSError, ValueError, pyarrow.ArrowException) as error:  # ValueError: text in it is not UTF-8
            raise DataError(f"{file} cannot be read as parquet: {error}") from None
        yield from enumerate(rows, 1)
        return
    try:
        with open(file, "rb") as lines:
            for number, raw in enumerate(lines, 1):
                if raw.strip():
                    yield number, _parse(raw, f"{file}, line {number}")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}; expected a file of JSON lines that this user may read") from None


def _parse(raw: bytes, where: str) -> object:
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte 0x{raw[error.start]:02x} at column {error.start + 1} is not UTF-8; save the file as "
                        "UTF-8") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno}); expected one object a line") from None
    except (ValueError, RecursionError) as error:  # JSON, but with more digits or brackets than Python reads
        raise DataError(f"{where}: cannot be read ({str(error).partition(';')[0]}); expected question and answer as text: take the rest out, "
                        "or the line") from None
