"""Megatron's own data parallel and optimizer around the trainer's model, on any device.

Gradients are accumulated and reduced in fp32; with bfloat16 parameters the optimizer keeps fp32 master copies.
"""
from __future__ import annotations

import contextlib
import math
from typing import Any

import torch

from vime.errors import VimeError


class TrainingDiverged(VimeError):
    """A gradient is not finite. No weight has been changed by this step."""


class Optimizer:
    """AdamW by Megatron, with clipping by the global norm.

    Args:
        model: a Megatron module in ``params_dtype``.
        lr, weight_decay, clip_grad: as Megatron's.
    """

    def __init__(self, model: Any, lr: float, weight_decay: float, clip_grad: float) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        dtype = model.config.params_dtype
        self._on_cpu = next(model.parameters()).device.type == "cpu"
        layout = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False,
                                               use_distributed_optimizer=False)
        self.ddp = DistributedDataParallel(model.config, layout, model)
        settings = OptimizerConfig(optimizer="adam", lr=lr, min_lr=lr, weight_decay=weight_decay, clip_grad=clip_grad,
                                   params_dtype=dtype, bf16=dtype is torch.bfloat16, use_distributed_optimizer=False)
        with self._names():
            self._optimizer = get_megatron_optimizer(settings, [self.ddp])

    def _names(self) -> contextlib.AbstractContextManager[None]:
        if not self._on_cpu:
            return contextlib.nullcontext()
        from vime.megatron.cpu import cuda_type_names

        return cuda_type_names()

    def zero_grad(self) -> None:
        self.ddp.zero_grad_buffer()
        self._optimizer.zero_grad()

    def finish_gradients(self) -> None:
        """Add the gradients of all data-parallel ranks."""
        self.ddp.finish_grad_sync()

    def parameters_without_gradient(self) -> list[str]:
        """Names of trained parameters whose whole gradient is zero."""
        named = self.ddp.module.named_parameters()
        return [name for name, p in named if p.requires_grad and not torch.any(p.main_grad)]

    def step(self) -> float:
        """Update the weights; returns the gradient norm before clipping.

        Raises:
            TrainingDiverged: the norm is not finite; weights and optimizer state stay as they were.
        """
        with self._names():
            bad = [name for name, p in self.ddp.module.named_parameters()
                   if p.requires_grad and not math.isfinite(float(p.main_grad.sum()))]
            if bad:
                raise TrainingDiverged(
                    f"the gradient of {bad[0]} is not finite ({len(bad)} parameters in all); nothing was updated. "
                    "Likely: NaN in the weights, or a learning rate that is too high (--lr)")
            _, norm, _ = self._optimizer.step()
        return float(norm)

    def state_dict(self) -> Any:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._optimizer.load_state_dict(state)
