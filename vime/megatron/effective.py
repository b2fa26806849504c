"""The trainer's contract, read from the model and the routes in effect, never from flags."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
        ops: aligned operations; None for those active now. ``sampling`` belongs to the engine and is stated as the
            shared implementation whenever ``logprob`` is, since the engine answers for it.
    """
    import vime

    dtype = model_dtype(model)
    parameter = next(model.parameters())
    active = set(vime.active_ops() if ops is None else ops)
    lm_head = _lm_head_weight(model)
    used = {op: shared_ops.registry.implementation(op, parameter.device, dtype) if op in active else "stock"
            for op in OPS if op in active or op not in ("moe", "sampling")}
    return Contract(
        dtype=_NAMES[dtype],
        ops=used,
        params=shared_ops.params(),
        lm_head_dtype=_NAMES[lm_head.dtype],
        kv_cache_dtype=_NAMES[dtype],
    )


def _lm_head_weight(model: Any) -> torch.Tensor:
    while not hasattr(model, "output_layer"):
        model = model.module
    if model.output_layer.weight is not None:
        return model.output_layer.weight
    return model.shared_embedding_or_output_weight()
