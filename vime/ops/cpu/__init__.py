"""CPU provider: our own C++ kernels, since stock CPU kernels change their order of additions with the batch.

Importing it compiles (once per machine) or loads the kernels and registers them. The ids carry what can change a
bit: the kind of multiply-add. Everything else has one order on every processor.
"""
from __future__ import annotations

import torch

from vime.ops import registry
from vime.ops.cpu import fp8, functions, sparse
from vime.ops.cpu.build import load

_kernels = load()
functions.bind(_kernels)
_sparse = sparse.functions(_kernels)

for _dtype in (torch.float32, torch.bfloat16):
    _short = "bf16" if _dtype is torch.bfloat16 else "f32"
    _gemm, _attention = (kind(_dtype is torch.bfloat16) for kind in (_kernels.gemm_kind, _kernels.attention_kind))
    _table = functions.table(_gemm, _attention, _short)
    _table["linear"][1]["linear_fp8"] = fp8.linear_fp8
    _table["attention"][1]["sparse_attention"] = _sparse["sparse_attention"]
    _table["moe"] = (f"{_short}@1", {name: _sparse[name] for name in ("sigmoid", "exp")})
    for _op, (_kind, _functions) in _table.items():
        registry.register(_op, "cpu", _dtype, f"cpu/{_op}/{_kind}", _functions)
