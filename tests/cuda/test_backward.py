"""Gradients on CUDA: near float64 autograd, the same bits on every rerun."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vime import ops
from vime.ops import reference


def _data(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.float32)


def _case(name: str) -> tuple[Callable, Callable, list[torch.Tensor]]:
    ids = torch.randint(0, 50, (333,), device="cuda")
    angles = _data(333, 32)
    return {
        "linear": (ops.linear, reference.linear, [_data(333, 576), _data(960, 576)]),
        "linear_bias": (ops.linear, reference.linear, [_data(33, 576), _data(960, 576), _data(960)]),
        "rms_norm": (lambda x, w: ops.rms_norm(x, w, 1e-5), lambda x, w: reference.rms_norm(x, w, 1e-5), [_data(333, 576), _data(576)]),
        "add_rms_norm": (lambda x, r, w: torch.cat(ops.add_rms_norm(x, r, w, 1e-5)),
                         lambda x, r, w: torch.cat(reference.add_rms_norm(x, r, w, 1e-5)), [_data(333, 576), _data(333, 576), _data(576)]),
        "rope": (lambda x: ops.apply_rope(x, angles.cos(), angles.sin()),
                 lambda x: reference.apply_rope(x, angles.cos(), angles.sin()), [_data(333, 9, 64)]),
        "silu_and_mul": (ops.silu_and_mul, reference.silu_and_mul, [_data(333, 3072)]),
        "token_logprob": (lambda x: ops.token_logprob(x, ids, 0.7), lambda x: reference.token_logprob(x, ids, 0.7), [_data(333, 9001)]),
        "log_softmax": (lambda x: ops.log_softmax(x, 0.7), lambda x: reference.log_softmax(x, 0.7), [_data(33, 9001)]),
        "embedding": (lambda w: ops.embedding(ids, w), lambda w: reference.embedding(ids, w), [_data(50, 576)]),
    }[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["linear", "linear_bias", "rms_norm", "add_rms_norm", "rope", "silu_and_mul", "token_logprob",
                                  "log_softmax", "embedding"])
def test_gradients(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, exact, data = _case(name)
    leaves = [x.to(dtype).requires_grad_() for x in data]
    upstream = None

    def gradients(run: Callable, inputs: list[torch.Tensor], reference_run: bool = False) -> list[torch.Tensor]:
        nonlocal upstream
        out = run(*inputs)
        if upstream is None:
            upstream = torch.randn_like(out)
        return list(torch.autograd.grad(out, inputs, upstream.to(out.dtype)))

    first = gradients(ours, leaves)
    for _ in range(3):
        for again, want in zip(gradients(ours, leaves), first, strict=True):
            assert torch.equal(again, want), "a rerun gave other bits"
    wanted = gradients(exact, [x.detach().double().requires_grad_() for x in leaves])
    for got, want in zip(first, wanted, strict=True):
        error = float((got.double() - want).norm() / want.norm())
        assert error < (2e-6 if dtype == torch.float32 else 1e-2), error
