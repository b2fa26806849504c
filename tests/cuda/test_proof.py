"""Every operation, at the shapes of every model: rows do not depend on M, place, packing, pages or chunks."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vime.ops import prove
from vime.ops.cuda import proof_attention
from vime.ops.cuda.proof import Sweep
from vime.ops.cuda.shapes import MODELS
from vime.ops.prove_types import CaseResult

#: operation -> largest error against float64 (bf16 rounds once at 2^-9, the log-probability is fp32)
TOLERANCE = {"linear": 5e-3, "norm": 6e-3, "rope": 5e-3, "activation": 5e-3, "embedding": 0.0, "logprob": 1e-6, "sampling": 0.0}


def check(results: Iterator[CaseResult], tolerance: float) -> None:
    found = list(results)
    assert found
    for result in found:
        assert result.rows_compared == result.rows_expected > 0, result
        assert result.differing_rows == 0 and result.first_bad is None, result
        assert result.error is None or result.error <= tolerance, result


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("op", TOLERANCE)
def test_rows_are_invariant_and_right(model: str, op: str) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        check(getattr(Sweep(MODELS[model], torch.bfloat16), op)(), TOLERANCE[op])


@pytest.mark.parametrize("model", MODELS)
def test_attention_has_one_result_a_position(model: str) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        sweep = Sweep(MODELS[model], torch.bfloat16)
        check(proof_attention.attention(sweep), 6e-3)
        check(proof_attention.attention_backward(sweep), 1e-2)


def test_the_stock_kernels_fail_the_same_sweep() -> None:
    """The control: attention as it splits by itself, sampling from a stream."""
    report = prove.run("cuda", ops=("attention", "sampling"), quick=True, subject="stock")
    differing = {case.function: case.differing_rows for case in report.cases if case.differing_rows}
    assert {"attention_paged", "sample"} <= set(differing), differing
    assert report.first_bad is not None and report.differing_rows > 0
