"""What planted faults are made of: something put in the place of a name, for good or while one module runs, and taken back."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vime.errors import BadInput

Undo = Callable[[], None]


class NoSuchFault(BadInput, ValueError):
    """A fault that does not exist, or that finds nothing to act on in this model."""


def swap(owner: Any, name: str, value: Any) -> Undo:
    """Put ``value`` in the place of ``owner.name``; returns what puts back what was there."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def while_runs(module: Any, owner: Any, name: str, value: Any) -> Undo:
    """:func:`swap` whenever ``module`` runs its forward and only then, also where it raises; returns what ends that."""
    undo: list[Undo] = []
    handles = [module.register_forward_pre_hook(lambda *_: undo.append(swap(owner, name, value))),
               module.register_forward_hook(lambda *_: undo.pop()(), always_call=True)]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end
