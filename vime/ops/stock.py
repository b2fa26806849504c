"""What an unaligned run would call, for the negative control and the cost of being exact.

Several routes an operation: torch's own, and vLLM's C++ kernels where a vLLM wheel is installed (the library is
loaded without importing vllm). The cost is measured against whichever is fastest. Nothing else may use this module.
"""
from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

Route = Callable[..., Any]


@functools.cache
def vllm_kernels() -> Any | None:
    """``torch.ops._C`` with vLLM's CPU kernels loaded, or None."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    if not torch.cpu._is_avx512_supported():
        name = "_C_AVX2"
    elif not torch.cpu._is_avx512_bf16_supported():
        name = "_C_AVX512"
    else:
        name = "_C"
    for path in Path(spec.submodule_search_locations[0]).glob(f"{name}.*so"):
        try:
            torch.ops.load_library(path)
        except (OSError, RuntimeError):
            return None
        return torch.ops._C if hasattr(torch.ops._C, "cpu_attention_with_kv_cache") else None
    return None


def linear(weight_NK: torch.Tensor) -> dict[str, Route]:
    routes: dict[str, Route] = {"torch linear": lambda x: F.linear(x, weight_NK)}
    kernels = vllm_kernels() if weight_NK.device.type == "cpu" else None
    handle = None
    if kernels is not None:
        # oneDNN has no bf16 product for some processors; vLLM then takes torch's as well
        with contextlib.suppress(RuntimeError):
            handle = kernels.create_onednn_mm_handler(weight_NK.t(), 128)
    if kernels is not None and handle is not None:
        handler = torch.tensor(handle, dtype=torch.int64)

        def prepacked(x: torch.Tensor) -> torch.Tensor:
            y = torch.empty(x.shape[0], weight_NK.shape[0], dtype=x.dtype)
            kernels.onednn_mm(y, x, None, handler)
            return y

        routes["vllm onednn prepacked"] = prepacked
    return routes


def rms_norm(weight_H: torch.Tensor, eps: float) -> dict[str, Route]:
    routes: dict[str, Route] = {"torch rms_norm": lambda x: F.rms_norm(x, weight_H.shape, weight_H, eps)}
    kernels = vllm_kernels() if weight_H.device.type == "cpu" else None
    if kernels is not None:
        def fused(x: torch.Tensor) -> torch.Tensor:
            y = torch.empty_like(x)
            kernels.rms_norm(y, x, weight_H, eps)
            return y

        routes["vllm rms_norm"] = fused
    return routes


def add_rms_norm(weight_H: torch.Tensor, eps: float) -> dict[str, Route]:
    def eager(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        summed = x + residual
        return F.rms_norm(summed, weight_H.shape, weight_H, eps), summed

    routes: dict[str, Route] = {"torch add, rms_norm": eager}
    kernels = vllm_kernels() if weight_H.device.type == "cpu" else None
    if kernels is not None:
        def fused(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            kernels.fused_add_rms_norm(x, residual, weight_H, eps)  # in place: for timing only
            return x, residual

        routes["vllm fused_add_rms_norm"] = fused
    return routes


def apply_rope() -> dict[str, Route]:
    def eager(x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
        cos, sin = (torch.cat((t, t), -1)[:, None].to(x_THD.dtype) for t in (cos_TR, sin_TR))
        a, b = x_THD.chunk(2, -1)
        return x_THD * cos + torch.cat((-b, a), -1) * sin

    routes: dict[str, Route] = {"torch rotate_half": eager}
    kernels = vllm_kernels()
    if kernels is not None:
        def fused(x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
            rows = x_THD.shape[0]
            cache, x = torch.cat((cos_TR, sin_TR), -1).to(x_THD.dtype), x_THD.reshape(rows, -1)
            kernels.rotary_embedding(torch.arange(rows), x, None, x_THD.shape[2], cache, True)  # in place: for timing only
            return x

        routes["vllm rotary_embedding"] = fused
    return routes


def silu_and_mul() -> dict[str, Route]:
    def eager(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    routes: dict[str, Route] = {"torch silu, mul": eager}
    kernels = vllm_kernels()
    if kernels is not None:
        def fused(x: torch.Tensor) -> torch.Tensor:
            y = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype)
            kernels.silu_and_mul(y, x)
            return y

        routes["vllm silu_and_mul"] = fused
    return routes


def token_logprob() -> dict[str, Route]:
    return {
        "torch log_softmax, gather": lambda x, ids: torch.log_softmax(x.float(), -1).gather(1, ids[:, None])[:, 0],
        "torch cross_entropy": lambda x, ids: -F.cross_entropy(x.float(), ids, reduction="none"),
        "torch gather, logsumexp": lambda x, ids: x.float().gather(1, ids[:, None])[:, 0] - torch.logsumexp(x.float(), -1),
    }


def sample() -> dict[str, Route]:
    def race(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        p = torch.softmax(x.float(), -1)
        return p.div_(torch.empty_like(p).exponential_()).argmax(-1)

    return {"torch softmax, exponential race": race,
            "torch softmax, multinomial": lambda x, *_: torch.multinomial(torch.softmax(x.float(), -1), 1)[:, 0]}


def attention_varlen(lengths: list[int], scale: float) -> dict[str, Route]:
    def each(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = [F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in qkv), is_causal=True, scale=scale, enable_gqa=True)
                for qkv in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)]
        return torch.cat([x[0].transpose(0, 1) for x in rows])

    return {"torch scaled_dot_product_attention": each}


def attention_paged(lengths: list[int], queries: list[int], k: torch.Tensor, v: torch.Tensor, scale: float) -> dict[str, Route]:
    """Routes for the last ``queries[b]`` positions of each sequence; ``k``, ``v`` are packed ``[sum(lengths), G, D]``."""
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)

    def each(q: torch.Tensor) -> torch.Tensor:
        out = []
        for rows, keys, values in zip(q.split(queries), k.split(lengths), v.split(lengths), strict=True):
            n, m = len(rows), len(keys)
            mask = None if n == 1 else torch.ones(n, m, dtype=torch.bool).tril(m - n)
            x = F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in (rows, keys, values)), attn_mask=mask, scale=scale, enable_gqa=True)
            out.append(x[0].transpose(0, 1))
        return torch.cat(out)

    routes: dict[str, Route] = {"torch scaled_dot_product_attention": each}
    kernels = vllm_kernels() if k.device.type == "cpu" else None
    if kernels is not None:
        routes["vllm cpu_attention_with_kv_cache"] = _vllm_paged(kernels, lengths, starts, k, v, scale)
    return routes


def _vllm_paged(kernels: Any, lengths: list[int], starts: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Route:
    page, (_, groups, dim) = 32, k.shape
    isa = "vec16" if dim % 32 else "amx" if torch.cpu._is_amx_tile_supported() and k.dtype is torch.bfloat16 else "vec"
    blocks = [(n + page - 1) // page for n in lengths]
    cache = torch.zeros(sum(blocks), groups, page * 2, dim, dtype=k.dtype)
    keys, values = cache.chunk(2, dim=2)
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    slots, first = [], 0
    for b, (n, count) in enumerate(zip(lengths, blocks, strict=True)):
        table[b, :count] = torch.arange(first, first + count)
        slots.append(torch.arange(n) + first * page)
        first += count
    kernels.cpu_attn_reshape_and_cache(k, v, keys, values, torch.cat(slots), isa)
    lens = torch.tensor(lengths, dtype=torch.int32)

    def run(q: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        plan = kernels.get_scheduler_metadata(len(lengths), q.shape[1], groups, dim, lens, q.dtype, starts, True, -1, isa, True, None)
        kernels.cpu_attention_with_kv_cache(q, keys, values, out, starts, lens, scale, True, None, -1, table, 0.0, plan, None, None)
        return out

    return run
