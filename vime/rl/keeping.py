"""What a trainer rank can say, write down and take back of its own state. Mixed into :class:`vime.rl.trainer.Trainer`."""
from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from vime.rl import state
from vime.rl.config import TrainConfig

#: File of all that is no tensor in an optimizer (rates, betas, numbers of steps); its digest goes under this name beside the tensors'.
OPTIMIZER = "optimizer.json"


def text_digest(text: bytes) -> str:
    return "sha256:" + hashlib.sha256(text).hexdigest()


class KeepsState:
    """Needs ``model``, ``optimizer``, ``config``, ``device`` and ``rank`` of its trainer."""

    model: Any
    config: TrainConfig
    device: str
    rank: int
    determinism: dict[str, Any]

    @property
    def optimizer(self) -> Any:
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """What this process found and set for determinism, and how many threads it has."""
        return {"determinism": self.determinism, "threads": torch.get_num_threads()}

    def state_digests(self) -> dict[str, dict[str, str]]:
        """Digests of the optimizer's state (fp32 masters and moments included) and of every random state."""
        return {"optimizer": state.tree_digests(self.optimizer.state_dict()) if self._owns_state else {},
                "rng": state.rng_digests(self.device)}

    @property
    def _owns_state(self) -> bool:
        """Data-parallel ranks hold the same weights and optimizer; with expert parallelism each holds its own experts."""
        return self.rank == 0 or self.config.expert_model_parallel_size > 1

    def _tensors(self) -> dict[str, torch.Tensor]:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {f"model.{name}": tensor.detach() for name, tensor in named}

    def save_state(self, folder: str) -> dict[str, Any]:
        """Write weights and optimizer into ``folder/rank-NNNNN`` and return ``{"rng": ..., "digests": ...}``.

        There is a digest of every tensor by its name, and of the file :data:`OPTIMIZER`.

        Raises:
            vime.weights.folders.CheckpointError: it could not be written; nothing of it is left.
        """
        if not self._owns_state:
            return {"rng": state.rng_state(self.device), "digests": {}}
        from vime.weights.writer import HfWriter

        skeleton, moments = state.flatten(self.optimizer.state_dict())
        tensors = self._tensors() | {f"optimizer.{name}": t for name, t in moments.items()}
        target = Path(folder) / f"rank-{self.rank:05d}"
        with HfWriter(target, {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
        settings = json.dumps(skeleton).encode()
        for name, text in (("config.json", b"{}"), (OPTIMIZER, settings)):
            with open(target / name, "wb") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
        digests = {n: state.tensor_digest(t.cpu()) for n, t in tensors.items()} | {OPTIMIZER: text_digest(settings)}
        return {"rng": state.rng_state(self.device), "digests": digests}

    def load_state(self, folder: str, digests: list[dict[str, str]]) -> None:
        """Take weights and optimizer of the rank that wrote ``folder``; ``digests`` are those of all ranks.

        Random states are restored apart (:meth:`restore_rng`), since bringing the engine up to date draws numbers.

        Raises:
            vime.rl.state.StateError: another model, or what is here afterwards is not what was written.
        """
        from vime.weights.checkpoint import HfCheckpoint
        from vime.weights.folders import read_json

        owner = self.rank if self._owns_state else 0
        saved = HfCheckpoint(Path(folder) / f"rank-{owner:05d}")
        mine = self._tensors()
        theirs = {name for name in saved if name.startswith("model.")}
        if set(mine) != theirs:
            odd = sorted(set(mine) ^ theirs)[0]
            raise state.StateError(f"the checkpoint {folder} is of another model: {odd} is on one side only")
        with torch.no_grad():
            for name, tensor in mine.items():
                value = saved[name]
                if value.shape != tensor.shape or value.dtype != tensor.dtype:
                    raise state.StateError(f"the checkpoint {folder} is of another model: {name} is {value.dtype} {list(value.shape)} there, "
                                           f"{tensor.dtype} {list(tensor.shape)} here")
                tensor.copy_(value)
        moments = {n.removeprefix("optimizer."): saved[n].clone() for n in saved if n.startswith("optimizer.")}
        file = Path(folder) / f"rank-{owner:05d}" / OPTIMIZER
        skeleton = read_json(file)
        self.optimizer.load_state_dict(state.unflatten(skeleton, moments))
        again, restored = state.flatten(self.optimizer.state_dict())
        here = self._tensors() | {f"optimizer.{n}": t for n, t in restored.items()}
        now = {n: state.tensor_digest(t.cpu()) for n, t in here.items()}  # the form that can be checked before a rank is started
        now[OPTIMIZER] = text_digest(file.read_bytes())
        differing = sorted(n for n in set(now) | set(digests[owner]) if now.get(n) != digests[owner].get(n))
        if differing or json.loads(json.dumps(again)) != skeleton:
            raise state.StateError(f"the state in {folder} was not restored as it was written: "
                                   f"{differing[0] if differing else 'settings of the optimizer'} differs; the run cannot be continued exactly")

    def restore_rng(self, rng: list[dict[str, Any]]) -> None:
        """Set the random states to this rank's among those of all ranks."""
        state.set_rng_state(rng[self.rank], self.device)
