"""Token embedding: ``VocabParallelEmbedding.forward``, for its backward, whose order of additions is free in torch."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vime import ops
from vime.megatron.patch import HookPoint, note

OP = "embedding"
MODULES = ("megatron.core.tensor_parallel.layers.VocabParallelEmbedding",)


def _route(stock: Any) -> Any:
    del stock

    def forward(self: Any, input_: torch.Tensor) -> torch.Tensor:
        note(OP)
        return ops.embedding(input_, self.weight)

    return forward


def hook_points() -> list[HookPoint]:
    return [HookPoint("megatron.core.tensor_parallel.layers:VocabParallelEmbedding", "forward", _route)]


def refusals(module: Any, config: Any) -> Iterator[str]:
    del config
    if module.tp_group is not None and module.tp_group.size() > 1:
        yield f"its tensor parallel size is {module.tp_group.size()}; only 1 is aligned"
    if module.reduce_scatter_embeddings:
        yield "reduce_scatter_embeddings is on (sequence parallelism)"
