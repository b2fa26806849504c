"""The trainer's contract, read from the model and the routes in effect, never from flags."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from vime import ops as shared_ops
from vime.contract import OPS, Contract
from vime.fp8 import FP8, summary

#: The one dtype of parameters a covered model may have.
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


_LINEAR = ("ColumnParallelLinear", "RowParallelLinear", "TELinear", "TEColumnParallelLinear", "TERowParallelLinear",
           "TELayerNormColumnParallelLinear", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear")


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
    from vime.megatron import check, fp8

    dtype = model_dtype(model)
    device = next(model.parameters()).device
    aligned = set(vime.active_ops() if ops is None else ops)
    if vime.is_fp8():
        check.prepare(model, {*aligned, FP8})  # marks what runs in FP8, as every forward does first
    return Contract(
        dtype=_NAMES[dtype],
        ops=shared_ops.registry.contract_ids(OPS, aligned, device, dtype,
                                             experts=any(hasattr(module, "router") for module in model.modules())),
        params={**(shared_ops.params(shared_ops.contract_id(device), summary(fp8.layers(model))) if vime.is_fp8() else shared_ops.params()),
                **_proven(model, aligned, device, dtype)},
        router_dtype=_router_dtype(model, "moe" in aligned),
        kv_cache_dtype=_kv_cache_dtype(model),
    )


def _proven(model: Any, aligned: set[str], device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """What the shapes of this model run by on a GPU, proven now where they are not yet."""
    from vime.megatron.check import unwrap

    gpt = unwrap(model)
    head = getattr(gpt, "output_layer", None)
    layers: set[Any] = set()
    apart: set[Any] = set()
    if "linear" in aligned:
        for name, module in gpt.named_modules():
            if type(module).__name__ in _LINEAR and module is not head:
                for weight in module.parameters(recurse=False):
                    if weight.dim() == 2:
                        (apart if ".experts." in f".{name}." else layers).add(tuple(weight.shape))
        tied = head is not None and getattr(gpt, "share_embeddings_and_output_weights", False)
        weight = gpt.embedding.word_embeddings.weight if tied else getattr(head, "weight", None)
        if weight is not None:
            apart.add(tuple(weight.shape))
    kinds = {type(module).__name__ for module in gpt.modules()}
    latent = "LatentSelfAttention" in kinds
    if latent or "MoELayer" in kinds:  # the engine has other layers there, fused in another way
        layers, apart = set(), layers | apart
    config = gpt.config
    attention = {(config.num_attention_heads, config.num_query_groups, config.kv_channels)} if "attention" in aligned and not latent else set()
    return shared_ops.proven(device, dtype, layers, apart, attention, training=True)


def _router_dtype(model: torch.nn.Module, aligned: bool) -> str:
    """``float32`` where vime's router runs (or there is none); of a stock one, what its config says."""
    routers = [m for m in model.modules() if type(m).__name__ == "TopKRouter"]
    if aligned or not routers:
        return "float32"
    found = {"fp32": "float32", "fp64": "float64"}
    return found.get(str(routers[0].config.moe_router_dtype), _NAMES[model_dtype(model)])  # type: ignore[union-attr]


def _kv_cache_dtype(model: torch.nn.Module) -> str:
    """What the rows of latent attention are rounded to before they are read.

    Raises:
        ValueError: some layers round and others do not.
    """
    found = {bool(m.fp8_cache) for m in model.modules() if type(m).__name__ == "LatentSelfAttention"}
    if len(found) > 1:
        raise ValueError("some layers round their rows as an FP8 cache does and others do not; a contract needs one cache dtype")
    return "fp8_e4m3" if True in found else "model"
