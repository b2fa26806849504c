"""Forward and backward of every operation against float64 under torch's autograd."""
from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.helpers import against_float64, leaf
from vime import ops
from vime.ops import reference
from vime.ops.prove_types import bits

TOLERANCE = {torch.float32: 5e-7, torch.bfloat16: 4e-3}


@pytest.mark.parametrize("shape", [(7, 33, 47), (64, 96, 128), (1, 576, 1536), (130, 100, 65), (19, 13, 3000)], ids=str)
def test_linear(shape, dtype):
    M, N, K = shape
    against_float64(ops.linear, reference.linear, leaf(M, K, dtype=dtype), leaf(N, K, dtype=dtype, seed=1), leaf(N, dtype=dtype),
                    tolerance=TOLERANCE[dtype])


def test_linear_with_leading_dimensions(dtype):
    against_float64(ops.linear, reference.linear, leaf(3, 5, 24, dtype=dtype), leaf(16, 24, dtype=dtype), tolerance=TOLERANCE[dtype])


def test_norm(dtype):
    x, r, w = leaf(9, 67, dtype=dtype), leaf(9, 67, dtype=dtype, seed=1), leaf(67, dtype=dtype)
    against_float64(lambda x, w: ops.rms_norm(x, w, 1e-5), lambda x, w: reference.rms_norm(x, w, 1e-5), x, w, tolerance=TOLERANCE[dtype])
    against_float64(lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-5), lambda x, r, w: reference.add_rms_norm(x, r, w, 1e-5), x, r, w,
                    tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(interleaved, dtype):
    cos, sin = ops.rope_cos_sin(torch.arange(11) * 100, 48, 1e4)
    against_float64(lambda x: ops.apply_rope(x, cos, sin, interleaved), lambda x: reference.apply_rope(x, cos, sin, interleaved),
                    leaf(11, 3, 64, dtype=dtype), tolerance=TOLERANCE[dtype])


def test_rope_table_is_float64_rounded_once():
    positions = torch.tensor([0, 1, 511, 4095, 131071])
    for scaling in (None, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
                    {"type": "linear", "factor": 2.0}):
        cos, sin = ops.rope_cos_sin(positions, 64, 5e5, scaling)
        assert cos.shape == sin.shape == (5, 32) and cos.dtype == torch.float32
        assert float((cos.double() ** 2 + sin.double() ** 2 - 1).abs().max()) < 2e-7
    angles = positions.double()[:, None] * torch.tensor([5e5 ** (-2 * i / 64) for i in range(32)], dtype=torch.float64)
    assert float((ops.rope_cos_sin(positions, 64, 5e5)[0].double() - angles.cos()).abs().max()) < 4e-8
    with pytest.raises(ValueError, match=r"'yarn'.*not covered"):
        ops.rope_cos_sin(positions, 64, 1e4, {"rope_type": "yarn", "factor": 2.0})


def test_llama3_scaling_is_that_of_transformers():
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig
    scaling = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=512, num_attention_heads=8, rope_theta=5e5, rope_scaling=dict(scaling), max_position_embeddings=131072)
    theirs, _ = rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    from vime.ops.rope import inverse_frequencies
    ours = torch.tensor(inverse_frequencies(64, 5e5, scaling), dtype=torch.float64)
    assert float(((theirs.double() - ours) / ours).abs().max()) < 1e-6


def test_activation(dtype):
    against_float64(ops.silu_and_mul, reference.silu_and_mul, leaf(9, 134, dtype=dtype, scale=5), tolerance=TOLERANCE[dtype])
    extreme = torch.tensor([[200.0, -200.0, 0.0, -0.0, 1.0, 1.0, 1.0, 1.0]]).to(dtype)
    assert torch.equal(ops.silu_and_mul(extreme).float(), torch.tensor([[200.0, 0.0, 0.0, 0.0]]))


def test_embedding_adds_in_order(dtype):
    ids = torch.randint(0, 9, (40,))
    against_float64(lambda w: ops.embedding(ids, w), lambda w: reference.embedding(ids, w), leaf(9, 37, dtype=dtype), tolerance=TOLERANCE[dtype])
    w, up = leaf(9, 37, dtype=dtype), torch.randn(40, 37).to(dtype)
    torch.set_num_threads(1)
    (one,) = torch.autograd.grad(ops.embedding(ids, w), w, up)
    torch.set_num_threads(2)
    (two,) = torch.autograd.grad(ops.embedding(ids, w), w, up)
    expected = torch.zeros(9, 37)
    for row, gradient in zip(ids.tolist(), up.float(), strict=True):
        expected[row] = expected[row] + gradient
    assert torch.equal(one, two) and torch.equal(one, expected.to(dtype))
    with pytest.raises(IndexError, match="id 9 at index 2"):
        ops.embedding(torch.tensor([0, 1, 9]), w)


def test_logprob(dtype):
    ids, temperature = torch.randint(0, 1001, (6,)), torch.tensor([0.5, 1, 2, 1, 0.7, 1.3])
    x = leaf(6, 1001, dtype=dtype, scale=3)
    tolerance = TOLERANCE[dtype]
    against_float64(lambda x: ops.log_softmax(x, temperature), lambda x: reference.log_softmax(x, temperature), x, tolerance=tolerance)
    against_float64(lambda x: ops.token_logprob(x, ids, temperature), lambda x: reference.token_logprob(x, ids, temperature), x, tolerance=tolerance)
    lp, entropy = ops.token_logprob(x.detach(), ids, temperature, return_entropy=True)
    full = reference.log_softmax(x.detach().double(), temperature)
    assert float((lp.double() - full.gather(1, ids[:, None])[:, 0]).abs().max()) < 3e-6
    assert float((entropy.double() + (full.exp() * full).sum(1)).abs().max()) < 3e-6
    with pytest.raises(IndexError, match="id 1001 in row 0"):
        ops.token_logprob(x, torch.full((6,), 1001))


def test_masked_logits_have_probability_zero(dtype):
    x = torch.tensor([[1.0, -math.inf, 2.0]]).to(dtype)
    lp = ops.log_softmax(x)
    assert lp[0, 1] == -math.inf and abs(float(lp.exp().sum()) - 1) < 1e-6
    assert torch.isfinite(ops.token_logprob(x, torch.tensor([2]), return_entropy=True)[1]).all()


@given(st.floats(-87, 88, width=32))
def test_exp_and_log_through_the_logprob_of_two(x):
    """exp and log of the kernels, within two units of float64: lp of [0, x] at index 0 is -log(1 + exp(x))."""
    lp = ops.token_logprob(torch.tensor([[0.0, x]]), torch.tensor([0]))
    want = -(max(x, 0) + math.log1p(math.exp(-abs(x))))
    assert abs(float(lp) - want) <= 2.5e-7 * max(abs(want), 1)


def test_linear_backward_is_deterministic_over_threads(dtype):
    x, w, up = leaf(37, 96, dtype=dtype), leaf(50, 96, dtype=dtype), torch.randn(37, 50).to(dtype)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(torch.autograd.grad(ops.linear(x, w), (x, w), up))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*results, strict=True))
