"""Block FP8 in a built vLLM model: which of its linear layers, and where the blocks of their weights lie.

The decision is :func:`vime.fp8.applies`, by Hugging Face name; here is what vLLM's fused layers are made of. The blocks of a
part start at its own first row, as they do in the checkpoint and in the trainer, whatever it is fused with.

On a GPU an engine of vime keeps these weights quantised (:func:`keeping`): it writes to them in :mod:`vime.vllm.receiver` alone, which renews
what is kept. Where another program loads this plugin, weights may change in ways that nobody announces, and nothing is kept.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase

from vime import ops
from vime.fp8 import decide
from vime.vllm import plugin
from vime.vllm.layout import FUSED
from vime.vllm.protocol import EngineError, UpdateFailed
from vime.weights.manifest import first_problems

_MARK = "vime_fp8_blocks"
_EXPERT_MARK = "vime_fp8_expert_blocks"  # on what holds the weights, where the other mark is on the layer
#: How to do without.
WITHOUT = ("Start the engine with --no-keep-fp8-weights (--no-vllm-keep-fp8-weights of vime train): it then quantises in every step, to the "
           "same bits")
_EXPERTS = ("*.gate_proj", "*.up_proj", "*.down_proj")
_KEPT = "vime_fp8_kept"  # on the model: names of the weights that are kept quantised
_keeping: set[str] | None = None


@contextlib.contextmanager
def keeping(on: bool) -> Iterator[set[str]]:
    """Whether layers that are loaded in here keep their weights quantised beside them, half of their memory again; the names of those
    that do. They belong to a model: :func:`note`."""
    global _keeping
    names: set[str] = set()
    _keeping = names if on else None
    try:
        yield names
    finally:
        _keeping = None


def _kept(name: str, weight: torch.Tensor, block_N: torch.Tensor) -> None:
    if _keeping is None:
        return
    try:
        if ops.keep_quantised(name, weight, block_N):
            _keeping.add(name)
    except torch.OutOfMemoryError as error:
        raise EngineError(f"{name}: no room for its block-FP8 form beside the {weight.numel() * weight.element_size() / 2**30:.1f} GiB of "
                          f"the weight itself ({error}). {WITHOUT}") from error


def note(model: torch.nn.Module, names: set[str]) -> None:
    """Remember what is kept of a model that has been built."""
    setattr(model, _KEPT, frozenset(names))


def kept(model: torch.nn.Module) -> frozenset[str]:
    """Names of the weights of a model that are kept quantised."""
    return getattr(model, _KEPT, frozenset())


def hf_names(name: str) -> list[str]:
    """Hugging Face names of the layers that the linear module ``name`` is made of, in order of its rows."""
    dotted = f"{name}."
    parts = sorted((index, part) for part, (fused, index) in FUSED.items() if fused in dotted)
    return [dotted.replace(FUSED[part][0], part)[:-1] for _, part in parts] or [name]


def mark(layer: Any) -> None:
    """Note on a linear layer whose weight is loaded what it runs in. Does nothing where FP8 is off."""
    if plugin.installed_fp8() and isinstance(layer, LinearBase) and decide(hf_names(layer.prefix)):
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        sizes = getattr(layer, "output_sizes", None) or [weight.shape[0]]
        blocks = ops.row_blocks(sizes).to(weight.device)
        old = getattr(layer, _MARK, None)
        if old is not None and old.device == blocks.device and torch.equal(old, blocks):
            blocks = old  # loaded again: what is kept is known by this very tensor
        setattr(layer, _MARK, blocks)
        _kept(layer.prefix, weight, blocks)


def evaluate(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A linear layer on its live weight, or what is kept of it, in what it runs in."""
    block_N = getattr(layer, _MARK, None)
    return ops.linear(x, layer.weight, bias) if block_N is None else ops.linear_fp8(x, layer.weight, bias, block_N)


def expert_blocks(runner: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Blocks of the rows of one expert's two weights, or None where the experts of this layer do not run in FP8."""
    if not (plugin.installed_fp8() and decide(f"{runner.layer_name}.{name}" for name in _EXPERTS)):
        return None
    weights = runner.routed_experts
    rows, out = weights.w13_weight.shape[1], weights.w2_weight.shape[1]
    blocks = ops.row_blocks([rows // 2, rows // 2]).to(weights.w13_weight.device), ops.row_blocks([out]).to(weights.w2_weight.device)
    setattr(weights, _EXPERT_MARK, (runner.layer_name, blocks))
    return blocks


def keep_experts(weights: Any) -> None:
    """Once the experts of a layer are loaded: keep them, if they run in FP8 and this engine keeps any."""
    if (marked := getattr(weights, _EXPERT_MARK, None)) is not None:
        name, (gate_up, down) = marked
        _kept(f"{name}.w13_weight", weights.w13_weight, gate_up)
        _kept(f"{name}.w2_weight", weights.w2_weight, down)


def stale(model: torch.nn.Module, device: torch.device | str) -> list[str]:
    """Weights whose kept form is not that of the weight as it is now."""
    found = ops.stale_quantised(device) if kept(model) else []
    return [f"{name}: the block-FP8 form that the kernels read is not that of the weight" for name in found]


def refresh(model: torch.nn.Module, device: torch.device | str) -> int:
    """Renew what is kept of a model, after anything was written to weights; how many these are. Raises UpdateFailed where one is not renewed, since
    its parameter was replaced: a captured graph goes on reading what was kept."""
    if not kept(model):
        return 0
    if lost := sorted(kept(model) - set(ops.refresh_quantised(device))):
        raise UpdateFailed(first_problems("weights of which a block-FP8 form is kept were replaced by other parameters, which needs a restart of "
                                          "the engine", [f"{name}: gone, or at another address" for name in lost]))
    return len(kept(model))


def problem(name: str, layer: Any) -> str | None:
    """Why the layer (a linear one, or one of experts) that the model calls ``name`` is not evaluated as it should be, or None."""
    linear = isinstance(layer, LinearBase)
    names = hf_names(name) if linear else [f"{name}.{part}" for part in _EXPERTS]
    wanted, found = bool(plugin.installed_fp8()) and decide(names), getattr(layer, _MARK, None)
    if wanted != (found is not None):
        return f"it runs {'in' if found is not None else 'without'} block FP8 and should run {'in' if wanted else 'without'} it"
    if linear and found is not None and len(found) != layer.weight.shape[0]:
        return f"blocks for {len(found)} rows of a weight of {layer.weight.shape[0]}"
    return None


def layers(model: torch.nn.Module) -> list[str]:
    """Hugging Face names of the layers in FP8, the experts of a layer as one (``experts.*``)."""

    def found() -> Iterator[str]:
        for name, module in model.named_modules():
            if getattr(module, _MARK, None) is not None:
                yield from hf_names(name) if isinstance(module, LinearBase) else (f"{name}.{part}" for part in _EXPERTS)

    return sorted(found())
