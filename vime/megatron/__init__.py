"""The trainer's side: routes Megatron-core's operations into ``vime.ops`` and holds no numerics of its own."""
from __future__ import annotations

from vime.megatron.patch import MissingHookPoint, Refused

__all__ = ["MissingHookPoint", "Refused", "contract"]


def __getattr__(name: str) -> object:
    if name == "contract":  # imports torch
        from vime.megatron.effective import contract

        return contract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
