"""Block FP8 in a Megatron model: which of its linear layers, and where the blocks of their weights lie.

The decision is :func:`vime.fp8.applies`, by Hugging Face name; here is how Megatron's local modules are called there. A layer that
runs in FP8 carries its mark on the weight, because the functions that are routed see the weight and no module. The mark says
which block of 128 rows *of the checkpoint's tensor* each row belongs to: Megatron's ``linear_qkv`` mixes the rows of three tensors.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from vime import ops
from vime.fp8 import decide
from vime.megatron.patch import Refused

_MARK = "vime_fp8_blocks"
_marked = False
_LINEAR = ("ColumnParallelLinear", "RowParallelLinear")
_MLP = {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}
_SELF_ATTENTION = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj",),
    "linear_q_down_proj": ("q_a_proj",), "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",), "linear_kv_up_proj": ("kv_b_proj",),
    "core_attention.indexer.linear_wq_b": ("indexer.wq_b",), "core_attention.indexer.linear_wk": ("indexer.wk",),
    "core_attention.indexer.linear_weights_proj": ("indexer.weights_proj",),
}
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])")


def hf_names(layer: int, module: str) -> tuple[str, ...]:
    """Hugging Face names of the layers that a linear module of decoder layer ``layer`` (from 0) stands for, in order of its rows.

    ``module`` is its name within the layer; the number of an expert is the rank's own. Raises Refused for an unknown name.
    """
    at = f"model.layers.{layer}."
    owner, _, leaf = module.partition(".")
    if owner == "self_attention" and leaf in _SELF_ATTENTION:
        return tuple(f"{at}self_attn.{name}" for name in _SELF_ATTENTION[leaf])
    if owner == "mlp" and leaf in _MLP:
        return tuple(f"{at}mlp.{name}" for name in _MLP[leaf])
    if module.startswith("mlp.shared_experts.") and (leaf := module.rpartition(".")[2]) in _MLP:
        return tuple(f"{at}mlp.shared_experts.{name}" for name in _MLP[leaf])
    if expert := _EXPERT.fullmatch(module):
        return tuple(f"{at}mlp.experts.{expert[1]}.{name}" for name in _MLP[expert[2]])
    raise Refused(f"block FP8 is on, and vime does not know which layer of a checkpoint {module} of decoder layer {layer} is, so it "
                  "can't say whether it runs in FP8; switch FP8 off on both sides")


def row_blocks(config: Any, module: str, rows: int) -> torch.Tensor:
    """The block of each row of a module's weight, int64 ``[rows]``. Shapes are those of ``TransformerConfig`` ``config``."""
    if module == "self_attention.linear_qkv":
        groups, dim = config.num_query_groups, config.kv_channels
        sizes = [config.num_attention_heads * dim, groups * dim, groups * dim]
    else:
        groups, parts = 1, 2 if module.endswith("linear_fc1") else 1
        sizes = [rows // parts] * parts
    if sum(sizes) != rows:
        raise Refused(f"{module} has {rows} rows where its config says {' + '.join(map(str, sizes))}; block FP8 can't place its blocks")
    # each group holds its share of every tensor, in turn
    return torch.cat([part.view(groups, -1) for part in ops.row_blocks(sizes).split(sizes)], dim=1).flatten()


def _linears(model: Any) -> Iterator[tuple[int, str, Any]]:
    """(decoder layer from 0, name within it, module) of every linear layer inside a decoder layer."""
    for layer in model.modules():
        if type(layer).__name__ == "TransformerLayer":
            for name, module in layer.named_modules():
                if type(module).__name__ in _LINEAR:
                    yield layer.layer_number - 1, name, module


def mark(model: Any, on: bool) -> None:
    """Mark what runs in FP8 from now on, or take the marks back.

    Raises:
        Refused: a linear layer that is not known, or a module that stands for layers of both kinds; no mark is left then.
    """
    global _marked
    if not on and not _marked:  # no weight of this process carries a mark, and a walk over a model takes a millisecond
        return
    _marked = True
    try:
        for layer, name, module in _linears(model):
            if not on or not decide(hf_names(layer, name)):
                _clear(module.weight)
            elif blocks_of(module.weight) is None:
                if name.endswith("linear_fc1") and not module.config.gated_linear_unit:
                    raise Refused(f"block FP8 is on, and {name} of decoder layer {layer} is not gated; covered: gated (SwiGLU)")
                setattr(module.weight, _MARK, row_blocks(module.config, name, module.weight.shape[0]).to(module.weight.device))
    except BaseException:
        for _, _, module in _linears(model):
            _clear(module.weight)
        raise


def _clear(weight: Any) -> None:
    if blocks_of(weight) is not None:
        delattr(weight, _MARK)


def blocks_of(weight: Any) -> torch.Tensor | None:
    """The blocks of a weight whose layer runs in FP8, else None."""
    return getattr(weight, _MARK, None)


def layers(model: Any) -> list[str]:
    """Hugging Face names of the layers that are marked, experts of this rank by their local number."""
    return sorted({hf for layer, name, module in _linears(model) if blocks_of(module.weight) is not None for hf in hf_names(layer, name)})
