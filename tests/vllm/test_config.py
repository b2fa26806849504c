"""What is decided about an engine before vLLM is imported."""
from __future__ import annotations

import pytest

from vime.vllm.config import GRAPH_SIZES, EngineConfig


@pytest.mark.parametrize("longest", [None, 16, 100, 256, 1024])
@pytest.mark.parametrize("chunk", [1, 33, 64, 512])
def test_graphs_never_claim_more_keys_than_a_sequence_has(longest, chunk):
    sizes = EngineConfig(model="m", device="cuda", max_model_len=longest, max_num_batched_tokens=chunk).graph_sizes()
    limit = min(chunk, longest or chunk)
    assert sizes == [n for n in GRAPH_SIZES if n <= limit] and sizes


def test_no_graphs_where_none_can_be():
    assert EngineConfig(model="m", device="cpu").graph_sizes() == []
    assert EngineConfig(model="m", device="cuda", cuda_graphs=False).graph_sizes() == []
