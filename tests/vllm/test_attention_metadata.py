"""What the attention layers are told about a step."""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch


@pytest.mark.parametrize("claimed", [1, 96, 97, 2048])
def test_no_sequence_claims_more_keys_than_its_block_table_has_room_for(claimed):
    from vime.vllm.attention import VimeAttentionMetadataBuilder

    spec = SimpleNamespace(block_size=32, num_speculative_blocks=0)
    builder = VimeAttentionMetadataBuilder.__new__(VimeAttentionMetadataBuilder)
    builder.block_size = spec.block_size
    common = SimpleNamespace(
        causal=True, block_table_tensor=torch.zeros(2, 3, dtype=torch.int32), max_query_len=claimed, max_seq_len=claimed,
        seq_lens=torch.tensor([claimed, 1], dtype=torch.int32), num_actual_tokens=claimed, query_start_loc=torch.tensor([0, claimed, claimed]),
        slot_mapping=torch.zeros(claimed, dtype=torch.int64))
    assert builder.build(0, common).seq_lens_B.tolist() == [min(claimed, 96), 1]
