"""Ranks of one engine step together or not at all.

A step runs collectives in every expert layer, so a rank without requests has to run along. Each round of the serving loop
starts here: the ranks tell each other whether they have requests and which weights they hold.
"""
from __future__ import annotations

from typing import Any

import torch

from vime.vllm.protocol import EngineError


def together(engine: Any) -> bool:
    """Meet the other ranks: True if any has requests, and then every one has to step. Every rank must call it.

    Args:
        engine: this rank's :class:`vime.vllm.engine.Engine`.

    Raises:
        EngineError: the ranks do not hold one version, or one is not ready while requests run (these are dropped); or a rank
            is gone (this one is ``failed`` then).
    """
    import torch.distributed as dist
    from vllm.distributed import get_ep_group

    mine = torch.tensor([engine.busy, engine.version, engine.state == "ready"], dtype=torch.int64)
    found = [torch.empty_like(mine) for _ in range(engine.ranks)]
    try:
        dist.all_gather(found, mine, group=get_ep_group().cpu_group)
    except RuntimeError as error:
        raise engine.fail_for_good(f"rank {engine.config.data_parallel_rank} of {engine.ranks} lost another rank: "
                          f"{str(error).splitlines()[0]}") from error
    busy, versions, ready = ([int(f[i]) for f in found] for i in range(3))
    if not any(busy):
        return False
    if len(set(versions)) > 1 or not all(ready):
        engine.abort(list(engine._requests))
        raise EngineError(f"cannot generate: the ranks of this engine hold weight versions {versions}, ready {ready}; send the same "
                          "full update to each rank")
    engine.engine.should_execute_dummy_batch = not engine.busy
    return True
