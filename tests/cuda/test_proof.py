"""Every operation, at the shapes of every model: rows do not depend on M, place, packing, pages or chunks."""
from __future__ import annotations

import pytest
import torch

from vime.ops.cuda import proof, proof_attention
from vime.ops.cuda.shapes import MODELS

SWEEPS = {
    "linear": (proof.linears, 0.005),
    "elementwise": (proof.elementwise, 0.006),
    "vocabulary": (proof.vocabulary, 1e-5),
    "attention": (proof_attention.attention, 0.006),
    "attention_backward": (proof_attention.attention_backward, 0.01),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sweep", SWEEPS)
def test_rows_are_invariant_and_right(model: str, sweep: str) -> None:
    run, tolerance = SWEEPS[sweep]
    torch.manual_seed(0)
    findings = list(run(MODELS[model]))
    assert findings and all(f.rows > 0 for f in findings)
    bad = [f for f in findings if f.differing or (f.error is not None and not f.error < tolerance)]
    assert not bad, "\n".join(map(str, bad))
