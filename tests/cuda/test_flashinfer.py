"""FlashInfer's prefill kernel at one tile: one result a position however it is computed; at its own tiles it has several."""
from __future__ import annotations

import itertools

import pytest
import torch

from tests.cuda.test_proof import check
from vime import ops
from vime.ops import registry
from vime.ops.cuda import attention_flashinfer, proof_attention
from vime.ops.cuda.proof import Sweep
from vime.ops.cuda.shapes import MODELS

KEY = ("attention", "cuda", torch.bfloat16)


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``VIME_ATTENTION=flashinfer`` registers it."""
    found = registry.resolve(*KEY)
    functions = {name: getattr(attention_flashinfer, name, value) for name, value in found.functions.items()}
    monkeypatch.setitem(registry._table, KEY, registry.Implementation(*KEY, attention_flashinfer.IMPLEMENTATION, functions))


@pytest.mark.parametrize("model", MODELS)
def test_attention_has_one_result_a_position(model: str) -> None:
    """Packed against alone; the paged cache in chunks of every size down to single queries; gradients on reruns."""
    torch.manual_seed(0)
    with torch.no_grad():
        sweep = Sweep(MODELS[model], torch.bfloat16)
        check(proof_attention.attention(sweep, quick=True), 6e-3)
        check(proof_attention.attention_backward(sweep, quick=True), 1e-2)


@pytest.mark.parametrize("model", ["smollm2-135m", "dense-7b"])
def test_rows_of_a_padded_and_captured_step(model: str) -> None:
    """A step of single queries and a prompt in a CUDA graph, replayed with other lengths, has the rows of a step run by itself."""
    torch.manual_seed(1)
    shape, page, rows = MODELS[model], 16, 64
    lengths = (40, 300, 17, 129)
    k, v = (torch.randn(sum(lengths), shape.groups, shape.head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    cache, table = proof_attention.paged_copy(k, v, lengths, page)
    q = torch.randn(rows, shape.heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    used, start, out = torch.zeros(4, dtype=torch.int32, device="cuda"), torch.zeros(5, dtype=torch.int32, device="cuda"), torch.zeros_like(q)

    def step() -> None:
        plan = ops.attention_plan(q, cache, table, used, start)
        ops.attention_paged_into(out, q, cache, table, used, start, shape.head_dim**-0.5, plan)

    used.copy_(torch.tensor(lengths))
    start.copy_(torch.tensor([0, 1, 2, 3, 4]))
    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for new in ((1, 1, 1, 1), (30, 1, 2, 5), (1, 40, 17, 3)):
        start.copy_(torch.tensor([0, *itertools.accumulate(new)]))
        graph.replay()
        first = 0
        for b, n in enumerate(new):
            alone = ops.attention_paged(q[first:first + n].clone(), cache, table[b:b + 1], used[b:b + 1],
                                        torch.tensor([0, n], dtype=torch.int32, device="cuda"), shape.head_dim**-0.5)
            assert torch.equal(out[first:first + n].view(torch.int16), alone.view(torch.int16)), (new, b)
            first += n


@pytest.mark.parametrize("model", MODELS)
def test_tiles_of_masked_keys_leave_a_row_as_it_is(model: str) -> None:
    """Every position as a sequence of one query, which meets no tile of keys past its own, against the rows of one prompt."""
    torch.manual_seed(3)
    shape, length, page = MODELS[model], 1025, 16
    q, k, v = (torch.randn(length, n, shape.head_dim, device="cuda", dtype=torch.bfloat16) for n in (shape.heads, shape.groups, shape.groups))
    cache, table = proof_attention.paged_copy(k, v, (length,), page)
    whole = ops.attention_varlen(q, k, v, proof_attention.starts([length]), shape.head_dim**-0.5)
    used = torch.arange(1, length + 1, dtype=torch.int32, device="cuda")
    alone = ops.attention_paged(q, cache, table.expand(length, -1), used, proof_attention.starts([1] * length), shape.head_dim**-0.5)
    assert int((alone.view(torch.int16) != whole.view(torch.int16)).flatten(1).any(1).sum()) == 0


def test_flashinfer_at_its_own_tiles_fails() -> None:
    """The control: FlashInfer plans by itself, so a query has other bits as part of a prompt than alone."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    torch.manual_seed(2)
    heads, groups, dim, length = 14, 2, 64, 777
    q, k, v = (torch.randn(length, n, dim, device="cuda", dtype=torch.bfloat16) for n in (heads, groups, groups))
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "NHD", backend="fa2")

    def run(first: int) -> torch.Tensor:
        at = torch.tensor([0, length - first], dtype=torch.int32, device="cuda")
        wrapper.plan(at, torch.tensor([0, length], dtype=torch.int32, device="cuda"), torch.arange(length, dtype=torch.int32, device="cuda"),
                     torch.ones(1, dtype=torch.int32, device="cuda"), heads, groups, dim, 1, causal=True, q_data_type=torch.bfloat16)
        return wrapper.run(q[first:], (k[:, None], v[:, None]))

    whole = run(0)
    assert any(not torch.equal(run(first)[-1], whole[-1]) for first in (length - 1, length - 5, length - 30))
    cu = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    ours = ops.attention_varlen(q, k, v, cu, dim**-0.5)
    assert float((ours.float() - whole.float()).abs().max()) < 0.05  # the same equation
