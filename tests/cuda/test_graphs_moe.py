"""On a GPU: latent attention, indexer and experts in CUDA graphs give the bits that they give eagerly, step by step and engine by engine.

    pytest -q tests/cuda/test_graphs_moe.py        # the kernels under a minute; two engines a case, about a minute each case
"""
from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch

from vime import ops
from vime.ops import paged
from vime.ops.cuda import select, sparse, sparse_index
from vime.vllm import latent_device
from vime.vllm.latent_rows import RowFormat

RANK, ROPE, KEY, HEADS, INDEX_HEADS, BLOCK, TOP_K, MOST = 512, 64, 128, 64, 32, 32, 256, 1024
REQUESTS = 12


def normal(*size: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*size, device="cuda", generator=torch.Generator(device="cuda").manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("width", [1, 63, 300, 4672, 16384])
def test_a_choice_without_a_sort_is_the_choice_with_one(width: int) -> None:
    scores = normal(70, width, dtype=torch.float32)
    scores = torch.where(scores > 0.3, scores.round(), scores)  # many ties
    counts = torch.randint(0, width + 1, (70,), device="cuda", generator=torch.Generator(device="cuda").manual_seed(2))
    for top_k in (1, 64, 2048):
        assert torch.equal(select.select(scores, counts, top_k), ops.select(scores, counts, top_k))


def place(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of sequences of these lengths, all over a cache, ``[B, MOST / BLOCK]``; and every sequence's length."""
    pages = torch.randperm(len(lengths) * (MOST // BLOCK), generator=torch.Generator().manual_seed(5)) + 1
    return pages.view(len(lengths), -1).int().cuda(), torch.tensor(lengths, dtype=torch.int32, device="cuda")


def decode(lengths: list[int], pages: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors of a step in which every sequence of that length (its new token included) decodes; length 0: a padding one."""
    last = torch.tensor([max(n - 1, 0) for n in lengths], device="cuda")
    real = torch.tensor([n > 0 for n in lengths], device="cuda")
    slots = pages.long().gather(1, (last // BLOCK)[:, None])[:, 0] * BLOCK + last % BLOCK
    starts = torch.cat([torch.zeros(1, dtype=torch.int64, device="cuda"), real.cumsum(0)]).int()
    return {"query_start_loc_B1": starts, "seq_lens_B": torch.tensor(lengths, dtype=torch.int32, device="cuda"),
            "block_table_BM": torch.where(real[:, None], pages, 0), "slot_mapping_T": torch.where(real, slots, -1)}


class Layer:
    """What :func:`latent_device.attend` asks of a layer."""

    def __init__(self, form: RowFormat, indexer: bool, kv_cache: torch.Tensor) -> None:
        self.m = types.SimpleNamespace(indexer=types.SimpleNamespace(top_k=TOP_K) if indexer else None, kv_rank=RANK, scale=0.0625)
        self.format, self.kv_cache, self.counts_2 = form, kv_cache, None

    def choice(self, own_TK: torch.Tensor | None, step: Any) -> torch.Tensor:
        assert own_TK is not None
        return own_TK


def inputs(count: int, seed: int) -> dict[str, torch.Tensor]:
    return {"query": normal(count, HEADS, RANK + ROPE, seed=seed), "row": normal(count, RANK + ROPE, seed=seed + 1),
            "q": normal(count, INDEX_HEADS, KEY, seed=seed + 2), "key": normal(count, KEY, seed=seed + 3),
            "weight": normal(count, INDEX_HEADS, seed=seed + 4)}


def run(layer: Layer, step: Any, x: dict[str, torch.Tensor]) -> torch.Tensor:
    index = (x["q"], x["key"], x["weight"]) if layer.m.indexer else None
    return latent_device.attend(layer, step, x["query"], x["row"], index, "step")  # type: ignore[arg-type]


def as_trained(layer: Layer, lengths: list[int], pages: torch.Tensor, x: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the trainer's operations give on the rows that the cache holds after the step, each sequence by itself."""
    out = []
    for r, n in enumerate(lengths):
        at = torch.arange(n, device="cuda")
        cells = layer.kv_cache[pages[r].long()[at // BLOCK], at % BLOCK]
        index = torch.arange(n, device="cuda", dtype=torch.int32)[None]
        if layer.m.indexer:
            scores = ops.index_scores(x["q"][r:r + 1], layer.format.keys(cells), x["weight"][r:r + 1])
            index = ops.select(scores, torch.tensor([n], device="cuda"), TOP_K)
        out.append(ops.sparse_attention(x["query"][r:r + 1], layer.format.rows(cells[:, :layer.format.width]), index, RANK, 0.0625))
    return torch.cat(out)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("indexer", [True, False], ids=["sparse", "dense"])
def test_a_captured_step_replays_any_other(indexer: bool, fp8: bool) -> None:
    """Captured on one step of decodes, replayed on others of other lengths, with padding: the bits of the same step run eagerly, and
    those of the trainer's operations."""
    form = RowFormat(RANK, ROPE, KEY if indexer else 0, torch.bfloat16, fp8)
    first = [1] * REQUESTS
    pages, _ = place(first)
    fill = form.pack(normal((REQUESTS * MOST // BLOCK + 1) * BLOCK, RANK + ROPE, seed=40),
                     normal((REQUESTS * MOST // BLOCK + 1) * BLOCK, KEY, seed=41) if indexer else None)
    layer = Layer(form, indexer, fill.view(-1, BLOCK, form.width).clone())
    held = {name: tensor.clone() for name, tensor in decode(first, pages).items()}
    x = {name: tensor.clone() for name, tensor in inputs(REQUESTS, 7).items()}

    def step() -> Any:
        return types.SimpleNamespace(**held, tokens=None)

    run(layer, step(), x)  # compiles, and proves nothing inside the capture
    graph, captured = torch.cuda.CUDAGraph(), step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = run(layer, captured, x)
    for seed, lengths in ((100, [1, 2, 300, 1000, 64, 65, 257, 256, 33, 31, 1024, 700]), (200, [900, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])):
        real = sum(n > 0 for n in lengths)
        for name, tensor in decode(lengths, pages).items():
            held[name].copy_(tensor)
        for name, tensor in inputs(REQUESTS, seed).items():
            x[name].copy_(tensor)
        before = layer.kv_cache.clone()
        graph.replay()
        torch.cuda.synchronize()
        found, cache = out.clone(), layer.kv_cache.clone()
        layer.kv_cache.copy_(before)
        eager = run(layer, step(), x)
        assert torch.equal(found, eager) and torch.equal(cache, layer.kv_cache)
        assert torch.equal(found[:real], as_trained(layer, lengths[:real], pages, x)) and not found[real:].any()


def test_nothing_of_a_step_waits_for_the_host() -> None:
    form = RowFormat(RANK, ROPE, KEY, torch.bfloat16, True)
    pages, _ = place([9] * 4)
    layer = Layer(form, True, form.pack(normal(4 * MOST + BLOCK, RANK + ROPE), normal(4 * MOST + BLOCK, KEY)).view(-1, BLOCK, form.width))
    held, x = decode([9, 40, 300, 7], pages), inputs(4, 3)
    run(layer, types.SimpleNamespace(**held, tokens=None), x)
    step = types.SimpleNamespace(**held, tokens=None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a wait inside of it raises
        run(layer, step, x)


def test_a_router_and_its_experts_in_a_graph() -> None:
    x, weight, bias = normal(32, 6144), normal(128, 6144, seed=2) * 6144**-0.5, normal(128, seed=3, dtype=torch.float32) * 0.1
    up, down = normal(128, 2 * 256, 6144, seed=4) * 6144**-0.5, normal(128, 6144, 256, seed=5) * 256**-0.5

    def layer() -> torch.Tensor:
        ids, weights = ops.route(ops.router_scores(x, weight, "sigmoid"), 8, bias_E=bias, scaling=2.5)
        return ops.combine_slots(ops.expert_rows(x, ids, up, down), weights)

    layer()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = layer()
    for seed in (11, 12):
        x.copy_(normal(32, 6144, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, layer())


def test_scores_are_those_of_the_trainer_wherever_the_keys_lie() -> None:
    q, k, w = normal(5, INDEX_HEADS, KEY), normal(900, KEY, seed=2), normal(5, INDEX_HEADS, seed=3)
    whole = sparse_index.index_scores(q, k, w)
    pages, _ = place([900])
    for width in (RANK + ROPE + KEY, 464):  # the stride of a cell: bf16, and FP8 in units of bf16
        cache = torch.zeros((MOST // BLOCK + 1) * BLOCK, width, dtype=torch.bfloat16, device="cuda")
        at = torch.arange(900, device="cuda")
        cache[pages[0].long()[at // BLOCK] * BLOCK + at % BLOCK, 8:8 + KEY] = k
        last = torch.tensor([899, 0, 63, 64, -1], device="cuda")
        got = sparse_index.index_scores_paged(q, cache[:, 8:8 + KEY], w, pages, torch.zeros(5, dtype=torch.int64, device="cuda"), last, MOST, BLOCK)
        for t, n in enumerate((last + 1).tolist()):
            assert torch.equal(got[t, :n], whole[t, :n]) and bool((got[t, n:] == float("-inf")).all())


def test_attention_reads_cells_as_it_reads_rows() -> None:
    q, cells = normal(6, HEADS, RANK + ROPE), normal(MOST, RANK + ROPE + KEY, seed=2)
    order = torch.rand(6, MOST, device="cuda").argsort(1)[:, :300].int()
    lists = torch.where(torch.arange(300, device="cuda")[None] < torch.tensor([[0], [1], [31], [32], [33], [300]], device="cuda"), order, -1)
    want = sparse.sparse_attention(q, cells[:, :RANK + ROPE].contiguous(), lists, RANK, 0.0625)
    assert torch.equal(paged.sparse_attention_paged(q, cells, lists, sparse.lengths(lists, MOST), RANK, 0.0625), want)


ENGINES = {"glm": ("glm5.2-6layer-tiny", {}), "glm-fp8-cache": ("glm5.2-6layer-tiny", {"kv_cache_dtype": "fp8_e4m3"}),
           "glm-fp8": ("glm5.2-6layer-tiny", {"fp8": "blockwise"}), "deepseek": ("deepseek-v3-tiny", {}), "qwen3-moe": ("qwen3-moe-tiny", {})}


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_with_graphs_is_the_eager_one(name: str, tmp_path: Path) -> None:
    """Requests that come and go, together and alone, with graphs and without: the same tokens and log-probabilities."""
    pytest.importorskip("vllm")
    from gates.synthetic import write
    from gates.synthetic_experts import SPARSE
    from vime.vllm.launch import launch_engine
    from vime.vllm.protocol import Request

    model, options = ENGINES[name]
    folder = write(SPARSE[model], tmp_path / model)
    asked = [Request(request_id=f"r{i}", prompt_token_ids=[(7 + 31 * i + 17 * j) % 500 for j in range(3 + 13 * i)], max_tokens=8 + 5 * i,
                     temperature=1.0, seed=i) for i in range(7)]
    found, kernels = {}, {}
    for graphs in (False, True):
        with launch_engine(folder, device="cuda", dtype="bfloat16", log_path=tmp_path / f"{graphs}.log", kv_cache_bytes=64 << 20,
                           max_model_len=256, max_num_batched_tokens=64, max_num_seqs=16, cuda_graphs=graphs, **options) as engine:
            info = engine.client.info()
            assert info["eager"] is None and info["config"]["cuda_graphs"] is graphs, info["eager"]
            together = engine.client.generate(asked)
            kernels[graphs] = sum(engine.client.stats()["kernels"].values())
            engine.client.reset_prefix_cache()
            alone = [engine.client.generate([request])[0] for request in asked]
            assert (engine.client.stats()["keys_dropped"] > 0) == model.startswith("glm")
            found[graphs] = [[(s.token_ids, s.logprobs) for s in side] for side in (together, alone)]
    assert found[False][0] == found[False][1] == found[True][0] == found[True][1]
    assert kernels[True] < kernels[False] / 2, kernels  # a replay calls nothing
