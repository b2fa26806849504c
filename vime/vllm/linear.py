"""Linear layers, LM head and embedding of vLLM, routed to ``vime.ops``.

The methods of vLLM's unquantised route are replaced, and not a quantisation config registered: one replacement serves
both vLLM releases and every layer class, and ``process_weights_after_loading`` has to change anyway. On CPU it packs the
weights and empties ``.weight``; here weights stay where the loader put them, so that they can be updated and read back.
"""
from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vime import ops
from vime.vllm import fp8


def apply_linear(self: object, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``apply`` of both methods: ``ops.linear`` on the live weight, or ``ops.linear_fp8`` where the layer runs in FP8."""
    return fp8.evaluate(layer, x, bias)


def keep_weights(self: object, layer: torch.nn.Module) -> None:
    """``process_weights_after_loading`` of both methods: nothing is packed."""
    fp8.mark(layer)


def embed(self: object, layer: Any, input_: torch.Tensor) -> torch.Tensor:
    """``embedding`` of the embedding method: ``ops.embedding`` on the live weight."""
    return ops.embedding(input_, layer.weight)


def install_linear() -> None:
    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        method.apply = apply_linear  # type: ignore[method-assign]
        method.process_weights_after_loading = keep_weights  # type: ignore[method-assign]


def install_embedding() -> None:
    UnquantizedEmbeddingMethod.embedding = embed  # type: ignore[method-assign]
