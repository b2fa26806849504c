"""The proofs must be able to fail, and what is not covered must be refused by name."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from vime import ops
from vime.ops.cuda import gemm
from vime.ops.cuda.proof_attention import paged_copy
from vime.ops.prove_types import differing_rows
from vime.ops.providers import cublas, fa3
from vime.ops.registry import UnsupportedOp


def test_a_kernel_that_knows_its_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GEMM that adds in another order below 128 rows fails the proof at those rows."""
    def split_below_128(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        half = a.shape[1] // 2
        if a.shape[0] < 128:
            return cublas.mm(a[:, :half], b[:half]) + cublas.mm(a[:, half:], b[half:])
        return cublas.mm(a, b)

    monkeypatch.setattr(gemm, "_kept_or_proven", gemm._prove)
    monkeypatch.setitem(gemm._ROUTES, "cublas", split_below_128)
    weight = torch.randn(576, 1536, device="cuda", dtype=torch.bfloat16)
    assert gemm.differing_rows("cublas", weight, True, (127,), 256) > 0
    assert gemm.differing_rows("cublas", weight, True, (128, 129), 256) == 0
    monkeypatch.setattr(gemm, "_routes", {})
    assert gemm.route(weight).kernel == "triton"
    monkeypatch.setitem(gemm._ROUTES, "triton", split_below_128)
    monkeypatch.setattr(gemm, "_routes", {})
    with pytest.raises(UnsupportedOp, match="No GEMM here is invariant"):
        gemm.route(weight)


def test_tiles_for_few_rows_are_taken_only_where_they_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the speed, tiles that add in another order are not; those that are taken give the bits of many rows."""
    monkeypatch.setattr(gemm, "_kept_or_proven", gemm._prove)
    for n, k, dtype in ((6144, 16384, torch.bfloat16), (2624, 6144, torch.bfloat16), (160, 6144, torch.bfloat16), (128, 6144, torch.float32)):
        for which in range(len(gemm.gemm_triton.FEW[dtype])):  # each tile is the fastest once
            monkeypatch.setattr(gemm, "_few_ratio", lambda kernel, weight, tile, rows, fastest=which: 0.5 if tile == fastest else 1.0)
            monkeypatch.setattr(gemm, "_routes", {})
            weight, x = (torch.randn(size, k, device="cuda", dtype=dtype) for size in (n, 500))
            found, whole = gemm.route(weight), gemm.linear(x, weight)
            print(f"N={n} K={k}: {found}")
            assert found.few == (which, which), found
            for m in (1, 2, 15, 16, 17, 63, 64, 65):
                assert torch.equal(gemm.linear(x[3:3 + m], weight), whole[3:3 + m]), (found, m)

    def split(a: torch.Tensor, b: torch.Tensor, which: int) -> torch.Tensor:
        half = a.shape[1] // 2
        return cublas.mm(a[:, :half], b[:half]) + cublas.mm(a[:, half:], b[half:])

    monkeypatch.setattr(gemm.gemm_triton, "few", split)
    for n, k in ((160, 6144), (576, 1536)):
        monkeypatch.setattr(gemm, "_routes", {})
        assert gemm.route(torch.randn(n, k, device="cuda", dtype=torch.bfloat16)).few == (None, None)


def test_unpinned_attention_differs_at_head_dim_64() -> None:
    """Why the query bound is pinned: the launch that FA3 picks for short queries gives other bits."""
    torch.manual_seed(0)
    lengths = (1025, 300, 777)
    q, k, v = (torch.randn(sum(lengths), n, 64, device="cuda", dtype=torch.bfloat16) for n in (9, 3, 3))
    cache, table = paged_copy(k, v, lengths)
    ends = torch.tensor(lengths).cumsum(0) - 1
    used = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    start = torch.arange(4, device="cuda", dtype=torch.int32)
    cu = torch.tensor([0, *(ends + 1)], device="cuda", dtype=torch.int32)
    want = ops.attention_varlen(q, k, v, cu, 0.125)[ends.cuda()]
    pinned = ops.attention_paged(q[ends.cuda()], cache, table, used, start, 0.125)
    stock = fa3.stock_paged(q[ends.cuda()], cache[:, 0], cache[:, 1], start, 1, 1025, 0.125, used, table)
    assert not differing_rows(pinned, want).any()
    assert differing_rows(stock, want).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_form_of_the_input_does_not_matter(dtype: torch.dtype) -> None:
    """Strided views and misaligned pointers give the bits of a plain tensor."""
    torch.manual_seed(0)
    base = torch.randn(8, 1001 + 576 + 7, device="cuda").to(dtype)
    weight = torch.randn(576, device="cuda").to(dtype)
    view = base[:, 7 : 7 + 576]
    assert torch.equal(ops.rms_norm(view, weight, 1e-5), ops.rms_norm(view.contiguous().clone(), weight, 1e-5))
    logits, ids = base[:, 1 : 1 + 1001], torch.arange(8, device="cuda")
    assert torch.equal(ops.token_logprob(logits, ids), ops.token_logprob(logits.clone(), ids))
    flat = torch.randn(1 + 4 * 576, device="cuda").to(dtype)[1:].view(4, 576)
    assert flat.data_ptr() % 16 != 0
    assert torch.equal(ops.rms_norm(flat, weight, 1e-5), ops.rms_norm(flat.clone(), weight, 1e-5))
    projection = torch.randn(64, 576, device="cuda").to(dtype)
    assert torch.equal(ops.linear(flat, projection), ops.linear(flat.clone(), projection))


def test_room_for_more_rows_changes_nothing() -> None:
    """Rows that were made with room, without room, and as part of a longer tensor give one result, whatever lies behind."""
    x = torch.randn(200, 576, device="cuda", dtype=torch.bfloat16)
    weight, norm = torch.randn(960, 576, device="cuda", dtype=torch.bfloat16), torch.ones(576, device="cuda", dtype=torch.bfloat16)
    want = ops.linear(ops.rms_norm(x, norm, 1e-5), weight)
    for first, rows in ((0, 1), (3, 5), (60, 63), (195, 5)):
        y = ops.rms_norm(x[first : first + rows], norm, 1e-5)
        y.as_strided((64, 576), (576, 1))[rows:] = float("nan")
        assert torch.equal(ops.linear(y, weight), want[first : first + rows])
        assert torch.equal(ops.linear(y.clone(), weight), want[first : first + rows])


def test_graph_capture_gives_the_same_bits() -> None:
    x, w = (torch.randn(n, 896, device="cuda", dtype=torch.bfloat16) for n in (5, 1152))
    with torch.no_grad():
        want = ops.linear(x, w)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = ops.linear(x, w)
        graph.replay()
        assert torch.equal(got, want)


def test_an_unproven_shape_is_refused_inside_a_capture() -> None:
    x, w = (torch.randn(n, 320, device="cuda", dtype=torch.bfloat16) for n in (64, 448))
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), pytest.raises(UnsupportedOp, match="before capturing"), torch.cuda.graph(graph):
        ops.linear(x, w)


def test_what_is_not_covered_is_named() -> None:
    q = torch.randn(4, 2, 64, device="cuda")
    cu = torch.tensor([0, 4], device="cuda", dtype=torch.int32)
    with pytest.raises(UnsupportedOp, match="attention on cuda"):
        ops.attention_varlen(q, q, q, cu, 0.125)
    with pytest.raises(ValueError, match="multiple of 16"):
        ops.kv_cache_shape(4, 128, 2, 64, torch.bfloat16, "cuda")


def test_a_late_import_is_refused() -> None:
    """Once CUDA was used with a workspace, starving it can no longer be promised."""
    code = "import torch; x = torch.ones(2, device='cuda'); import vime.ops.cuda"
    env = {name: value for name, value in os.environ.items() if name not in cublas.STARVED}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode != 0 and "WorkspaceTooLate" in done.stderr, done.stderr
