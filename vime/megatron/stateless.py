"""A stateless update: plain gradient descent on the weights as they are, without masters or moments.

The memory of a run is then weights and gradients, which is what makes the largest models of the gates fit. For one element,
every operation in fp32 and rounded there (no fused multiply-add), ``c`` the factor of clipping:

    g = c * float(gradient);  g = g + decay * float(w)  (where the tensor is decayed);  w' = rn(float(w) - lr * g)

``rn`` rounds to the dtype of the weight, to nearest, ties to even. So an update of less than half a unit in the last place of
a bf16 weight (about 1/512 of it) leaves the weight as it is, and is not kept for later: there is nothing to keep it in. How
many elements that was is counted. The bits depend on nothing but the element, so not on a split of the tensor either.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vime.errors import BadInput

NAME = "sgd"
_SLICE = 1 << 24  # elements that have fp32 copies at once


class OtherOptimizer(BadInput):
    """A state that another optimizer has written."""


class StatelessSGD:
    """Gradient descent from ``main_grad``. Parameters are ``(tensor, decayed)``.

    Args:
        lr: learning rate.
        weight_decay: added to the gradient as ``weight_decay * w``, for decayed tensors.
        counted: whether the elements of a parameter count in what :meth:`step` returns. Where ranks hold replicas of one
            weight, count it on one of them, so that the sum over ranks is that of the model.
    """

    def __init__(self, parameters: Sequence[tuple[Any, bool]], lr: float, weight_decay: float = 0.0,
                 counted: Callable[[Any], bool] = lambda parameter: True) -> None:
        self.parameters, self.lr, self.weight_decay, self.counted = list(parameters), lr, weight_decay, counted

    def zero_grad(self) -> None:
        for parameter, _ in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, coefficient: float = 1.0) -> tuple[int, int]:
        """Update every weight; ``coefficient`` multiplies the gradient.

        Returns:
            How many elements that count had a gradient that is not zero, and how many of these stayed as they were.
        """
        moved, lost = 0, 0
        for parameter, decayed in self.parameters:
            weight, grad, counts = parameter.detach().view(-1), parameter.main_grad.view(-1), self.counted(parameter)
            for start in range(0, weight.numel(), _SLICE):
                a, b = self._slice(weight[start:start + _SLICE], grad[start:start + _SLICE], coefficient, decayed, counts)
                moved, lost = moved + a, lost + b
        return moved, lost

    def _slice(self, weight_L: torch.Tensor, grad_L: torch.Tensor, coefficient: float, decayed: bool, counts: bool) -> tuple[int, int]:
        change_L = grad_L.float().mul(coefficient)
        if decayed and self.weight_decay:
            change_L += weight_L.float() * self.weight_decay  # a product of its own: add_ with alpha may fuse the two
        change_L *= self.lr
        new_L = (weight_L.float() - change_L).to(weight_L.dtype)
        found = 0, 0
        if counts:
            wanted_L = change_L != 0
            found = int(wanted_L.sum()), int((wanted_L & (new_L == weight_L)).sum())
        weight_L.copy_(new_L)
        return found

    def state_dict(self) -> dict[str, Any]:
        """That there is none."""
        return {"optimizer": NAME}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises :class:`OtherOptimizer` for anything but what :meth:`state_dict` gives."""
        if dict(state) != self.state_dict():
            raise OtherOptimizer(f"the state holds {', '.join(map(str, state)) or 'nothing'}; that of --optimizer {NAME} holds no tensors. "
                                 "Go on with the optimizer that wrote it")
