"""Every operation: a row of the result is a function of that row, for any batch, order and number of threads."""
from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.helpers import assert_same_rows
from vime import ops
from vime.ops.cpu import functions

OPERATIONS = ("linear", "linear_bias", "rms_norm", "add_rms_norm", "apply_rope", "silu_and_mul", "embedding", "log_softmax",
              "token_logprob", "sample", "sample_top")


def build(name, rows, width, dtype):
    """Inputs of ``rows`` rows, and the operation on a selection of them."""
    generator = torch.Generator().manual_seed(rows * 1009 + width)

    def rnd(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    x = rnd(rows, width)
    ids = torch.randint(0, width, (rows,), generator=generator)
    if name.startswith("linear"):
        weight, bias = rnd(max(1, width // 2 + 3), width), rnd(max(1, width // 2 + 3)) if name.endswith("bias") else None
        return lambda i: ops.linear(x[i], weight, bias)
    if name == "rms_norm":
        weight = rnd(width)
        return lambda i: ops.rms_norm(x[i], weight, 1e-6)
    if name == "add_rms_norm":
        weight, residual = rnd(width), rnd(rows, width)
        return lambda i: ops.add_rms_norm(x[i], residual[i], weight, 1e-6)
    if name == "apply_rope":
        cos, sin = ops.rope_cos_sin(torch.arange(rows) * 13, 2 * width, 1e4)
        heads = rnd(rows, 3, 2 * width + 5)
        return lambda i: ops.apply_rope(heads[i], cos[i], sin[i])
    if name == "silu_and_mul":
        both = rnd(rows, 2 * width) * 8
        return lambda i: ops.silu_and_mul(both[i])
    if name == "embedding":
        table = rnd(width, 19)
        return lambda i: ops.embedding(ids[i], table)
    temperature = torch.rand(rows, generator=generator) + 0.3
    if name == "log_softmax":
        return lambda i: ops.log_softmax(x[i], temperature[i])
    if name == "token_logprob":
        return lambda i: ops.token_logprob(x[i], ids[i], temperature[i], return_entropy=True)
    top = (torch.arange(rows) % 4, 0.4 + torch.rand(rows, generator=generator)) if name == "sample_top" else ()
    return lambda i: ops.sample(x[i], ids[i] * 77, ids[i], temperature[i], *(t[i] for t in top))


@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_do_not_know_their_batch(name, dtype):
    @given(rows=st.integers(1, 70), width=st.integers(1, 150), data=st.data())
    def check(rows, width, data):
        run = build(name, rows, width, dtype)
        torch.set_num_threads(1)
        want = run(torch.arange(rows))
        chosen = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=40)))
        torch.set_num_threads(data.draw(st.sampled_from([1, 2])))
        got = run(chosen)
        assert_same_rows(got, tuple(w[chosen] for w in want) if isinstance(want, tuple) else want[chosen])

    check()


@pytest.mark.parametrize("name", OPERATIONS)
def test_threads_do_not_show(name, dtype):
    """Large enough for every operation to spread its rows."""
    run = build(name, 1300, 150, dtype)
    order = torch.randperm(1300, generator=torch.Generator().manual_seed(1))
    torch.set_num_threads(1)
    want = run(torch.arange(1300))
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert_same_rows(run(order), tuple(w[order] for w in want) if isinstance(want, tuple) else want[order])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_kernels_run_on_as_many_threads_as_torch(threads):
    """Else every sweep over threads compares a thing with itself."""
    torch.set_num_threads(threads)
    assert functions.K.workers() == threads


@pytest.mark.parametrize("rows", [1, 2, 3, 15, 16, 17, 31, 33, 100, 513])
@pytest.mark.parametrize("shape", [(96, 64), (33, 577), (640, 100), (33, 2500)], ids=str)
def test_linear_at_block_edges(rows, shape, dtype):
    x, w = torch.randn(600, shape[1]).to(dtype), torch.randn(*shape).to(dtype)
    assert_same_rows(ops.linear(x[40:40 + rows], w), ops.linear(x, w)[40:40 + rows])


def test_linear_of_strided_rows(dtype):
    fused, w = torch.randn(20, 200).to(dtype), torch.randn(24, 64).to(dtype)
    assert_same_rows(ops.linear(fused[:, 70:134], w), ops.linear(fused[:, 70:134].contiguous(), w))
    assert_same_rows(ops.linear(fused[::2, :64], w), ops.linear(fused[:, :64].contiguous(), w)[::2])


def test_grad_mode_does_not_change_the_forward(dtype):
    """Full recompute runs a forward without grad and replays it with grad."""
    x, w = torch.randn(9, 64).to(dtype), torch.randn(64, 64).to(dtype)
    q = torch.randn(9, 4, 16).to(dtype)
    cos, sin = ops.rope_cos_sin(torch.arange(9), 16, 1e4)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    for run in (lambda x, w, q: ops.linear(x, w), lambda x, w, q: ops.rms_norm(x, w[0], 1e-5), lambda x, w, q: ops.add_rms_norm(x, x, w[0], 1e-5),
                lambda x, w, q: ops.silu_and_mul(x), lambda x, w, q: ops.apply_rope(q, cos, sin), lambda x, w, q: ops.attention_varlen(q, q, q, cu, 0.25),
                lambda x, w, q: ops.token_logprob(x, torch.arange(9)), lambda x, w, q: ops.log_softmax(x)):
        with torch.no_grad():
            plain = run(x, w, q)
        tracked = run(*(t.clone().requires_grad_() for t in (x, w, q)))
        assert_same_rows(tuple(t.detach() for t in tracked) if isinstance(tracked, tuple) else tracked.detach(), plain)


def test_a_changed_weight_changes_the_result(dtype):
    """There is no packed copy of a weight that could go stale."""
    x, w = (torch.rand(40, 64) + 0.5).to(dtype), torch.randn(32, 64).to(dtype)  # positive: the change cannot cancel in any row
    before = ops.linear(x, w)
    w.data[5] += 1
    after = ops.linear(x, w)
    assert (after[:, 5] != before[:, 5]).all() and torch.equal(after[:, :5], before[:, :5])


def test_add_rms_norm_is_its_two_steps(dtype):
    x, r, w = torch.randn(7, 100).to(dtype), torch.randn(7, 100).to(dtype), torch.randn(100).to(dtype)
    y, summed = ops.add_rms_norm(x, r, w, 1e-5)
    assert torch.equal(summed, x + r) and torch.equal(y, ops.rms_norm(x + r, w, 1e-5))


def test_selected_logprob_is_the_full_one(dtype):
    x, ids = torch.randn(7, 1001).to(dtype), torch.randint(0, 1001, (7,))
    full = ops.log_softmax(x, 0.7)
    assert torch.equal(ops.token_logprob(x, ids, 0.7), full.gather(1, ids[:, None])[:, 0])


@pytest.mark.parametrize("rows", [0, 1])
def test_empty_and_single(rows, dtype):
    x, w = torch.randn(rows, 64).to(dtype), torch.randn(8, 64).to(dtype)
    assert ops.linear(x, w).shape == (rows, 8) and ops.rms_norm(x, w[0], 1e-5).shape == x.shape
    assert ops.silu_and_mul(x).shape == (rows, 32) and ops.log_softmax(x).shape == x.shape
    assert ops.linear(torch.randn(64).to(dtype), w).shape == (8,)
