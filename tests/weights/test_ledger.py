"""The judge of ledgers, on ledgers made by hand: it names the first stage, shows permutations, and cannot be green by
comparing nothing."""
from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignment.errors import InputError
from alignment.ledger import Cell, Origin, judge, permutation, ranges
from alignment.verdict import Status
from vime.weights.ledger import Key, Ledger, chain
from vime.weights.raw import same_bits
from vime.weights.truth import corruptions

STAGES = ("a", "b", "c")
NAME = "decoder.layers.2.mlp.experts.local_experts.{}.linear_fc1.weight"


def expert_cells(stage, holds):
    return [Cell(stage, NAME.format(e), f"xxh3:{e}", f"xxh3:{h}", {"rank": 1}, 2, e) for e, h in enumerate(holds)]


def origin(cell):
    return Origin(NAME.format(cell.found[5:]), 2, int(cell.found[5:]))


def test_the_first_bad_stage_and_its_permutation():
    cells = [*expert_cells("a", range(8)), *expert_cells("b", [0, 1, 2, 3, 0, 1, 2, 3]), *expert_cells("c", [0] * 8)]
    verdict = judge("l", STAGES, cells, origin, experts_per_rank=4)
    assert verdict.status is Status.FAIL and verdict.first_bad.stage == "b" and verdict.first_bad.expert == 4
    assert verdict.causes[0].text == "experts 4..7 hold 0..3"
    assert [c.status for c in verdict.children] == [Status.PASS, Status.FAIL, Status.FAIL]
    assert verdict.coverage["entries"].compared == 24


def test_boundary_experts_come_first():
    cells = expert_cells("a", [0, 2, 1, 3, 4, 5, 6, 0])
    assert judge("l", STAGES, cells, origin, experts_per_rank=4).first_bad.expert == 7
    assert judge("l", STAGES, cells, origin).first_bad.expert == 1


def test_lost_and_surplus_entries_are_differences():
    for want, found, word in (("xxh3:1", None, "1 lost"), (None, "xxh3:1", "1 that belong to nobody")):
        verdict = judge("l", STAGES, [Cell("a", "w", want, found)])
        assert verdict.status is Status.FAIL and word in verdict.reason


def test_nothing_compared_is_not_green():
    assert judge("l", STAGES, []).status is Status.NOT_RUN


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(InputError, match="two digests of one form"):
        judge("l", STAGES, [Cell("a", "w", "xxh3:1", "lanes:1")])
    with pytest.raises(InputError, match="ledger stage 'z'"):
        judge("l", STAGES, [Cell("z", "w", "xxh3:1", "xxh3:1")])


@given(st.permutations(range(6)))
def test_permutations_are_written_completely(order):
    moved = [(cell, origin(cell)) for cell in expert_cells("a", order) if not cell.good]
    text = permutation(moved)
    if not moved:
        assert text is None
        return
    told = {}
    for part in text.split(" ", 1)[1].split(", "):
        experts, held = part.replace(" holds ", "|").replace(" hold ", "|").split("|")
        (a, b), (c, d) = (tuple(map(int, (x.split("..") * 2)[:2])) for x in (experts, held))
        assert b - a == d - c
        told |= {a + i: c + i for i in range(b - a + 1)}
    assert told == {e: h for e, h in enumerate(order) if e != h}


def test_ranges():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0..2, 5, 7..8"


def test_a_ledger_keeps_both_of_two_digests_and_slices_stacked_tensors():
    ledger = Ledger(stacked=["s"])
    ledger("a", {Key("s"): torch.arange(6.0).reshape(3, 2), Key("w", 1): torch.zeros(2)})
    assert set(ledger.entries["a"]) == {Key("s", 0), Key("s", 1), Key("s", 2), Key("w", 1)}
    first = ledger.entries["a"][Key("w", 1)]
    ledger("a", {Key("w", 1): torch.zeros(2)})
    assert ledger.entries["a"][Key("w", 1)] == first
    ledger("a", {Key("w", 1): torch.ones(2)})
    assert ledger.entries["a"][Key("w", 1)].endswith(f" after {first}")
    assert chain(None, None) is None


def test_host_and_device_digests_are_not_mixed_up():
    x = {Key("w"): torch.randn(3)}
    host, device = Ledger(), Ledger("device")
    host("a", x)
    device("a", x)
    assert host.entries["a"][Key("w")].partition(":")[0] != device.entries["a"][Key("w")].partition(":")[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_every_corruption_changes_the_bits_of_a_random_matrix(dtype):
    true = torch.randint(1, 90, (8, 8), generator=torch.Generator().manual_seed(1)).to(dtype)
    for kind, _, variant in corruptions(true):
        if kind != "laundered":  # small integers survive a narrower format
            assert not same_bits(variant, true), kind
