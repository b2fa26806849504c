"""FlashAttention-3 from vLLM's wheel, at one split, and torch's flash backward fed with its output.

The kernel library is loaded by itself: no module of vLLM is imported, so a trainer without an engine can use it. Three
things about a launch choose another kernel and are pinned here:

- ``num_splits=1``: keys are never split over programs.
- The longest query, an upper bound, is never given as less than ``MIN_QUERY_BOUND``: a batch whose packed query rows
  fit 64 takes a one-warpgroup tile, and a batch of single queries drops the causal mask and takes its key tile with it.
- Pages of up to ``MAX_PAGE`` positions: larger ones may be fetched by TMA under another tile.
"""
from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

MIN_QUERY_BOUND = 128
MAX_PAGE = 64


class KernelMissing(RuntimeError):
    """The library that carries the kernel is not installed, or not for this chip."""


def library() -> Path:
    """Where the kernel library lies. Raises :class:`KernelMissing`."""
    spec = importlib.util.find_spec("vllm")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    for root in roots:
        for path in sorted(Path(root).glob("vllm_flash_attn/_vllm_fa3_C*.so")):
            return path
    where = roots[0] if roots else "no vllm package"
    raise KernelMissing(
        f"FlashAttention-3 not found ({where}). The CUDA attention of vime needs the kernel library of vllm==0.26.0; "
        "install it (pip install 'vime[gpu]')."
    )


def load() -> None:
    """Load the kernel library once. Raises :class:`KernelMissing`."""
    if hasattr(torch.ops._vllm_fa3_C, "fwd"):
        return
    capability = torch.cuda.get_device_capability()
    if capability[0] != 9:
        raise KernelMissing(
            f"FlashAttention-3 runs on compute capability 9.x, this device has {capability[0]}.{capability[1]}. "
            "Use a Hopper GPU (H100, H200), or --device cpu."
        )
    torch.ops.load_library(str(library()))


def _launch(
    q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query_start_B1: torch.Tensor, key_start_B1: torch.Tensor | None,
    used_keys_B: torch.Tensor | None, block_table_BM: torch.Tensor | None, max_query: int, max_key: int, scale: float,
    causal: bool, splits: int, out_THD: torch.Tensor | None, plan: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    load()
    o_THD, lse_HT, _, _ = torch.ops._vllm_fa3_C.fwd(
        q_THD, k, v, None, None, None, out_THD, query_start_B1, key_start_B1, None, None, used_keys_B, max_query, max_key,
        block_table_BM, None, None, None, None, None, None, None, None, scale, causal, -1, -1, 0.0, True, plan, splits,
        None, 0, None, 1, 0, None,
    )
    return o_THD, lse_HT


def forward(
    q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query_start_B1: torch.Tensor, max_query: int, max_key: int,
    scale: float, causal: bool, *, key_start_B1: torch.Tensor | None = None, used_keys_B: torch.Tensor | None = None,
    block_table_BM: torch.Tensor | None = None, out_THD: torch.Tensor | None = None, plan: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One pinned launch. Packed: ``key_start_B1``; paged: ``used_keys_B`` and ``block_table_BM`` (k, v: [pages, page, G, D]).

    Returns (o_THD, lse_HT): bf16 and fp32. ``max_query`` and ``max_key`` are upper bounds. ``plan``: of :func:`paged_plan` for the
    same bounds and lengths; without one the launch makes its own.
    """
    return _launch(q_THD, k, v, query_start_B1, key_start_B1, used_keys_B, block_table_BM, max(max_query, MIN_QUERY_BOUND),
                   max_key, scale, causal, 1, out_THD, plan)


def paged_plan(
    heads: int, groups: int, head_dim: int, page: int, max_query: int, max_key: int, query_start_B1: torch.Tensor, used_keys_B: torch.Tensor,
) -> torch.Tensor:
    """Which program takes which rows, worked out once for all layers of a step. It moves work, and no key from its place."""
    load()
    return torch.ops._vllm_fa3_C.get_scheduler_metadata(
        used_keys_B.shape[0], max(max_query, MIN_QUERY_BOUND), max_key, heads, groups, head_dim, head_dim, torch.bfloat16, used_keys_B,
        query_start_B1, None, None, None, None, page, 0, True, -1, -1, False, 1, None, 0,
    )


def stock_paged(
    q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query_start_B1: torch.Tensor, max_query: int, max_key: int, scale: float,
    used_keys_B: torch.Tensor, block_table_BM: torch.Tensor,
) -> torch.Tensor:
    """FA3 as it splits and tiles by itself: what the proof's control sweeps and the benchmark compares with."""
    return _launch(q_THD, k, v, query_start_B1, None, used_keys_B, block_table_BM, max_query, max_key, scale, True, 0, None)[0]


def stock_packed(
    q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, start_B1: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    """The packed twin of :func:`stock_paged`."""
    return _launch(q_THD, k_TGD, v_TGD, start_B1, start_B1, None, None, longest, longest, scale, True, 0, None)[0]


@contextmanager
def _deterministic() -> Iterator[None]:
    """Torch's flash backward adds with atomics unless deterministic algorithms are on."""
    mode, fill = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def backward(
    do_THD: torch.Tensor, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, o_THD: torch.Tensor,
    lse_HT: torch.Tensor, start_B1: torch.Tensor, longest: int, scale: float, causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of the packed form, bitwise repeatable."""
    unused = torch.zeros(2, dtype=torch.uint64, device=q_THD.device)
    with _deterministic():
        return torch.ops.aten._flash_attention_backward(
            do_THD, q_THD, k_TGD, v_TGD, o_THD, lse_HT, start_B1, start_B1, longest, longest, 0.0, causal,
            unused, unused[:1], scale=scale,
        )
