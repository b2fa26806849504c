"""What is decided about an engine before vLLM is imported."""
from __future__ import annotations

import pytest

from vime.vllm.config import GRAPH_SIZES, EngineConfig


@pytest.mark.parametrize("chunk", [1, 33, 64, 512, 2048, 9000])
def test_every_step_up_to_the_largest_graph_has_one(chunk):
    sizes = EngineConfig(model="m", device="cuda", max_num_batched_tokens=chunk).graph_sizes()
    assert sizes == [n for n in GRAPH_SIZES if n <= chunk] and sizes


def test_no_graphs_where_none_can_be():
    assert EngineConfig(model="m", device="cpu").graph_sizes() == []
    assert EngineConfig(model="m", device="cuda", cuda_graphs=False).graph_sizes() == []


def test_a_cache_of_a_given_size_asks_for_no_share_of_the_memory():
    assert EngineConfig(model="m", device="cuda", gpu_memory_utilization=0.7).memory_share() == 0.7
    assert EngineConfig(model="m", device="cuda", gpu_memory_utilization=0.7, kv_cache_bytes=1 << 30).memory_share() == 0.05
