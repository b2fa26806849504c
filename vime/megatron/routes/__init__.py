"""One module per operation: which Megatron name is replaced, and how its arguments become those of ``vime.ops``.

Each has ``OP``, ``MODULES`` (qualified names of the module classes it serves), ``hook_points()`` and
``refusals(module, config)``, which yields a text for each property of a served module that can't be aligned.
"""
from __future__ import annotations

from types import ModuleType

from vime.megatron.routes import activation, attention, embedding, linear, logprob, moe, norm, rope

ROUTES: dict[str, ModuleType] = {
    route.OP: route for route in (embedding, linear, norm, rope, activation, attention, moe, logprob)
}
