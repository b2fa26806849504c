"""Block-FP8 linear layers: rows alone, the quantised equation in float64, FP8's bound, the backward of ``linear``, edges."""
from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.helpers import assert_same_rows, leaf
from vime import fp8, ops

FEW = settings(deadline=None, max_examples=25, derandomize=True)
SHAPES = st.tuples(st.integers(1, 24), st.integers(1, 300), st.integers(1, 300))
DTYPE = st.sampled_from([torch.float32, torch.bfloat16])
ROUND = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}


def draw(T, N, K, dtype, seed, scale=1.0):
    x, w = leaf(T, K, dtype=dtype, seed=seed), leaf(N, K, dtype=dtype, seed=seed + 1, scale=scale)
    return x, w


def blocks_of(x):
    """Slices of 128 columns."""
    return [slice(b, min(b + 128, x.shape[1])) for b in range(0, x.shape[1], 128)]


def quantised(x, rows):
    """The values that a matrix is rounded to, in float64, written without ``vime.ops``: blocks of ``rows`` x 128."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for r in range(0, x.shape[0], rows):
        for part in blocks_of(x):
            block = x.detach()[r:r + rows, part].float()
            scale = block.abs().max() / torch.tensor(448.0)
            scale = scale if scale > 0 else torch.tensor(1.0)
            out[r:r + rows, part] = (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale.double()
    return out


@FEW
@given(SHAPES, DTYPE, st.integers(0, 99))
def test_it_is_the_quantised_equation_in_float64(shape, dtype, seed):
    x, w = draw(*shape, dtype, seed)
    xq, wq = quantised(x, 1), quantised(w, 128)
    exact = xq @ wq.T
    size = xq.abs() @ wq.abs().T  # fp32 sums of 128 terms, then of the blocks; one rounding to the model dtype
    y = ops.linear_fp8(x, w).detach().double()
    assert ((y - exact).abs() <= size * 140 * 2.0**-24 + exact.abs() * ROUND[dtype] + 1e-30).all()


@FEW
@given(SHAPES, DTYPE, st.integers(0, 99), st.floats(1e-3, 1e3))
def test_it_stays_within_the_bound_of_fp8(shape, dtype, seed, scale):
    """E4M3 rounds to within 1/16 of a value or, near zero, 2^-10 of a scale; both factors, so a little over an eighth of the sum."""
    x, w = draw(*shape, dtype, seed, scale)
    exact, y = x.detach().double() @ w.detach().double().T, ops.linear_fp8(x, w).detach().double()

    def error(values, rows):
        bound = torch.zeros(values.shape, dtype=torch.float64)
        for r in range(0, values.shape[0], rows):
            for part in blocks_of(values):
                block = values.detach()[r:r + rows, part].double().abs()
                bound[r:r + rows, part] = torch.maximum(block / 16, block.max() / 448 * 2.0**-10) * 1.001
        return bound

    ex, ew = error(x, 1), error(w, 128)
    bound = ex @ w.detach().double().abs().T + x.detach().double().abs() @ ew.T + ex @ ew.T
    assert ((y - exact).abs() <= bound + exact.abs() * 2 * ROUND[dtype] + 1e-30).all()


@FEW
@given(SHAPES, DTYPE, st.integers(0, 99), st.integers(1, 4))
def test_a_row_does_not_see_its_neighbours(shape, dtype, seed, threads):
    T, N, K = shape
    x, w = draw(T + 1, N, K, dtype, seed)
    with torch.no_grad():
        whole = ops.linear_fp8(x, w)
        torch.set_num_threads(threads)
        assert_same_rows(torch.cat([ops.linear_fp8(x[t:t + 1], w) for t in range(T + 1)]), whole)
        order = torch.randperm(T + 1, generator=torch.Generator().manual_seed(seed))
        assert_same_rows(ops.linear_fp8(x[order], w), whole[order])
        assert_same_rows(ops.linear_fp8(torch.cat([x * 1000, x]), w)[T + 1:], whole)
    assert_same_rows(ops.linear_fp8(x, w).detach(), whole)  # with a gradient, the same bits


@FEW
@given(SHAPES, DTYPE, st.integers(0, 99))
def test_the_backward_is_that_of_linear_to_the_bit(shape, dtype, seed):
    x, w = draw(*shape, dtype, seed)
    bias = leaf(shape[1], dtype=dtype, seed=3)
    dy = leaf(shape[0], shape[1], dtype=dtype, seed=seed + 5).detach()
    ours = torch.autograd.grad(ops.linear_fp8(x, w, bias), (x, w, bias), dy)
    theirs = torch.autograd.grad(ops.linear(x, w, bias), (x, w, bias), dy)
    assert all(torch.equal(a, b) and a.dtype is dtype for a, b in zip(ours, theirs, strict=True))


@FEW
@given(st.lists(st.integers(1, 200), min_size=1, max_size=4), st.integers(1, 200), DTYPE, st.integers(0, 99))
def test_fused_and_permuted_weights_have_the_blocks_of_their_parts(sizes, K, dtype, seed):
    """What one side fuses and another permutes gives the bits of the tensors of the checkpoint, each by itself."""
    x, w = draw(5, sum(sizes), K, dtype, seed)
    with torch.no_grad():
        apart = torch.cat([ops.linear_fp8(x, part) for part in w.split(sizes)], dim=1)
        block_N = ops.row_blocks(sizes)
        assert torch.equal(ops.linear_fp8(x, w, None, block_N), apart)
        order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(seed))
        assert torch.equal(ops.linear_fp8(x, w[order], None, block_N[order]), apart[:, order])


def test_blocks_are_128_by_128_and_rows_have_scales_of_their_own(dtype):
    w = torch.ones(300, 200, dtype=dtype)
    w[5, 3], w[130, 150] = 7.0, 20.0
    q, scale = ops.quantise_weight_blocks(w)
    assert q.dtype is torch.float8_e4m3fn and scale.shape == (300, 2)
    expected = torch.ones(300, 2)
    expected[:128, 0], expected[128:256, 1] = 7.0, 20.0
    assert torch.equal(scale, expected / 448)
    x = torch.ones(2, 200, dtype=dtype)
    x[1, 0] = 14.0
    assert torch.equal(ops.quantise_blocks(x)[1], torch.tensor([[1.0, 1.0], [14.0, 1.0]]) / 448)


def test_a_written_weight_is_seen_however_it_was_written(dtype):
    """An optimizer writes through ``.data``, which no version counter shows; an update copies into a view; both are seen."""
    x, w = leaf(3, 130, dtype=dtype).detach(), torch.nn.Parameter(leaf(140, 130, dtype=dtype, seed=2).detach())
    for change in (lambda: w.data.copy_(w.data * 3), lambda: w.detach()[128:].copy_(torch.ones(12, 130)),
                   lambda: w.data.view(-1)[7:8].fill_(9.0), lambda: w.data.untyped_storage().copy_(w.data.neg().untyped_storage())):
        before = ops.linear_fp8(x, w)
        change()
        after = ops.linear_fp8(x, w)
        assert not torch.equal(after, before)
        assert torch.equal(after, ops.linear_fp8(x, w.detach().clone()))


def test_what_is_kept_is_bounded_and_belongs_to_its_blocks(monkeypatch):
    from vime.ops.cpu import fp8 as kept
    from vime.rl.memory import FP8_KEPT_BYTES

    assert kept.KEPT_BYTES == FP8_KEPT_BYTES  # what the check of memory counts with
    monkeypatch.setattr(kept, "_kept", type(kept._kept)())
    monkeypatch.setattr(kept, "KEPT_BYTES", 3 * 140 * 130 * 8)
    x, weights = torch.randn(3, 130), torch.randn(5, 140, 130)
    first = [ops.linear_fp8(x, w) for w in weights]
    assert len(kept._kept) == 3
    halves = ops.row_blocks([70, 70])
    for w, y in zip(weights, first, strict=True):
        assert torch.equal(ops.linear_fp8(x, w), y)
        assert not torch.equal(ops.linear_fp8(x, w, None, halves), y) and torch.equal(ops.linear_fp8(x, w), y)
    calls = []
    monkeypatch.setattr(ops.blockwise, "quantise_weight_blocks", lambda *a: calls.append(a) or ops.quantise_weight_blocks(*a))
    for _ in range(3):
        ops.linear_fp8(x, weights[0])
    weights[0, 139, 129] = torch.nextafter(weights[0, 139, 129], torch.tensor(9.0))  # the last bit of the last element
    ops.linear_fp8(x, weights[0])
    assert len(calls) == 2


def test_zeros_and_the_smallest_numbers(dtype):
    zero = ops.linear_fp8(torch.zeros(2, 140, dtype=dtype), torch.zeros(3, 140, dtype=dtype))
    assert torch.equal(zero, torch.zeros(2, 3, dtype=dtype))
    tiny = torch.full((2, 140), 1e-45)
    tiny[:, 0] = 0.0
    assert torch.isfinite(ops.linear_fp8(tiny, torch.ones(3, 140))).all()
    assert ops.linear_fp8(torch.zeros(0, 140, dtype=dtype), torch.ones(3, 140, dtype=dtype)).shape == (0, 3)
    assert ops.linear_fp8(torch.ones(2, 1, 140, dtype=dtype), torch.ones(3, 140, dtype=dtype)).shape == (2, 1, 3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_number_is_not_hidden_and_stays_in_its_row(bad, dtype):
    x, w = (t.detach().clone() for t in draw(4, 150, 200, dtype, 1))
    clean = ops.linear_fp8(x, w)
    x[2, 131] = bad
    y = ops.linear_fp8(x, w)
    assert torch.isnan(y[2]).all() and torch.equal(y[[0, 1, 3]], clean[[0, 1, 3]])
    w[3, 5] = bad
    assert torch.isnan(ops.linear_fp8(x[:1], w)[0, 3])


def test_bad_arguments_are_named(dtype):
    x, w = torch.ones(2, 8, dtype=dtype), torch.ones(3, 8, dtype=dtype)
    for args in ((x, w[:, :7]), (x, w.double()), (x, w, torch.ones(2, dtype=dtype)), (x, w, None, torch.zeros(2, dtype=torch.int64)),
                 (x, w, None, torch.zeros(3))):
        with pytest.raises(ValueError, match=r"linear_fp8: .*fit|linear_fp8: block_N"):
            ops.linear_fp8(*args)


def test_the_decision_is_by_role():
    on = ["self_attn.q_proj", "self_attn.o_proj", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.q_b_proj",
          "mlp.gate_proj", "mlp.down_proj", "mlp.experts.7.up_proj", "mlp.experts.*.down_proj", "mlp.shared_experts.gate_proj"]
    off = ["self_attn.kv_b_proj", "mlp.gate", "self_attn.indexer.wq_b", "self_attn.indexer.weights_proj", "input_layernorm",
           "mlp.shared_expert_gate", "self_attn.q_norm"]
    for i in (0, 17):
        for name in on:
            assert fp8.applies(f"model.layers.{i}.{name}") and fp8.applies(f"model.layers.{i}.{name}.weight"), name
        assert not any(fp8.applies(f"model.layers.{i}.{name}.weight") for name in off)
    assert not any(fp8.applies(n) for n in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight", "self_attn.q_proj"))
    with pytest.raises(ValueError, match="only some of them"):
        fp8.decide(["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.kv_b_proj"])


@pytest.mark.parametrize(("names", "message"), [(["a.weight", "a.weight_scale_inv"], "1 tensors of scales.*Dequantise.*--fp8 blockwise"),
                                                (["a.weight"], "no scales .*not weights")])
def test_a_quantised_checkpoint_is_refused_by_name(names, message):
    fp8.refuse_quantised({}, names)
    with pytest.raises(fp8.QuantisedCheckpoint, match=message):
        fp8.refuse_quantised({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, names)


def test_scales_are_divided_by_a_tensor():
    """CUDA divides by a plain number by multiplying with its rounded inverse, which is another scale now and then."""
    from torch.utils._python_dispatch import TorchDispatchMode

    divisors = []

    class Divisions(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket is torch.ops.aten.div:
                divisors.append(args[1])
            return func(*args, **(kwargs or {}))

    x = torch.rand(1000, 128) * 100
    with Divisions():
        _, scale = ops.quantise_blocks(x)
        ops.quantise_weight_blocks(x)
    assert len(divisors) == 4 and all(isinstance(divisor, torch.Tensor) for divisor in divisors)
    peak = x.amax(1, keepdim=True)
    assert torch.equal(scale.double(), (peak.double() / 448).float().double())
    assert not torch.equal(scale, peak * (1 / torch.tensor(448.0))), "the two are told apart"
