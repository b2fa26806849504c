"""Planted faults of block FP8, for negative controls: one layer of the trainer quantises otherwise than the engine."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import vime
from vime.megatron.planting import NoSuchFault, Undo, while_runs
from vime.ops import blockwise
from vime.ops.fp8 import FP8_MAX

Quantised = tuple[torch.Tensor, torch.Tensor]
_quantise = blockwise.quantise_weight_blocks


def _one_scale_doubled(weight_NK: torch.Tensor, block_N: torch.Tensor | None) -> Quantised:
    """The first block of the weight is read with twice its scale."""
    q_NK, scale_NB = _quantise(weight_NK, block_N)
    rows = slice(0, blockwise.BLOCK) if block_N is None else block_N == block_N[0]
    scale_NB[rows, 0] *= 2
    return q_NK, scale_NB


def _one_scale_a_tensor(weight_NK: torch.Tensor, block_N: torch.Tensor | None) -> Quantised:
    """One scale for the whole weight, as per-tensor FP8 has it."""
    scale = weight_NK.detach().float().abs().max() / FP8_MAX
    blocks = -(-weight_NK.shape[1] // blockwise.BLOCK)
    return (weight_NK.detach().float() / scale).to(torch.float8_e4m3fn), scale.expand(weight_NK.shape[0], blocks).contiguous()


def _blocks_of_the_fused_tensor(weight_NK: torch.Tensor, block_N: torch.Tensor | None) -> Quantised:
    """Blocks of rows as they lie in a fused weight, across the tensors of the checkpoint."""
    return _quantise(weight_NK, None)


def _in(path: str, planted: Callable[[torch.Tensor, torch.Tensor | None], Quantised]) -> Callable[[Any, int], Undo]:
    """Quantise the weight of one module of a decoder layer by ``planted``."""

    def plant(model: Any, layer: int) -> Undo:
        found = dict(model.decoder.layers[layer].named_modules()).get(path)
        if found is None or not vime.is_fp8():
            raise NoSuchFault(f"layer {layer} has no {path} in block FP8, so this fault finds nothing to act on")
        return while_runs(found, blockwise, "quantise_weight_blocks", planted)

    return plant


#: Name -> what plants it, as in :mod:`vime.megatron.faults`.
FAULTS_FP8: dict[str, Callable[[Any, int], Undo]] = {
    "FP8 scale of one block doubled": _in("self_attention.linear_proj", _one_scale_doubled),
    "FP8 scale of the whole tensor": _in("mlp.linear_fc2", _one_scale_a_tensor),
    "FP8 blocks of the fused tensor": _in("self_attention.linear_qkv", _blocks_of_the_fused_tensor),
}
