"""Slot-order dispatch: every route arrives and comes back unchanged, whatever carries it and however experts are spread."""
from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.megatron.threads import StandInBuffer, TableTransport, on_ranks
from vime import ops
from vime.megatron.dispatch import routes
from vime.megatron.dispatch.deepep import DeepEpTransport
from vime.megatron.dispatch.transport import ProcessGroupTransport

HIDDEN = 8
KINDS = {
    "table": lambda meeting, rank: TableTransport(meeting, rank),
    "deepep": lambda meeting, rank: DeepEpTransport(StandInBuffer(meeting, rank), rank, meeting.size),
    "deepep low latency": lambda meeting, rank: DeepEpTransport(StandInBuffer(meeting, rank), rank, meeting.size, 64),
}


@dataclasses.dataclass
class Case:
    """Tokens, ids and weights of eight owners; ``ranks`` share them out in order."""

    x: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    experts: torch.Tensor


def case(seed: int, owners: int, tokens: list[int], experts: int, slots: int, dtype: torch.dtype) -> Case:
    g = torch.Generator().manual_seed(seed)
    return Case([torch.randn(n, HIDDEN, generator=g).to(dtype) for n in tokens[:owners]],
                [torch.rand(n, experts, generator=g).argsort(1)[:, :slots] for n in tokens[:owners]],
                [torch.rand(n, slots, generator=g) for n in tokens[:owners]],
                torch.randn(experts, HIDDEN, HIDDEN, generator=g).to(dtype))


def through(c: Case, spread: int, kind: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and input gradients of every owner, with the experts spread over groups of ``spread`` owners."""
    from vime.megatron.dispatch.dispatcher import Exchange, _Back, _Send

    outputs, gradients = [], []
    for first in range(0, len(c.x), spread):
        local = len(c.experts) // spread

        def work(rank, meeting, first=first, local=local):
            owner = first + rank
            x = c.x[owner].clone().requires_grad_()
            exchange = Exchange(KINDS[kind](meeting, rank), c.ids[owner], c.weights[owner], rank * local, local)
            rows = _Send.apply(x, exchange)
            parts = [ops.linear(part, c.experts[rank * local + e])
                     for e, part in enumerate(rows.split(exchange.counts_ES.sum(1).tolist())) if len(part)]
            y = ops.combine_slots(_Back.apply(torch.cat(parts) if parts else rows, exchange), c.weights[owner])
            y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
            return y.detach(), x.grad

        for y, grad in on_ranks(spread, work):
            outputs.append(y)
            gradients.append(grad)
    return outputs, gradients


sizes = st.lists(st.integers(0, 5), min_size=8, max_size=8)


@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1000), tokens=sizes, slots=st.integers(1, 4), bf16=st.booleans())
def test_the_spread_does_not_show(kind, seed, tokens, slots, bf16):
    """Outputs and input gradients have the same bits at 1, 2, 4 and 8 ranks a group, ranks without tokens included."""
    c = case(seed, 8, tokens, 8, slots, torch.bfloat16 if bf16 else torch.float32)
    expected = through(c, 1, "table")
    for spread in (2, 4, 8):
        found = through(c, spread, kind)
        for mine, theirs in zip(found, expected, strict=True):
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(mine, theirs, strict=True))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), tokens=sizes, slots=st.integers(1, 4))
def test_against_float64(seed, tokens, slots):
    """The sum over slots and its gradient, computed plainly in float64 from the same inputs."""
    c = case(seed, 4, tokens, 8, slots, torch.float32)
    outputs, gradients = through(c, 4, "table")
    for x, ids, w, y, grad in zip(c.x, c.ids, c.weights, outputs, gradients, strict=True):
        x64 = x.double().requires_grad_()
        rows = torch.einsum("th,tkoh->tko", x64, c.experts.double()[ids])
        want = (rows * w.double()[:, :, None]).sum(1)
        want.backward(torch.linspace(-1, 1, want.numel()).view(want.shape).double())
        torch.testing.assert_close(y.double(), want.detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(grad.double(), x64.grad, atol=1e-5, rtol=1e-5)


def damaged(change) -> str:
    """The message of a route that ``change`` altered on its way from rank 1 to rank 2 of 4."""
    c = case(3, 4, [3] * 4, 8, 2, torch.bfloat16)
    c.ids = [torch.tensor([[4, 1], [6, 4], [5, 7]])] * 4
    from vime.megatron.dispatch.dispatcher import Exchange

    def work(rank, meeting):
        transport = TableTransport(meeting, rank, change if rank == 1 else None)
        Exchange(transport, c.ids[rank], c.weights[rank], rank * 2, 2).send(c.x[rank])

    with pytest.raises(routes.RouteDamaged) as caught:
        on_ranks(4, work)
    return str(caught.value)


def on_records(edit):
    def change(x):
        if x.dtype == torch.int32:
            x = x.clone()
            edit(x)
        return x

    return change


def test_a_damaged_route_is_named():
    def weight(x):
        x[2, 4] ^= 1  # token 1, slot 0: expert 6 on rank 3

    def expert(x):
        x[0, 3] = 5  # token 0, slot 0: 4 becomes 5, both on rank 2

    text = damaged(on_records(weight))
    assert "route of token 1, slot 0, expert 6 from rank 1 to rank 3" in text and "its fingerprint is" in text
    text = damaged(on_records(expert))
    assert "route of token 0, slot 0, expert 5 from rank 1 to rank 2" in text and "its fingerprint is" in text


def test_an_expert_that_is_not_here_is_named():
    def elsewhere(x):
        x[0, 3] = 1

    assert "expert 1 is not here: rank 2 holds 4 to 5" in damaged(on_records(elsewhere))


def test_a_changed_token_row_is_named():
    def change(x):
        if x.dtype == torch.bfloat16:
            x = x.clone()
            x.view(torch.int16)[0, 3] ^= 1
        return x

    assert "route of token 0, slot" in damaged(change)


def test_a_lost_or_repeated_token_is_told():
    records = routes.records(torch.ones(2, 4), torch.tensor([[0, 1], [1, 0]]), torch.ones(2, 2), 0)
    with pytest.raises(routes.RouteDamaged, match="1 token rows arrived for the routes of 2 different tokens"):
        routes.pair(records, torch.zeros(4), 1)


@settings(max_examples=50, deadline=None)
@given(bit=st.integers(0, 15), at=st.tuples(st.integers(0, 4), st.integers(0, HIDDEN - 1)), seed=st.integers(0, 99))
def test_any_flipped_bit_changes_the_row_hash(bit, at, seed):
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()
    y = x.clone()
    y.view(torch.int16)[at] ^= -32768 if bit == 15 else 1 << bit
    assert (routes.row_hash(x) != routes.row_hash(y)).nonzero().flatten().tolist() == [at[0]]


def test_rows_that_went_to_two_ranks_do_not_come_back():
    transport = ProcessGroupTransport()
    rows, _, handle = transport.dispatch(torch.ones(2, 3), torch.tensor([[True], [False]]))
    with pytest.raises(ValueError, match="2 rows went to 1 places"):
        transport.combine(rows, handle)


def test_low_latency_says_what_it_cannot_move():
    def too_many(rank, meeting):
        DeepEpTransport(StandInBuffer(meeting, rank), rank, 1, 4).dispatch(torch.ones(5, 8), torch.ones(5, 1, dtype=torch.bool))

    def too_wide(rank, meeting):
        DeepEpTransport(StandInBuffer(meeting, rank), rank, 1, 4).dispatch(torch.ones(2, 8192), torch.ones(2, 1, dtype=torch.bool))

    with pytest.raises(ValueError, match="5 rows are more than the 4"):
        on_ranks(1, too_many)
    with pytest.raises(ValueError, match="32768 bytes are wider"):
        on_ranks(1, too_wide)
