"""Comparisons the operation tests share."""
from __future__ import annotations

import torch

from vime.ops.prove_types import differing_rows, relative_error


def assert_same_rows(got, want):
    bad = differing_rows(got, want)
    assert not bad.any(), f"rows {bad.nonzero().flatten().tolist()[:8]} of {len(bad)} differ"


def against_float64(ours, plain, *inputs, tolerance):
    """Forward and backward of ``ours`` against ``plain`` in float64 under torch's autograd."""
    exact_inputs = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
    got, want = ours(*inputs), plain(*exact_inputs)
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    assert relative_error(tuple(x.detach() for x in got), tuple(x.detach() for x in want)) < tolerance
    generator = torch.Generator().manual_seed(7)
    upstream = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in got]
    leaves = [x for x in inputs if x.requires_grad]
    grads = torch.autograd.grad(got, leaves, upstream)
    exact = torch.autograd.grad(want, [x for x in exact_inputs if x.requires_grad], [g.double() for g in upstream])
    for i, (g, e) in enumerate(zip(grads, exact, strict=True)):
        error = relative_error(g, e)
        assert error < 4 * tolerance, f"gradient {i}: {error}"
        assert g.dtype == leaves[i].dtype
    return grads


def leaf(*shape, dtype, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).requires_grad_()
