"""The report: everything that matters is in it, nothing hostile gets through, nothing is loaded from elsewhere."""
from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from alignment import pictures, report
from alignment.verdict import Cause, Coverage, Place, Verdict, combine
from tests.report import samples

VOID = {"meta", "br", "rect", "line", "path", "circle", "img"}


class Page(HTMLParser):
    """Well-formedness, and every tag and attribute that was seen."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_page_shows_what_matters():
    page = Page(report.html(samples.run(), facts={"environment": {"OMP_NUM_THREADS": "2"}}))
    assert not page.stack
    text = " ".join("".join(page.text).split())
    for words in ("FAIL", "INVALID", "NOT_RUN", "tokens 4096/4096", "layer 12, module mlp", "1.12x", "7 GPU(s) visible",
                  "rounded through bf16", "EP gather", "cpu/linear/avx512-bf16@1", "OMP_NUM_THREADS", "one ulp",
                  "cache hits", "2 of 2 planted faults caught"):
        assert words in text, words


def test_page_loads_nothing():
    text = report.html(samples.run())
    assert not re.search(r"https?://|url\(|@import|//cdn", text)
    page = Page(text)
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert not {"src", "href", "action"} & {k for k, _ in page.attributes}


def hostile(name: str) -> Verdict:
    verdict = Verdict(name, "FAIL", name, tier=name, coverage={name: Coverage(1, 1)},
                      first_bad=Place(tensor=name, module=name, request=name), causes=[Cause(name, name)],
                      stats={name: name}, info={name: name, "nodeid": name, "happened": {name: name},
                                                "contract": {name: name},
                                                "controls": [{"name": name, "caught": False, "planted": name,
                                                              "verdict": name, "first_bad": name}]})
    pictures.attach(verdict, pictures.heat(name, [name], [name], [[1]], name, name, name),
                    pictures.series(name, [name], {name: [0.5]}, [True], name, name),
                    pictures.ledger(name, [name], {name: {name: "first"}}))
    return verdict


def test_hostile_names_are_text():
    page = Page(report.html(combine(samples.HOSTILE, [hostile(samples.HOSTILE)]), facts={samples.HOSTILE: {"a": 1}}))
    assert page.tags.count("script") == 1 and "img" not in page.tags
    assert not any(k.startswith("on") for k, _ in page.attributes)
    assert "{{7*7}}" in "".join(page.text) and "\x1b" not in "".join(page.text)
    out = io.StringIO()
    report.terminal(hostile(samples.HOSTILE + "[bold]x[/bold]"), Console(file=out, width=200))
    assert "\x1b" not in out.getvalue() and "[bold]x" in out.getvalue()


@settings(deadline=None, max_examples=30)
@given(st.text(min_size=1, max_size=40))
def test_any_name(name):
    page = Page(report.html(hostile(name)))
    assert not page.stack and page.tags.count("script") == 1


def test_terminal_is_one_screen():
    out = io.StringIO()
    many = combine("gates", [Verdict(f"g{i}", "PASS", coverage={"t": Coverage(1, 1)}) for i in range(200)] + [samples.layers()])
    report.terminal(many, Console(file=out, width=110))
    text = out.getvalue()
    assert len(text.splitlines()) <= 26
    for words in ("FAIL", "layerwise", "first bad: layer 12", "cause: rounded through bf16", "17 further place"):
        assert words in text
    assert "more" in text


def test_json_round_trip_and_strictness():
    whole = samples.run()
    whole.stats["max"] = float("inf")
    data = json.loads(report.to_json(whole, complete=True), parse_constant=lambda c: pytest.fail(f"not strict: {c}"))
    assert {"verdict", "coverage", "first_bad", "cause", "complete"} <= data.keys()
    assert data["stats"]["max"] == "inf"
    assert Verdict.from_dict(data).to_dict()["children"] == whole.to_dict()["children"]


def test_page_of_a_stored_verdict():
    verdict = pictures.attach(Verdict("x", "FAIL"), pictures.heat("h", [0, 1], [0], [[float("nan")], [2]]))
    again = Verdict.from_dict(json.loads(report.to_json(verdict)))
    assert 'class="sbad first"' in report.html(again)


def test_heat_map_never_loses_a_differing_token():
    values = [[0] * 5000 for _ in range(400)]
    values[399][4999] = 1
    values[3][17] = float("nan")
    picture = pictures.heat("big", range(400), range(5000), values)
    assert len(picture["columns"]) <= pictures.MAX_COLUMNS and len(picture["rows"]) == pictures.MAX_ROWS
    assert picture["values"][picture["rows"].index("399")][-1] == 1
    assert "3" in picture["rows"]
    assert picture["notes"] == ["32 tokens a cell", "200 equal layer(s) not shown"]
    assert len(report.html(pictures.attach(Verdict("x", "FAIL"), picture))) < 8_000_000


def test_series_keeps_the_differing_points():
    differs = [i == 4321 for i in range(5000)]
    picture = pictures.series("s", range(5000), {"a": [0.0] * 5000}, differs)
    assert sum(picture["differs"]) == 1 and len(picture["x"]) <= pictures.MAX_POINTS + 1
    assert picture["differing"] == 1 and picture["total"] == 5000


@pytest.mark.parametrize("make", [
    lambda: pictures.heat("t", [0], [0, 1], [[1]]),
    lambda: pictures.series("t", [0], {"a": [1, 2]}, [False]),
    lambda: pictures.ledger("t", ["s"], {"w": {"s": "fine"}}),
])
def test_pictures_of_another_form_are_refused(make):
    with pytest.raises(ValueError, match="'t'"):
        make()


def test_empty_pictures_can_be_drawn():
    verdict = Verdict("x", "NOT_RUN")
    pictures.attach(verdict, pictures.heat("h", [], [], []), pictures.series("s", [], {"a": []}, []),
                    pictures.ledger("l", [], {}))
    assert not Page(report.html(verdict)).stack
