"""Block FP8 for the third party, which has none: ``transformers`` on what E4M3 leaves of the operands of its linear layers.

DeepSeek-V3's recipe (arXiv 2412.19437, section 3.3): activations in blocks of 1x128, weights in blocks of 128x128, one scale of
``max / 448`` each, products and sums in fp32. Written out again here, as a third party must; no line of ``transformers`` is changed.
"""
from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_BLOCK = 128


def left_of(x: torch.Tensor, rows: int) -> torch.Tensor:
    """What E4M3 leaves of ``x``, any dtype ``[N, K]``, in blocks of ``rows`` x 128: ``[N, K]`` fp32."""
    n, k = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -k % _BLOCK, 0, -n % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // _BLOCK, _BLOCK)
    scale = blocks.abs().amax((1, 3), keepdim=True) / torch.full((), 448.0, device=x.device)
    scale = torch.where(scale > 0, scale, 1.0)
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).view(padded.shape)[:n, :k]


def quantised(model: Any) -> dict[int, int]:
    """Storage of a weight -> rows of one tensor of the checkpoint in it, of every linear layer and expert of a decoder layer but what
    only chooses (router, indexer) and what latent attention takes apart (``kv_b_proj``)."""
    found = {}
    for name, module in model.model.layers.named_modules():
        if isinstance(module, torch.nn.Linear) and ".indexer." not in name and not name.endswith("kv_b_proj"):
            found[module.weight.untyped_storage().data_ptr()] = module.weight.shape[0]
        if isinstance(getattr(module, "gate_up_proj", None), torch.nn.Parameter):  # [experts, gate and up, hidden]
            found[module.gate_up_proj.untyped_storage().data_ptr()] = module.gate_up_proj.shape[1] // 2
            found[module.down_proj.untyped_storage().data_ptr()] = module.down_proj.shape[1]
    return found


def _operands(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Those of ``torch.nn.functional.linear``, however they were given."""
    return input, weight, bias


class Fp8Linears(TorchFunctionMode):
    """While it is on, ``linear`` with one of the weights that :func:`quantised` found takes both operands through E4M3."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.rows, self.calls = quantised(model), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.linear:
            return func(*args, **kwargs)
        x, weight, bias = _operands(*args, **kwargs)
        rows = self.rows.get(weight.untyped_storage().data_ptr())
        if rows is None:
            return func(*args, **kwargs)
        self.calls += 1
        weight = torch.cat([left_of(part, _BLOCK) for part in weight.split(rows)])
        y = (left_of(x.reshape(-1, x.shape[-1]), 1) @ weight.t()).to(x.dtype).view(*x.shape[:-1], -1)
        return y if bias is None else y + bias
