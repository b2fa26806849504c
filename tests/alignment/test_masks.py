"""Masks of dumps in which log-probabilities have another shape than the tokens."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from alignment.compare import compare_runs
from alignment.verdict import Status

GENERATOR = np.random.default_rng(5)
TOKENS = GENERATOR.integers(0, 50, (2, 6))
MASK = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
VALUES = torch.tensor(GENERATOR.normal(size=(2, 6, 50))).float().log_softmax(-1).numpy()


def dump(path, **changes):
    np.savez(path, **{"token_ids": TOKENS, "mask": MASK, "logprobs": VALUES, **changes})
    return path


def padding(values, number):
    return np.where(MASK.reshape(*MASK.shape, *[1] * (values.ndim - 2)) == 1, values, number).astype(values.dtype)


def test_what_lies_in_padding_is_not_compared(tmp_path):
    a = dump(tmp_path / "a.npz", logprobs=padding(VALUES, -1.0), token_ids=padding(TOKENS, 0))
    b = dump(tmp_path / "b.npz", logprobs=padding(VALUES, -2.0), token_ids=padding(TOKENS, 7))
    verdict = compare_runs(a, b)
    assert verdict.status is Status.PASS, verdict
    assert verdict.coverage["tokens"].compared == 10 * 50


def test_what_lies_beside_it_is(tmp_path):
    other = VALUES.copy()
    other[1, 3, 8] = np.nextafter(other[1, 3, 8], 0, dtype=np.float32)
    verdict = compare_runs(dump(tmp_path / "a.npz"), dump(tmp_path / "b.npz", logprobs=other))
    assert verdict.status is Status.FAIL and verdict.first_bad is not None


@pytest.mark.parametrize("shape", [(2, 5), (3, 6), (6,)])
def test_a_mask_of_another_shape_cannot_be_judged(tmp_path, shape):
    paths = [dump(tmp_path / f"{n}.npz", mask=np.ones(shape, dtype=np.int64)) for n in "ab"]
    verdict = compare_runs(*paths)
    assert verdict.status is Status.INVALID and "mask of shape" in verdict.reason, verdict
