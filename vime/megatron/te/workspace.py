"""TransformerEngine's cuBLAS workspace, taken away while its linear layers are routed.

Every product of TransformerEngine asks ``get_cublas_workspace`` for scratch memory of its own, 32 MiB on Hopper, which the
variables that starve torch's cuBLAS do not reach, and with which cuBLAS may split the sum over K. The routed modules leave
none of these products in the forward or the backward, so this is a second wall: a product that still runs somewhere
(another model in this process, a module of TransformerEngine called by itself) gets a workspace of no bytes and can't split K,
and is counted, so that a gate can tell that none ran.
"""
from __future__ import annotations

import importlib
from typing import Any

import torch

from vime.megatron.patch import HookPoint, Refused

_MODULE = "transformer_engine.pytorch.cpp_extensions.gemm"
#: Bytes of scratch that a product may have. Any split along K needs more.
STARVED = 0

_products = 0


def products() -> int:
    """Products of TransformerEngine that ran on a starved workspace since :func:`reset`."""
    return _products


def reset() -> None:
    """Count from 0 again."""
    global _products
    _products = 0


def _route(stock: Any) -> Any:
    def get_cublas_workspace(device: int, ub: bool, grouped_gemm: bool) -> Any:
        global _products
        if ub:
            raise Refused("a product of TransformerEngine overlaps with communication (user buffers), which vime can't align; set "
                          "tp_comm_overlap to False")
        _products += 1

        def empty() -> torch.Tensor:
            return torch.empty(STARVED, dtype=torch.uint8, device=device)

        if not grouped_gemm:
            return empty()
        streams = importlib.import_module(_MODULE).tex.get_num_cublas_streams()
        return [empty() for _ in range(streams)]

    if hasattr(stock, "cache_clear"):
        stock.cache_clear()  # what was allocated so far is given back
    return get_cublas_workspace


def hook_points() -> list[HookPoint]:
    return [HookPoint(_MODULE, "get_cublas_workspace", _route)]
