"""The trainer's contract, read from the model and the routes in effect, never from flags."""
from __future__ import annotations

from collections.abc import Iterable

import torch

from vime import ops as shared_ops
from vime.contract import OPS, Contract

#: The one dtype of parameters a covered model may have.
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def model_dtype(model: torch.nn.Module) -> torch.dtype:
    """The dtype of every parameter of ``model``.

    Raises:
        ValueError: parameters of several dtypes (the first of each is named), or of one that is not covered.
    """
    first: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        first.setdefault(parameter.dtype, name)
    if len(first) != 1 or next(iter(first)) not in _NAMES:
        found = ", ".join(f"{dtype} ({name})" for dtype, name in first.items()) or "no parameters"
        raise ValueError(f"a covered model has parameters of one dtype, float32 or bfloat16; found {found}")
    return next(iter(first))


def contract(model: torch.nn.Module, ops: Iterable[str] | None = None) -> Contract:
    """The numerics of ``model`` with these operations aligned.

    Args:
        model: a Megatron model, maybe wrapped in Megatron's data parallel.
        ops: aligned operations; None for those active now. ``sampling`` is evaluated by the engine alone, and stated
            here as what the trainer expects of it.

    Raises:
        ValueError: see :func:`model_dtype`.
        vime.ops.UnsupportedOp: an aligned operation has no implementation for the model's device and dtype.
    """
    import vime

    dtype = model_dtype(model)
    device = next(model.parameters()).device
    aligned = set(vime.active_ops() if ops is None else ops)
    return Contract(
        dtype=_NAMES[dtype],
        ops={op: shared_ops.registry.implementation(op, device, dtype) if op in aligned else "stock" for op in OPS},
        params=shared_ops.params(),
    )
