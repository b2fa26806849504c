"""TransformerEngine's modules in a Megatron model, routed into the same ``vime.ops`` as those of the local spec.

Megatron builds them by ``get_gpt_layer_with_transformer_engine_spec``. They keep their parameters under TransformerEngine's
names and lose their kernels: forward and backward of a routed module are those of the local spec's module, so both
specs give the same bits. A module, or a setting of one, that is not listed here is refused by name.

Nothing here imports TransformerEngine. Megatron does, where it is installed; a CPU run never meets it.
"""
from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vime.megatron.patch import HookPoint, MissingHookPoint
from vime.megatron.te import attention, experts, linear, norm, workspace

#: Megatron's wrappers live here.
EXTENSION = "megatron.core.extensions.transformer_engine"
#: The release whose sources the routes were written against.
COVERED = "2.11.0"

#: Qualified name of a module class -> (operations that it evaluates, what of it can't be aligned).
SERVED: dict[str, tuple[tuple[str, ...], Callable[[Any, Any], Iterator[str]]]] = {
    **{f"{EXTENSION}.{name}": (("linear",), linear.refusals) for name in ("TELinear", "TEColumnParallelLinear", "TERowParallelLinear")},
    f"{EXTENSION}.TELayerNormColumnParallelLinear": (("norm", "linear"), linear.fused_refusals),
    **{f"{EXTENSION}.{name}": (("linear",), experts.grouped_refusals)
       for name in ("TEGroupedLinear", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear")},
    f"{EXTENSION}.TEDotProductAttention": (("attention",), attention.refusals),
    norm.CLASS: (("norm",), norm.refusals),
    experts.CLASS: (("moe", "linear", "activation"), experts.refusals),
}

_BACKENDS = "transformer_engine.pytorch.attention.dot_product_attention"
#: What a routed attention module carries and never calls.
NEUTRAL = {f"{_BACKENDS}.backends.{name}" for name in ("FlashAttention", "FusedAttention", "UnfusedDotProductAttention")} \
    | {f"{_BACKENDS}.softmax.FusedScaleMaskSoftmax"}


def present() -> bool:
    """Whether the installed Megatron found TransformerEngine."""
    try:
        return bool(importlib.import_module(EXTENSION).HAVE_TE)
    except (ImportError, AttributeError):
        return False


def version() -> str:
    """Version of the TransformerEngine that Megatron found, or ``"(not installed)"``."""
    if not present():
        return "(not installed)"
    return str(getattr(importlib.import_module("transformer_engine"), "__version__", "(unknown)"))


def hook_points(enabled: Iterable[str]) -> list[HookPoint]:
    """What to replace for these operations: nothing without TransformerEngine.

    A class that evaluates several operations is routed when all of them are aligned; one aligned half of it is refused with
    the model (:func:`refusals`). So is every module of a TransformerEngine that lacks one of the names: nothing of it is routed
    then, and a model of the local spec runs beside it.
    """
    global _missing
    if not present():
        return []
    points, _missing = _points(set(enabled)), _lacks()
    return [] if _missing else points


_missing: str | None = None  # what the installed release lacks, "" for nothing, None before it was looked at


def _lacks() -> str:
    try:
        for point in _points({op for ops, _ in SERVED.values() for op in ops}):
            point.resolve()
    except MissingHookPoint as error:
        return f"TransformerEngine {version()} is not routed, vime covers {COVERED} ({error.__cause__})"
    return ""


def _points(on: set[str]) -> list[HookPoint]:
    points: list[HookPoint] = []
    if "linear" in on:
        points += [*linear.hook_points(EXTENSION), *experts.grouped_hook_points(EXTENSION), *workspace.hook_points()]
    if {"linear", "norm"} <= on:
        points += linear.fused_hook_points(EXTENSION)
    if "norm" in on:
        points += norm.hook_points()
    if "attention" in on:
        points += attention.hook_points(EXTENSION)
    if {"moe", "linear", "activation"} <= on:
        points += experts.hook_points()
    return points


def refusals(kind: str, module: Any, config: Any, enabled: set[str]) -> Iterator[str]:
    """What of a served module can't be aligned. ``kind``: its qualified class name, out of :data:`SERVED`."""
    ops, found = SERVED[kind]
    on = [op for op in ops if op in enabled]
    if not on:
        return
    global _missing
    if _missing is None:
        _missing = _lacks()
    if _missing:
        yield f"{_missing}; install that release, or build the model with --transformer-impl local"
        return
    if len(on) < len(ops):
        yield f"it evaluates {', '.join(ops)} in one module and only {', '.join(on)} is aligned; enable all of them, or exclude all"
    yield from found(module, config)


def adopt(module: Any, kind: str) -> None:
    """Note a norm that belongs to a Megatron model: TransformerEngine's class serves other models as well."""
    if kind == norm.CLASS:
        norm.adopt(module)
