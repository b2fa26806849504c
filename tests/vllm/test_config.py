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
