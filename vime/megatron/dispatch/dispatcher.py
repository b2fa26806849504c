"""Slot-order dispatch behind Megatron's dispatcher interface.

``MoELayer`` calls the six methods in turn. The router's route gives expert ids and weights in slot order instead of a map
and probabilities over all experts. A first dispatch carries each token once to every rank that has one of its experts, a
second one the records of its routes; after the experts every route's row comes back alone, and the owner adds them in slot
order in fp32. The backward goes the same ways in reverse: the gradient of each (token, slot) row comes back alone, and the
owner adds these in slot order in fp32 with one rounding. Nothing of it depends on which experts share a rank.
"""
from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from vime import ops
from vime.megatron.dispatch import routes
from vime.megatron.dispatch.transport import ProcessGroupTransport, Transport
from vime.megatron.patch import Refused


@dataclasses.dataclass
class Exchange:
    """One forward through the experts: what each step left for the next, and for the backward."""

    transport: Transport
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor
    first_expert: int
    experts: int
    handle: Any = None
    order_R: torch.Tensor | None = None  # received routes, sorted for the experts
    counts_ES: torch.Tensor | None = None  # rows of each local expert from each rank of the group

    def send(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Both dispatches. Rows ``[R, H]`` of the routes that arrived, by (expert, source rank, token, slot)."""
        transport, tokens = self.transport, self.ids_TK.shape[0]
        owner_TK = self.ids_TK // self.experts
        needed_TR = torch.zeros(tokens, transport.size, dtype=torch.bool, device=x_TH.device)
        needed_TR.scatter_(1, owner_TK, True)
        rows_MH, _, _ = transport.dispatch(x_TH, needed_TR)
        sent = routes.records(x_TH, self.ids_TK, self.weights_TK, transport.rank)
        to_NR = torch.nn.functional.one_hot(owner_TK.reshape(-1), transport.size).bool()
        arrived, counts_S, self.handle = transport.dispatch(sent, to_NR)
        from_R = torch.repeat_interleave(torch.arange(transport.size), counts_S).to(arrived.device)
        rows_RH = rows_MH[routes.pair(arrived, from_R, len(rows_MH))]
        routes.check(arrived, from_R, rows_RH, transport.rank, self.first_expert, self.experts)
        local_R = (arrived[:, 3] - self.first_expert).long()
        # routes arrive by (source, token, slot); a stable sort by expert keeps that within each expert
        self.order_R = torch.sort(local_R, stable=True).indices
        place_R = local_R * transport.size + from_R
        self.counts_ES = torch.bincount(place_R, minlength=self.experts * transport.size).view(self.experts, transport.size)
        return rows_RH[self.order_R]

    def back(self, rows_RH: torch.Tensor) -> torch.Tensor:
        """The row of each route to its token's owner, ``[T, K, H]``."""
        arrived = torch.empty_like(rows_RH)
        arrived[self.order_R] = rows_RH
        tokens, slots = self.ids_TK.shape
        return self.transport.combine(arrived, self.handle).view(tokens, slots, rows_RH.shape[-1])

    def out(self, rows_TKH: torch.Tensor) -> torch.Tensor:
        """Rows of the owner's routes to the experts again, ``[R, H]``: the inverse of :meth:`back`."""
        return self.transport.again(rows_TKH.flatten(0, 1), self.handle)[self.order_R]


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.send(x_TH)

    @staticmethod
    def backward(ctx: Any, grad_RH: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        shares_TKH = ctx.exchange.back(grad_RH.contiguous())
        total = shares_TKH[:, 0].float()
        for slot in range(1, shares_TKH.shape[1]):
            total = total + shares_TKH[:, slot].float()
        return total.to(shares_TKH.dtype), None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RH: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.back(rows_RH.contiguous())

    @staticmethod
    def backward(ctx: Any, grad_TKH: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.exchange.out(grad_TKH), None


class SlotOrderDispatcher(MoETokenDispatcher):
    """Takes ids and weights in slot order from vime's router route, ``[T, K]`` each."""

    def __init__(self, num_local_experts: int, local_expert_indices: list[int], config: Any, pg_collection: Any,
                 transport: Transport | None = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.num_local_experts, self.local_expert_indices = num_local_experts, list(local_expert_indices)
        if self.tp_size > 1:
            raise Refused(f"expert tensor parallel size is {self.tp_size}; slot-order dispatch covers 1")
        self.transport = transport or ProcessGroupTransport(self.ep_group)
        self._now: Exchange | None = None
        self._shape = torch.Size()

    def dispatch_preprocess(self, hidden_states: torch.Tensor, routing_map: torch.Tensor,
                            probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._shape = hidden_states.shape
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        if routing_map.dtype != torch.int64 or probs.dtype != torch.float32 or probs.shape != routing_map.shape:
            raise Refused(f"slot-order dispatch got {routing_map.dtype} {tuple(routing_map.shape)} and {probs.dtype} "
                          f"{tuple(probs.shape)} instead of int64 expert ids and float32 weights in slot order; the router did not "
                          "run through vime's route: enable 'moe' or give the layer Megatron's own dispatcher")
        self._now = Exchange(self.transport, routing_map, probs, self.local_expert_indices[0], self.num_local_experts)
        return x_TH, probs

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _Send.apply(hidden_states, self._exchange), probs

    def dispatch_postprocess(self, hidden_states: torch.Tensor,
                             probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert self._exchange.counts_ES is not None
        return hidden_states, self._exchange.counts_ES, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _Back.apply(hidden_states, self._exchange)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        exchange, self._now = self._exchange, None
        return ops.combine_slots(hidden_states, exchange.weights_TK).view(self._shape)

    @property
    def _exchange(self) -> Exchange:
        if self._now is None:
            raise RuntimeError("slot-order dispatch was called out of turn; MoELayer calls dispatch_preprocess first")
        return self._now
