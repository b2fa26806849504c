"""One rank of the trainer: a Megatron model, its optimizer, and the commands the pool may give.

Runs in a process of its own (:mod:`vime.rl.ranks`) and never talks to the engine except through the weight
transport it is told to use.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vime.rl.batch import Trajectory
from vime.rl.config import TrainConfig, read_hf_config, trainer_device
from vime.rl.forward import response_logprobs
from vime.rl.loss import policy_loss
from vime.rl.optimizer import Optimizer
from vime.rl.packing import plan_microbatches


@dataclasses.dataclass(frozen=True)
class TrainerSpec:
    """What every rank is told at the start. ``store`` is (host, port) of the rendezvous, None for one rank."""

    config: TrainConfig
    store: tuple[str, int] | None = None


@dataclasses.dataclass
class StepStats:
    """One optimizer step of one rank.

    ``ratio_off`` counts tokens whose log-probability in the training forward differs from that of the no-grad pass;
    ``without_gradient`` names parameters whose gradient is zero everywhere.
    """

    loss: float
    grad_norm: float
    tokens: int
    microbatches: int
    ratio_off: int
    without_gradient: list[str]


class Trainer:
    """Built once a rank. Arguments of the methods are the same on all ranks unless said."""

    def __init__(self, rank: int, world_size: int, spec: TrainerSpec) -> None:
        import vime
        from vime.determinism import configure
        from vime.megatron import parallel
        from vime.megatron.model import build_model, load_weights

        self.config, self.rank, self.world_size = spec.config, rank, world_size
        config = spec.config
        self.device = trainer_device(config, rank)
        if config.device == "cuda":
            torch.cuda.set_device(self.device)
        self.hf_config = read_hf_config(config.hf_checkpoint)
        store = None
        if spec.store is not None:
            store = torch.distributed.TCPStore(*spec.store, is_master=False)
        self.determinism = configure(seed=config.seed, deterministic=config.deterministic_mode)
        parallel.initialize(rank, world_size, store, self.device, config.seed)
        if config.aligned:
            vime.enable(config.ops)
        self.packed = vime.is_enabled("attention")
        self.model = build_model(self.hf_config, getattr(torch, config.dtype), self.device, config.recompute)
        load_weights(self.model, _open_checkpoint(Path(config.hf_checkpoint)), self.hf_config)
        self._optimizer: Optimizer | None = None

    @property
    def optimizer(self) -> Optimizer:
        """Made when first needed: a rank that only evaluates log-probabilities needs no fp32 gradients and moments."""
        if self._optimizer is None:
            config = self.config
            self._optimizer = Optimizer(self.model, config.lr, config.weight_decay, config.clip_grad)
        return self._optimizer

    def contract(self) -> dict[str, Any]:
        """The contract in effect, as a dictionary."""
        from vime.megatron.effective import contract

        return contract(self.model).to_dict()

    def logprobs(self, batch: Sequence[Trajectory]) -> list[np.ndarray]:
        """Log-probabilities of the response tokens, fp32 ``[R]`` each, in order of ``batch``, without gradient."""
        out: list[np.ndarray] = []
        with torch.no_grad():
            for microbatch in self._microbatches(batch):
                flat_R = response_logprobs(self.model, microbatch, self.config.rollout_temperature, self.packed)
                out.extend(_split(flat_R, microbatch))
        return out

    def train_step(self, batch: Sequence[Trajectory], total_tokens: int) -> StepStats:
        """Loss, backward and one optimizer step on this rank's ``batch``; ``total_tokens`` counts those of all ranks."""
        optimizer, config = self.optimizer, self.config
        optimizer.zero_grad()
        loss_sum, ratio_off, tokens, count = 0.0, 0, 0, 0
        for microbatch in self._microbatches(batch):
            logprob_R = response_logprobs(optimizer.ddp, microbatch, config.rollout_temperature, self.packed)
            old_R = torch.from_numpy(np.concatenate([t.old_logprobs for t in microbatch])).to(logprob_R.device)
            advantage_R = torch.tensor([t.advantage for t in microbatch for _ in t.response_ids], dtype=torch.float32,
                                       device=logprob_R.device)
            loss, ratio_R = policy_loss(logprob_R, old_R, advantage_R, total_tokens, config.eps_clip, config.eps_clip_high)
            (loss * self.world_size).backward()  # Megatron's data parallel divides the sum of gradients by the ranks
            loss_sum += float(loss.detach())
            ratio_off += int((logprob_R.detach().view(torch.int32) != old_R.view(torch.int32)).sum())
            tokens += ratio_R.numel()
            count += 1
        optimizer.finish_gradients()
        without_gradient = optimizer.parameters_without_gradient()
        norm = optimizer.step()
        return StepStats(loss_sum, norm, tokens, count, ratio_off, without_gradient)

    def _microbatches(self, batch: Sequence[Trajectory]) -> Iterator[list[Trajectory]]:
        plan = plan_microbatches([len(t.token_ids) for t in batch], self.config.max_tokens_per_gpu,
                                 max_sequences=None if self.packed else 1)
        for indices in plan:
            yield [batch[i] for i in indices]

    def hf_weights(self) -> dict[str, torch.Tensor]:
        """The weights under their Hugging Face names, in the model's dtype."""
        from vime.weights.families import family_for

        megatron = {name: p.detach() for name, p in self.model.named_parameters()}
        return family_for(self.hf_config).megatron_to_hf(megatron, self.hf_config)

    def counters(self) -> dict[str, int]:
        """Calls per implementation in this process since the start."""
        from vime.ops import registry

        return registry.counters()


def _split(flat_R: torch.Tensor, batch: Sequence[Trajectory]) -> list[np.ndarray]:
    flat = flat_R.float().cpu().numpy()
    ends = np.cumsum([t.response_len for t in batch])[:-1]
    return [part.copy() for part in np.split(flat, ends)]


def _open_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors checkpoint."""
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state.update(load_file(file))
    return state
