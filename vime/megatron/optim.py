"""Megatron's own data parallel and optimizer, with a gradient norm whose bits can be compared between runs.

Gradients are accumulated and reduced in fp32 (or in the model's dtype, if asked); with Adam, bf16 parameters have fp32 master
copies. Megatron's norm goes through ``torch.norm``, whose additions depend on the number of threads, and comes back as a
Python float; so norm and clipping are done here, and the rest (copying gradients, AdamW, master weights) is Megatron's.
With ``sgd`` the update is :mod:`vime.megatron.stateless`, which keeps nothing.
"""
from __future__ import annotations

import dataclasses
import itertools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from vime.errors import VimeError
from vime.megatron.stateless import NAME, StatelessSGD

_CHUNK = 1 << 16
_DEVICE_CHUNK = 1 << 24


class TrainingDiverged(VimeError):
    """A gradient is not finite. Weights and optimizer state stay as they were."""


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        grad_norm: global norm of the gradients before clipping.
        grad_norm_bits: its float64 bits, 16 hex digits.
        clip_coefficient: factor that the gradients were scaled by (1.0: not clipped).
        lost_updates, updates: elements whose update was too small to change them, of how many, of the weights that this rank is
            the first to hold: their sums over ranks are those of the model. None where small updates add up in fp32 master weights.
    """

    grad_norm: float
    grad_norm_bits: str
    clip_coefficient: float
    lost_updates: int | None = None
    updates: int | None = None


def sum_of_squares(grad: torch.Tensor) -> float:
    """Sum of squares in float64, in one order, whatever the number of threads."""
    flat = grad.detach().reshape(-1)
    if flat.device.type != "cpu":
        return sums_of_squares([grad])[0]
    values, total = flat.float().numpy(), 0.0
    for start in range(0, values.size, _CHUNK):
        chunk = values[start:start + _CHUNK].astype(np.float64)
        total += float(np.sum(np.square(chunk, out=chunk)))  # numpy adds pairwise, on one thread
    return total


def sums_of_squares(grads: Sequence[torch.Tensor]) -> list[float]:
    """:func:`sum_of_squares` of each; on a device with one wait for all of them."""
    if not grads or grads[0].device.type == "cpu":
        return [sum_of_squares(grad) for grad in grads]
    parts, counts = [], []
    for grad in grads:  # a device has no number of threads to depend on
        flat = grad.detach().reshape(-1)
        found = [flat[start:start + _DEVICE_CHUNK].double().square_().sum() for start in range(0, flat.numel(), _DEVICE_CHUNK)]
        parts += found
        counts.append(len(found))
    values = iter(torch.stack(parts).tolist())
    return [math.fsum(itertools.islice(values, count)) for count in counts]


def expert_names(config: Any) -> tuple[Callable[[str], str], Any]:
    """What gives a parameter its name in the whole model, and the process group that experts are spread over, or None."""
    from megatron.core import parallel_state

    from vime.megatron.experts import global_name

    ranks = parallel_state.get_expert_model_parallel_world_size()
    if ranks == 1 or not config.num_moe_experts:
        return str, None
    rank, local = parallel_state.get_expert_model_parallel_rank(), config.num_moe_experts // ranks
    return (lambda name: global_name(name, rank, local)), parallel_state.get_expert_model_parallel_group()


def first_replica(parameter: Any) -> bool:
    """Whether this rank is the first of those that hold replicas of ``parameter``."""
    from megatron.core import parallel_state

    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_rank() == 0
    return parallel_state.get_expert_data_parallel_rank() == 0  # of an expert, which Megatron marks so


class Optimizer:
    """AdamW by Megatron, or a stateless update, around a model in Megatron's data parallel.

    Args:
        model: a Megatron module whose parameters all have ``model.config.params_dtype``.
        lr, weight_decay, betas, eps: of AdamW (``betas`` and ``eps`` of it only). Norms and biases are not decayed.
        clip_grad: largest global gradient norm; 0 for no clipping.
        kind: ``"adam"`` or ``"sgd"``.
        fp32_gradients: accumulate and reduce in fp32; else in the model's dtype, rounded after every microbatch and once
            after the sum over ranks.
    """

    def __init__(self, model: Any, lr: float, weight_decay: float = 0.0, clip_grad: float = 1.0,
                 betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, kind: str = "adam", fp32_gradients: bool = True) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        if kind not in ("adam", NAME):
            raise ValueError(f"optimizer is {kind!r}; expected adam or {NAME}")
        layout = DistributedDataParallelConfig(grad_reduce_in_fp32=fp32_gradients, overlap_grad_reduce=False,
                                               use_distributed_optimizer=False)
        self.clip_grad = clip_grad
        self.ddp = DistributedDataParallel(model.config, layout, model)
        self.ddp.broadcast_params()
        self._squares: dict[str, float] = {}
        self._released = False
        self._global, self._spread = expert_names(model.config)
        if kind == "adam":
            self._optimizer = self._adam(model.config.params_dtype, lr, weight_decay, betas, eps)
        else:
            named = [(name, p) for name, p in self.ddp.module.named_parameters() if p.requires_grad]
            self._optimizer = StatelessSGD([(p, p.dim() > 1 and not name.endswith(".bias")) for name, p in named], lr, weight_decay, first_replica)

    def _adam(self, dtype: torch.dtype, lr: float, weight_decay: float, betas: tuple[float, float], eps: float) -> Any:
        from megatron.core.optimizer import (
            OptimizerConfig,
            get_megatron_optimizer,
            get_standard_config_overrides,
        )

        settings = OptimizerConfig(optimizer="adam", lr=lr, min_lr=lr, weight_decay=weight_decay, adam_beta1=betas[0],
                                   adam_beta2=betas[1], adam_eps=eps, clip_grad=0.0, params_dtype=dtype,
                                   bf16=dtype is torch.bfloat16, use_distributed_optimizer=False)
        # Said explicitly, since 0.16.1 by itself makes no group without decay and 0.19.2 does. The multiplier of a group
        # is usually applied by Megatron's scheduler, which a run with constant settings has no use for.
        optimizer = get_megatron_optimizer(settings, [self.ddp], config_overrides=get_standard_config_overrides(settings))
        for group in optimizer.param_groups:
            group["weight_decay"] = weight_decay * group["wd_mult"]
            if "fused" in group:  # torch's AdamW, as on a CPU: one pass over the parameters instead of ten
                group["fused"] = True
        return optimizer

    def zero_grad(self, microbatches: int | None = None) -> None:
        """Before the first backward. ``microbatches`` of this step, where the same on all ranks and known: with one, experts
        spread over all ranks need less memory (:func:`vime.megatron.gradients.one_microbatch`). Changes no bit."""
        if self._released:
            self.ddp.restore_grad_buffers(synchronize=self._on_gpu)
            self._released = False
        self.ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        if microbatches == 1 and self._spread is not None:
            from vime.megatron import gradients

            gradients.one_microbatch(self.ddp)

    def release_gradients(self) -> None:
        """Give up the memory of the gradients until :meth:`zero_grad`; those of the last step are gone then."""
        if not self._released:
            self.ddp.offload_grad_buffers(synchronize=self._on_gpu, empty_cache=self._on_gpu)
            self._released, self._squares = True, {}

    @property
    def _on_gpu(self) -> bool:
        return next(self.ddp.parameters()).device.type == "cuda"

    def finish_gradients(self) -> None:
        """Reduce the gradients over the data-parallel ranks (their mean, as Megatron's data parallel does it)."""
        self.ddp.finish_grad_sync()
        trained = self._trained()
        squares = sums_of_squares([p.main_grad for _, p in trained])
        self._squares = {name: square for (name, _), square in zip(trained, squares, strict=True)}

    def _trained(self) -> list[tuple[str, Any]]:
        """Trained parameters of this rank under the local spec's names in the whole model (experts by their id in the model)."""
        from vime.weights.megatron_state import canonical

        return [(self._global(canonical(name)), p) for name, p in self.ddp.module.named_parameters() if p.requires_grad]

    def _everywhere(self) -> dict[str, float]:
        """Squares of all gradients, those of experts on other ranks too. Collective where experts are spread."""
        if self._spread is None:
            return self._squares
        held: list[dict[str, float]] = [{}] * self._spread.size()
        torch.distributed.all_gather_object(held, self._squares, group=self._spread)
        return {name: square for part in held for name, square in part.items()}

    def parameters_without_gradient(self) -> list[str]:
        """Names of trained parameters whose whole gradient is zero, after :meth:`finish_gradients`."""
        return [name for name, square in self._squares.items() if square == 0.0]

    def gradient_digests(self) -> dict[str, str]:
        """Digest of every reduced gradient by its parameter's name; after :meth:`finish_gradients`, before :meth:`step`."""
        from vime.weights.lanes import digests

        if self._released:
            raise RuntimeError("the gradients of the last step were given up")
        return digests({name: p.main_grad for name, p in self._trained()})

    def step(self) -> StepResult:
        """Clip and update the weights, from the gradients of :meth:`finish_gradients`.

        Raises:
            RuntimeError: :meth:`finish_gradients` has not been called since the last step.
            TrainingDiverged: a gradient is not finite; nothing is updated. The parameter is named.
        """
        if not self._squares:
            raise RuntimeError("step() without gradients: call finish_gradients() after the backward")
        squares = self._everywhere()
        self._squares = {}
        bad = [name for name, square in squares.items() if not math.isfinite(square)]
        if bad:
            raise TrainingDiverged(
                f"the gradient of {bad[0]} is not finite ({len(bad)} parameter(s) in all); nothing was updated. Likely: NaN in "
                "the weights, or a learning rate that is too high")
        norm = math.sqrt(math.fsum(squares.values()))  # rounded once, so the same wherever each expert lives
        coefficient = self.clip_grad / (norm + 1e-6) if 0 < self.clip_grad < norm else 1.0
        result = StepResult(norm, struct.pack(">d", norm).hex(), coefficient)
        if isinstance(self._optimizer, StatelessSGD):
            updates, lost = self._optimizer.step(coefficient)
            return dataclasses.replace(result, lost_updates=lost, updates=updates)
        if coefficient != 1.0:
            torch._foreach_mul_([p.main_grad for _, p in self._trained()], coefficient)  # one launch for many
        self._optimizer.step()
        return result

    def state_dict(self) -> Any:
        """What a checkpoint has to hold: a tree of dictionaries, lists, numbers and tensors."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Take what :meth:`state_dict` gave, of an optimizer of the same kind on the same model."""
        self._optimizer.load_state_dict(state)
