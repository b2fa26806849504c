"""CUDA provider of :mod:`vime.ops`: registers one implementation per operation and dtype, made for and run on Hopper.

Importing it takes cuBLAS's workspace away, which has to happen before the first GEMM of the process.
"""
from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch

from vime.ops.providers import cublas

cublas.starve()

from vime.ops import registry  # noqa: E402
from vime.ops.cuda import (  # noqa: E402
    activation,
    blockwise,
    cells,
    embedding,
    gemm,
    grouped,
    norm,
    paged,
    quantise,
    rope,
    router,
    sampling,
    select,
    softmax,
    sparse,
    sparse_index,
)

#: Variable that chooses the kernel of grouped-query attention for a process, and so its id in the contract.
ATTENTION_ENV = "VIME_ATTENTION"
_ATTENTION = {"flash_attn": "attention", "flashinfer": "attention_flashinfer"}


def attention_kernel() -> ModuleType:
    """The module that :data:`ATTENTION_ENV` names. Raises ValueError for an unknown one."""
    name = os.environ.get(ATTENTION_ENV) or "flash_attn"
    if name not in _ATTENTION:
        raise ValueError(f"{ATTENTION_ENV} is {name!r}; expected {' or '.join(_ATTENTION)}")
    return importlib.import_module(f"{__name__}.{_ATTENTION[name]}")


def _register() -> None:
    both = (torch.float32, torch.bfloat16)
    for op, module, names, dtypes in (
        ("linear", gemm, ("linear", "weight_gradient"), both),
        ("norm", norm, ("rms_norm", "add_rms_norm"), both),
        ("rope", rope, ("apply_rope", "rotate", "table"), both),
        ("activation", activation, ("silu_and_mul",), both),
        ("embedding", embedding, ("embedding",), both),
        ("logprob", softmax, ("token_logprob", "log_softmax"), both),
        ("sampling", sampling, ("sample",), both),
        ("attention", attention_kernel(), ("attention_varlen", "attention_paged", "attention_paged_into", "attention_plan", "kv_cache_write", "kv_cache_shape"),
         (torch.bfloat16,)),
    ):
        for dtype in dtypes:
            functions = {name: getattr(module, name) for name in names}
            if op == "linear":
                functions |= {"linear_fp8": blockwise.linear_fp8, "keep_fp8": quantise.keep, "refresh_fp8": quantise.refresh,
                              "stale_fp8": quantise.stale}
            if op == "attention":  # rows are the same whether they came packed, paged or by a list: one operation
                functions |= {"sparse_attention": sparse.sparse_attention, "index_scores": sparse_index.index_scores,
                              "select": select.select, "linear_heads": grouped.linear_heads,
                              "index_scores_paged": sparse_index.index_scores_paged, "sparse_attention_paged": paged.sparse_attention_paged,
                              "write_cells": cells.write_cells, "list_cells": cells.list_cells}
            registry.register(op, "cuda", dtype, module.IMPLEMENTATION, functions)
    for dtype in both:  # evaluated in fp32; the contract asks for what the model's dtype has
        registry.register("moe", "cuda", dtype, sparse.IMPLEMENTATION, {
            "sigmoid": sparse.sigmoid, "exp": sparse.exp, "plan": grouped.plan, "grouped_linear": grouped.grouped_linear,
            "expert_linear": grouped.expert_linear, "grouped_linear_fp8": blockwise.grouped_linear_fp8, "route": router.route,
            "combine_slots": router.combine_slots})


_register()
