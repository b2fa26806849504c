"""Routes Megatron's operations into ``vime.ops``, each alone or all together, on any Megatron model.

Nothing numeric is here. ``install`` replaces the names that Megatron looks up (see :mod:`vime.megatron.routes`) and
returns what puts them back. A guard around the model's ``forward`` refuses what can't be aligned before it runs.
"""
from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterable
from typing import Any

from vime.contract import OPS
from vime.errors import how_to_install
from vime.fp8 import FP8
from vime.megatron import check, te
from vime.megatron.patch import (
    HookPoint,
    MissingHookPoint,
    Patches,
    Refused,
    counters,
    expected,
    reset_counters,
)
from vime.megatron.routes import ROUTES
from vime.megatron.routes.logprob import token_logprobs

__all__ = ["COVERED", "MissingHookPoint", "Refused", "assert_active", "counters", "install", "reset_counters", "token_logprobs"]

#: Operations that can be switched on here, in the order of the contract. ``sampling`` has no part in Megatron: it is
#: listed because the trainer states what it expects of the engine.
COVERED = tuple(op for op in OPS if op in ROUTES or op == "sampling")

_GUARDED = ("megatron.core.models.gpt.gpt_model:GPTModel", "megatron.core.transformer.transformer_block:TransformerBlock")


_inside: contextvars.ContextVar[Any] = contextvars.ContextVar("vime_inside", default=None)  # decoder of the model that runs


def _guard(enabled: frozenset[str]) -> Callable[[Any], Any]:
    def make(stock: Any) -> Any:
        @functools.wraps(stock)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self is _inside.get():  # a part of the model that was checked a moment ago
                return stock(self, *args, **kwargs)
            check.prepare(self, enabled)
            token = _inside.set(getattr(self, "decoder", None))
            try:
                return stock(self, *args, **kwargs)
            finally:
                _inside.reset(token)

        return forward

    return make


def _guard_layer(stock: Any) -> Any:
    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        check.require_checked(self)
        return stock(self, *args, **kwargs)

    return forward


def _refuse_parallel_state() -> None:
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return
    for name, size in (("tensor", parallel_state.get_tensor_model_parallel_world_size()),
                       ("context", parallel_state.get_context_parallel_world_size())):
        if size > 1:
            raise Refused(f"{name} parallel size is {size}; vime aligns {name} parallel size 1 only. Spread over data "
                          "parallel ranks instead.")


def install(ops: Iterable[str]) -> Callable[..., None]:
    """Route these operations; all of them, or none if one fails.

    Args:
        ops: names out of :data:`COVERED`; ``fp8`` beside them for linear layers in block FP8.

    Returns:
        ``uninstall(whole=False)``, idempotent: :meth:`vime.megatron.patch.Patches.remove`.

    Raises:
        Refused: an unknown operation, an operation whose Megatron route does not exist yet, tensor or context
            parallelism, or (:class:`MissingHookPoint`) a Megatron that lacks a name.
    """
    asked = list(dict.fromkeys(ops))
    wanted = [op for op in asked if op != FP8]
    unknown = [op for op in wanted if op not in OPS]
    if unknown:
        raise Refused(f"unknown operation(s) {', '.join(map(repr, unknown))}; known: {', '.join(OPS)}")
    enabled = frozenset(op for op in asked if op in ROUTES or op == FP8)
    unrouted = [op for op in wanted if op not in COVERED]
    if unrouted:
        raise Refused(f"{', '.join(unrouted)} has no route in Megatron yet; exclude it on both sides")
    points = [point for op in COVERED if op in enabled for point in ROUTES[op].hook_points()]
    if enabled:
        points += te.hook_points(enabled)
        points += [HookPoint(owner, "forward", _guard(enabled)) for owner in _GUARDED]
        points.append(HookPoint("megatron.core.transformer.transformer_layer:TransformerLayer", "forward", _guard_layer))
        try:
            _refuse_parallel_state()
        except ImportError as error:
            raise MissingHookPoint(f"megatron-core can't be imported ({error}); to install it run {how_to_install()}") from error
    return Patches(points).remove


def assert_active(ops: Iterable[str]) -> None:
    """Raise AssertionError naming each of ``ops`` whose route has not run since :func:`reset_counters`.

    An installed route proves nothing: the model may have gone another way. ``moe`` may be idle where no model with
    experts has run. Without ``ops`` nothing can have run through vime, so that is an AssertionError too.
    """
    ops, ran = tuple(ops), counters()
    if not ops:
        raise AssertionError("no operation is active, so nothing ran through vime; expected at least one. Call vime.enable() before the "
                             "model runs, and this before vime.disable() or the end of the vime.enabled() block.")
    idle = [op for op in ops if (op in ROUTES or op == FP8) and not ran.get(op) and (op != "moe" or expected("moe"))]
    if idle:
        raise AssertionError(f"installed, but never ran: {', '.join(idle)} (ran: {ran or 'nothing'}). The model did not go "
                             "through Megatron's own modules for it.")
