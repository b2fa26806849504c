"""Log-softmax and the log-probability of given tokens: the number that trainer and engine must agree on."""
from __future__ import annotations

import torch

from vime.ops import registry


def log_softmax(logits_TV: torch.Tensor, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
    """``z = float(logits) / temperature``; ``(z - max z) - log(sum exp(z - max z))``, fp32, sum in one fixed order.

    Args:
        logits_TV: fp32 or bf16, ``[T, V]``.
        temperature: positive, one number or fp32 ``[T]``.

    Returns:
        fp32 ``[T, V]``. Differentiable in ``logits_TV``.
    """
    _check("log_softmax", logits_TV)
    return registry.call("logprob", "log_softmax", logits_TV, logits_TV, _rows("log_softmax", temperature, logits_TV))


def token_logprob(logits_TV: torch.Tensor, ids_T: torch.Tensor, temperature: float | torch.Tensor = 1.0,
                  return_entropy: bool = False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``log_softmax(logits, temperature)[t, ids[t]]``, the same bits, without storing the rest.

    Args:
        logits_TV, temperature: as in :func:`log_softmax`.
        ids_T: int ``[T]``, ``0 <= id < V``.
        return_entropy: also return ``H_T = -sum p log p`` (fp32; carries no gradient).

    Returns:
        fp32 ``[T]``, or ``(lp_T, entropy_T)``. ``lp_T`` is differentiable in ``logits_TV``.
    """
    _check("token_logprob", logits_TV)
    if ids_T.shape != logits_TV.shape[:1] or ids_T.is_floating_point():
        raise ValueError(f"token_logprob: ids {tuple(ids_T.shape)} {ids_T.dtype} do not fit logits {tuple(logits_TV.shape)}; "
                         "expected integers [T]")
    lp_T, entropy_T = registry.call("logprob", "token_logprob", logits_TV, logits_TV, ids_T,
                                    _rows("token_logprob", temperature, logits_TV), bool(return_entropy))
    return (lp_T, entropy_T) if return_entropy else lp_T


def _check(name: str, logits_TV: torch.Tensor) -> None:
    if logits_TV.dim() != 2:
        raise ValueError(f"{name}: logits must be [T, V], found {tuple(logits_TV.shape)}; flatten leading dimensions")


def _rows(name: str, temperature: float | torch.Tensor, logits_TV: torch.Tensor) -> torch.Tensor:
    rows = logits_TV.shape[0]
    if not isinstance(temperature, torch.Tensor):
        if not temperature > 0:
            raise ValueError(f"{name}: temperature must be positive, found {temperature}")
        return torch.full((rows,), float(temperature), dtype=torch.float32, device=logits_TV.device)
    if temperature.shape != (rows,):
        raise ValueError(f"{name}: temperature {tuple(temperature.shape)} does not fit {rows} rows")
    return temperature.to(logits_TV.device, torch.float32)
