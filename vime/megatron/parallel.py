"""Process groups of a trainer rank: torch.distributed, Megatron's parallel state and its generator states.

Apart from the model, because a script that builds its own Megatron model brings its own.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def initialize(rank: int = 0, world_size: int = 1, store: dist.Store | None = None, device: str = "cpu",
               seed: int = 0, expert_parallel: int = 1) -> None:
    """Join the default group and set up Megatron's parallel state at TP 1, PP 1 (all ranks are data parallel).

    Experts are spread over ``expert_parallel`` neighbouring ranks and replicated ``world_size / expert_parallel`` times.

    Args:
        rank, world_size: this process among the trainer's.
        store: the rendezvous; needed for ``world_size > 1``.
        device: ``"cpu"`` (gloo) or ``"cuda"``/``"cuda:N"`` (NCCL).
        seed: for Megatron's generator states. Equal on all ranks.
        expert_parallel: ranks that share one set of experts.

    Raises:
        ValueError: more than one rank and no store, or an ``expert_parallel`` that does not divide the ranks.
        RuntimeError: Megatron's parallel state is set up already.
    """
    if expert_parallel < 1 or world_size % expert_parallel:
        raise ValueError(f"expert_parallel is {expert_parallel} for {world_size} rank(s); expected a divisor of the number of "
                         "ranks: experts are spread over that many and replicated over the rest")
    kind = torch.device(device).type
    if kind == "cpu":
        from vime.megatron import cpu

        cpu.apply()
    from megatron.core import parallel_state, tensor_parallel

    if parallel_state.model_parallel_is_initialized():
        raise RuntimeError("Megatron's parallel state is set up already in this process; call destroy() first")
    if not dist.is_initialized():
        if store is None:
            if world_size != 1:
                raise ValueError(f"world_size is {world_size}; a store (rendezvous) is needed for more than one rank")
            store = dist.HashStore()
        dist.init_process_group("gloo" if kind == "cpu" else "nccl", store=store, rank=rank, world_size=world_size)
    _spread(expert_parallel)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _spread(expert_parallel: int) -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
                                             expert_model_parallel_size=expert_parallel, expert_tensor_parallel_size=1)


def respread(expert_parallel: int) -> None:
    """Set Megatron's parallel state up anew with experts over that many ranks. Models built before are of no use after it.

    Collective in the default group. Raises ValueError for a size that does not divide the ranks.
    """
    from megatron.core import parallel_state

    world = dist.get_world_size()
    if expert_parallel < 1 or world % expert_parallel:
        raise ValueError(f"expert_parallel is {expert_parallel} for {world} rank(s); expected a divisor of the number of ranks")
    parallel_state.destroy_model_parallel()
    for group in list(c10d._world.pg_map):  # Megatron forgets them, torch does not; each keeps threads awake
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    _spread(expert_parallel)


def destroy() -> None:
    """Undo :func:`initialize`. Harmless if nothing is set up."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def single_process(device: str = "cpu", seed: int = 0) -> Iterator[None]:
    """:func:`initialize` for one rank, and :func:`destroy` at the end."""
    initialize(device=device, seed=seed)
    try:
        yield
    finally:
        destroy()
