"""The trainer's side: routes Megatron-core's operations into ``vime.ops`` and holds no numerics of its own."""
from __future__ import annotations

import importlib
from typing import Any

from vime.megatron.patch import MissingHookPoint, Refused

# Names whose modules import torch; ``import vime`` stays quick.
_LAZY = {"contract": "vime.megatron.effective", "token_logprobs": "vime.megatron.routes.logprob"}

__all__ = ["MissingHookPoint", "Refused", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
