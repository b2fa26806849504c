"""Log-probabilities: Megatron's ``vocab_parallel_cross_entropy``, and the same number for code that has logits."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vime import ops
from vime.megatron.patch import HookPoint, Refused, note

OP = "logprob"
MODULES: tuple[str, ...] = ()


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Log-probability of ``ids`` under ``logits / temperature``, fp32, shape of ``ids``.

    Args:
        logits: fp32 or bf16, ``[*, V]``, over the whole vocabulary.
        ids: int, ``[*]``.
        temperature: positive, one number or one per element of ``ids``.
    """
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.reshape(-1)
    lp_T = ops.token_logprob(logits.reshape(-1, logits.shape[-1]), ids.reshape(-1), temperature)
    assert isinstance(lp_T, torch.Tensor)  # not the pair that is returned with the entropy
    return lp_T.view(ids.shape)


def _route(stock: Any) -> Any:
    del stock

    def vocab_parallel_cross_entropy(vocab_parallel_logits: torch.Tensor, target: torch.Tensor,
                                     label_smoothing: float = 0.0, tp_group: Any = None) -> torch.Tensor:
        if label_smoothing:
            raise Refused(f"label_smoothing is {label_smoothing}; only 0 is aligned")
        if tp_group is not None and tp_group.size() > 1:
            raise Refused(f"cross entropy at tensor parallel size {tp_group.size()} is not aligned; only 1 is")
        note(OP)
        return -token_logprobs(vocab_parallel_logits, target)

    return vocab_parallel_cross_entropy


def hook_points() -> list[HookPoint]:
    return [HookPoint("megatron.core.tensor_parallel", "vocab_parallel_cross_entropy", _route),
            HookPoint("megatron.core.tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy", _route)]


def refusals(module: Any, config: Any) -> Iterator[str]:
    del module, config
    yield from ()
