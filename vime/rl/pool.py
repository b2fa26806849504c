"""The trainer as the controller sees it: data-parallel ranks that answer for one whole batch."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vime.contract import Contract
from vime.rl.batch import Trajectory
from vime.rl.config import STORE_HOST, TrainConfig, trainer_env
from vime.rl.packing import balance, split_among
from vime.rl.ranks import Ranks

#: Ranks that compute nothing for this long hang: on a CPU, where a wait for another rank uses no processor time. Not on GPUs, where a
#: backward runs in a thread of its own while the first one, whose time is looked at, waits for it.
_STALL_S = 45.0
_PRELOAD = ("vime.rl.trainer",)


class TrainerPool:
    """``config.actor_num_gpus`` ranks of :class:`vime.rl.trainer.Trainer`. A context manager."""

    def __init__(self, config: TrainConfig, log_dir: str | Path | None = None) -> None:
        from vime.rl.trainer import TrainerSpec

        self.config, self.world_size = config, config.actor_num_gpus
        self._stall_s = _STALL_S if config.device == "cpu" else None
        self._store: Any = None
        address = None
        if self.world_size > 1:
            from torch.distributed import TCPStore

            self._store = TCPStore(STORE_HOST, 0, is_master=True, wait_for_workers=False)
            address = (STORE_HOST, self._store.port)
        self.ranks = Ranks(self.world_size, "vime.rl.trainer:Trainer", TrainerSpec(config, address), preload=_PRELOAD,
                           env=trainer_env(config), log_dir=log_dir, timeout_s=config.timeout_s)

    def wait_ready(self) -> TrainerPool:
        """Wait until every rank has built its model; raises as :meth:`vime.rl.ranks.Ranks.call`."""
        self.ranks.wait_ready()
        return self

    def contract(self) -> Contract:
        """The contract in effect; every rank must state the same."""
        first, *others = [Contract.from_dict(c) for c in self.ranks.call("contract")]
        for rank, other in enumerate(others, 1):
            first.require_equal(other, "trainer rank 0", f"trainer rank {rank}")
        return first

    def logprobs(self, batch: Sequence[Trajectory]) -> list[np.ndarray]:
        """Log-probabilities of the response tokens, fp32 ``[R]`` each, in order of ``batch``."""
        parts = self.ranks.call_each("logprobs", self._arguments(batch, self._split(batch)), stall_s=self._stall_s)
        found = {i: one for share, part in zip(self._split(batch), parts, strict=True) for i, one in zip(share, part, strict=True)}
        return [found[i] for i in range(len(batch))]

    def train_step(self, batch: Sequence[Trajectory]) -> list[Any]:
        """One optimizer step on the whole batch; a :class:`vime.rl.trainer.StepStats` per rank."""
        total = sum(t.response_len for t in batch)
        return self.ranks.call_each("train_step", self._arguments(batch, self._split(batch), total), stall_s=self._stall_s)

    def record_layers(self, batch: Sequence[Trajectory]) -> list[Any]:
        """Layer outputs of every token of ``batch``: one recording a rank, each of its share, in order."""
        return self.ranks.call_each("record_layers", self._arguments(batch, split_among(len(batch), self.world_size)),
                                    stall_s=self._stall_s)

    def named_weights_digest(self) -> dict[str, str]:
        """HF name -> digest of the weights."""
        return self.ranks.call("named_weights_digest")[0]

    def send_weights(self, endpoints: Any, version: int) -> dict[str, Any]:
        """Replace the weights of every rank of the engine (a list of endpoints) by the trainer's; the report of the first."""
        return self.ranks.call("send_weights", endpoints, version)[0]

    def counters(self) -> dict[str, int]:
        """Calls per implementation, summed over ranks."""
        out: dict[str, int] = {}
        for one in self.ranks.call("counters"):
            for name, n in one.items():
                out[name] = out.get(name, 0) + n
        return out

    def _split(self, batch: Sequence[Trajectory]) -> list[list[int]]:
        """Places in ``batch`` that each rank gets."""
        if self.config.balance_data:
            return balance([len(t.token_ids) for t in batch], self.world_size)
        return split_among(len(batch), self.world_size)

    @staticmethod
    def _arguments(batch: Sequence[Trajectory], split: Sequence[Sequence[int]], *extra: Any) -> list[tuple[tuple, dict]]:
        return [(([batch[i] for i in part], *extra), {}) for part in split]

    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return self.ranks.pids()

    def close(self, force: bool = False) -> None:
        """End all ranks; with ``force`` at once. Idempotent."""
        self.ranks.close(force)

    def __enter__(self) -> TrainerPool:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.close(force=kind is not None)
