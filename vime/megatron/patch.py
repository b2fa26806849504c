"""Replacing a name that Megatron looks up, and putting it back.

Hook points are found by name in the Megatron that is installed. One that is missing is an error at install time:
a route that silently routes nothing is the failure this project exists to prevent.
"""
from __future__ import annotations

import collections
import dataclasses
import importlib
from collections.abc import Callable, Iterable
from typing import Any

from vime.errors import VimeError


class Refused(VimeError):
    """vime can't align this. The message names what was found, where, and what to do."""


class MissingHookPoint(Refused):
    """The installed Megatron-core has no such name to route."""


@dataclasses.dataclass(frozen=True)
class HookPoint:
    """A name to replace.

    Attributes:
        owner: ``"package.module"`` or ``"package.module:Class"``.
        name: attribute of the owner.
        make: takes the stock attribute, returns the replacement.
    """

    owner: str
    name: str
    make: Callable[[Any], Any]

    def resolve(self) -> Any:
        """The owner object. Raises :class:`MissingHookPoint`."""
        module_name, _, class_name = self.owner.partition(":")
        try:
            owner = importlib.import_module(module_name)
            owner = getattr(owner, class_name) if class_name else owner
            getattr(owner, self.name)
        except (ImportError, AttributeError) as error:
            raise MissingHookPoint(
                f"megatron-core {megatron_version()} has no {self.owner}.{self.name} ({error}); vime routes 0.16.1 and "
                f"0.19.2. Use one of these, or switch the operation off on both sides (exclude)."
            ) from error
        return owner


def megatron_version() -> str:
    """Version of the installed megatron-core, or ``"(not installed)"``."""
    try:
        return str(importlib.import_module("megatron.core").__version__)
    except ImportError:
        return "(not installed)"


_INHERITED = object()


class Patches:
    """Replacements in effect. All or nothing: if one fails to install, none stays."""

    def __init__(self, points: Iterable[HookPoint]) -> None:
        # (owner, name) -> what the owner held itself (or _INHERITED), the replacement
        self._undo: dict[tuple[Any, str], tuple[Any, Any]] = {}
        planned = [(point.resolve(), point) for point in points]
        try:
            for owner, point in planned:
                own = vars(owner).get(point.name, _INHERITED)
                replacement = point.make(getattr(owner, point.name) if own is _INHERITED else own)
                setattr(owner, point.name, replacement)
                stock = self._undo.get((owner, point.name), (own,))[0]
                self._undo[owner, point.name] = stock, replacement
        except BaseException:
            self.remove()
            raise

    def remove(self, whole: bool = False) -> None:
        """Put the stock names back. Idempotent; a name that is stock already counts as done.

        Args:
            whole: put all of them back, or none.

        Raises:
            RuntimeError: somebody replaced one of the names after vime; that one is left alone until the next call. All
                others are back, or none with ``whole``.
        """
        foreign = []
        for (owner, name), (own, replacement) in self._undo.items():
            held = vars(owner).get(name, _INHERITED)
            if held is not replacement and held is not own:
                foreign.append((owner, name))
        for (owner, name), (own, replacement) in list(self._undo.items()):
            if (owner, name) in foreign or (foreign and whole):
                continue
            if vars(owner).get(name, _INHERITED) is replacement:
                if own is _INHERITED:
                    delattr(owner, name)
                else:
                    setattr(owner, name, own)
            del self._undo[owner, name]
        if foreign:
            names = ", ".join(f"{getattr(owner, '__name__', owner)}.{name}" for owner, name in foreign)
            raise RuntimeError(f"replaced by somebody else after vime, and left alone: {names}; "
                               "undo those replacements first, then call vime.disable()")

    def __len__(self) -> int:
        return len(self._undo)


_ran: collections.Counter[str] = collections.Counter()
_has_place: set[str] = set()


def note(op: str) -> None:
    """A route calls this each time it really ran."""
    _ran[op] += 1


def expect(op: str) -> None:
    """A model that is about to run has a place for ``op``, which not every model has."""
    _has_place.add(op)


def expected(op: str) -> bool:
    """Whether a model with a place for ``op`` has run since :func:`reset_counters`."""
    return op in _has_place


def counters() -> dict[str, int]:
    """Operation -> how often its Megatron route ran since :func:`reset_counters`."""
    return dict(_ran)


def reset_counters() -> None:
    """Forget what has run so far."""
    _ran.clear()
    _has_place.clear()
