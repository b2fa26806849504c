"""The same policy, the same numbers, to the bit: in Megatron training and in vLLM generation.

A training script needs this module only::

    import vime

    vime.enable()                     # route Megatron's operations into vime.ops
    with vime.enabled(exclude=("attention",)): ...
    vime.disable()

In vLLM the same operations are installed by an entry-point plugin, see :mod:`vime.vllm`. Importing this module
imports neither torch nor a framework.
"""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vime.contract import OPS, Contract, ContractMismatch
from vime.fp8 import FP8
from vime.fp8 import problem as _fp8_problem

__all__ = ["OPS", "Contract", "ContractMismatch", "assert_active", "disable", "enable", "enabled", "is_enabled", "is_fp8"]
__version__ = "0.1.0"

_lock = threading.RLock()
_active: frozenset[str] = frozenset()
_uninstall: Callable[..., None] | None = None  # kept until every name is back, so also with nothing active
_inside = 0  # enabled() blocks that run inside a place where something was active


def _chosen(ops: Iterable[str] | str | None, exclude: Iterable[str] | str, fp8: bool) -> frozenset[str]:
    if isinstance(ops, str):
        ops = (ops,)
    if isinstance(exclude, str):
        exclude = (exclude,)
    exclude = set(exclude)
    if ops is None:
        from vime.megatron.hooks import COVERED

        ops = COVERED
    for name in (*(ops := tuple(ops)), *exclude):
        if name not in OPS:
            raise ValueError(f"unknown operation {name!r}; known: {', '.join(OPS)}")
    chosen = frozenset(ops) - exclude
    if not fp8:
        return chosen
    if (problem := _fp8_problem(chosen, experts=False)) is not None:
        raise ValueError(problem)
    return chosen | {FP8}


def _switch(target: frozenset[str]) -> None:
    """Make exactly ``target`` active. If that fails, what was active before is active again.

    Switching everything off goes as far as it can instead: a name that somebody replaced after vime is left alone, all
    others are back and nothing counts as active. The next call takes care of what was left.
    """
    global _active, _uninstall
    with _lock:
        if target == _active and (target or _uninstall is None):
            return
        previous = _active
        if not target:
            _active = target
        if _uninstall is not None:
            _uninstall(whole=bool(target))
            _uninstall, _active = None, frozenset()
        if not target:
            return
        from vime.megatron import hooks

        try:
            _uninstall = hooks.install(target)
            _active = target
        except BaseException:
            if previous:
                _uninstall = hooks.install(previous)
                _active = previous
            raise


def enable(ops: Iterable[str] | str | None = None, *, exclude: Iterable[str] | str = (), fp8: bool = False, model: Any = None) -> None:
    """Route Megatron's operations into the shared ones. Afterwards exactly these are active.

    Args:
        ops: names out of :data:`OPS`, or None for every operation that is covered (``vime.megatron.hooks.COVERED``).
        exclude: names to leave stock. Leave the same ones out in the engine.
        fp8: linear layers inside decoder layers run their forward in block FP8 (:mod:`vime.fp8` says which); the backward is
            the ordinary one. Switch it on in the engine as well.
        model: a Megatron model to check now; otherwise each model is checked when it runs.

    Raises:
        ValueError: an unknown name, or ``fp8`` without the operation ``linear``.
        vime.megatron.Refused: something can't be aligned. What was active before stays active.
        RuntimeError: somebody replaced a name after vime, see :func:`disable`. What was active before stays active.

    Full recompute evaluates the forward again during the backward: keep vime enabled until that is done.

    With nothing active before, what :func:`assert_active` knows of earlier runs is forgotten.
    """
    chosen = _chosen(ops, exclude, fp8)
    with _lock:
        if chosen and not _active and not _inside:  # before the model is checked, which notes what it has a place for
            from vime.megatron.patch import reset_counters

            reset_counters()
    if model is not None:
        from vime.megatron import check

        check.prepare(model, chosen)
    _switch(chosen)


def disable() -> None:
    """Put Megatron's own operations back. Harmless if nothing is active.

    Raises:
        RuntimeError: somebody replaced a name after vime, which is named and left alone; all others are back. Undo that
            replacement and call this again.
    """
    _switch(frozenset())


def is_enabled(op: str | None = None) -> bool:
    """Whether any operation is active, or this one.

    Raises:
        ValueError: an unknown name.
    """
    if op is None:
        return bool(_active)
    if op not in OPS:
        raise ValueError(f"unknown operation {op!r}; known: {', '.join(OPS)}")
    return op in _active


def is_fp8() -> bool:
    """Whether linear layers run in block FP8."""
    return FP8 in _active


@contextlib.contextmanager
def enabled(ops: Iterable[str] | str | None = None, *, exclude: Iterable[str] | str = (), fp8: bool = False,
            model: Any = None) -> Iterator[None]:
    """:func:`enable` for a block; afterwards, also after an exception, what was active before is active again.

    Raises:
        RuntimeError: at the end, somebody replaced a name after vime. A block inside another one then leaves its own operations
            active, as :func:`enable` does; the outermost one does what :func:`disable` does.
    """
    global _inside
    with _lock:
        previous = _active
    enable(ops, exclude=exclude, fp8=fp8, model=model)
    with _lock:
        _inside += bool(previous)
    try:
        yield
    finally:
        try:
            _switch(previous)
        finally:
            with _lock:
                _inside -= bool(previous)


def active_ops() -> tuple[str, ...]:
    """The active operations, in the order of :data:`OPS`."""
    return tuple(op for op in OPS if op in _active)


def assert_active() -> None:
    """Raise AssertionError if an active operation was never evaluated through its route, or if none is active.

    Counted is what ran since something became active (:func:`enable`); blocks inside count together with what is around them.
    """
    from vime.megatron import hooks

    hooks.assert_active((*active_ops(), FP8) if is_fp8() else active_ops())
