"""An attention backend for vLLM that writes and reads the paged cache through ``vime.ops`` only.

vLLM allocates the cache as ``[blocks, kv heads, block size, 2 * head dim]``; this backend views those bytes in the layout
of the implementation (``ops.kv_cache_shape``), so that nothing of vLLM's layout enters the numerics.
"""
from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vime import ops
from vime.latent import experts
from vime.vllm.latent_rows import Sequences
from vime.vllm.layers import UnsupportedLayer


def backend_name() -> str:
    """The registry slot that is taken: the CPU platform knows one backend only, elsewhere there is a free slot."""
    return "CPU_ATTN" if current_platform.is_cpu() else "CUSTOM"


@dataclasses.dataclass
class VimeAttentionMetadata:
    """One step's batch: ``query_start_loc_B1`` and ``seq_lens_B`` int32, ``block_table_BM`` int32, ``slot_mapping_T`` int64."""

    num_actual_tokens: int
    query_start_loc_B1: torch.Tensor
    seq_lens_B: torch.Tensor
    block_table_BM: torch.Tensor
    slot_mapping_T: torch.Tensor
    sequences: Sequences | None = None  # filled by the first latent layer that needs it
    plan: tuple[Any, torch.Tensor | None] | None = None  # filled by the first layer of each shape
    tokens: Any = None  # filled by the first latent layer of a step that may be captured


class VimeAttentionMetadataBuilder(AttentionMetadataBuilder[VimeAttentionMetadata]):
    # Everything that varies between steps is read from tensors, so one captured step serves any mix of prompts and decodes.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = int(kv_cache_spec.block_size)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata,
              fast_build: bool = False) -> VimeAttentionMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise UnsupportedLayer("attention that is not causal; vime covers causal decoder attention")
        room = common.block_table_tensor.shape[1] * self.block_size
        if max(common.max_query_len, common.max_seq_len) > room:
            # A dummy step before a capture claims as many keys as it has tokens; a block table has room for the longest
            # sequence only, and the kernel would read past its end.
            common.seq_lens.clamp_(max=room)
        return VimeAttentionMetadata(common.num_actual_tokens, common.query_start_loc, common.seq_lens,
                                     common.block_table_tensor, common.slot_mapping)


class VimeAttentionImpl(AttentionImpl):
    """Causal grouped-query attention over the paged cache."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
                 alibi_slopes: list[float] | None = None, sliding_window: int | None = None,
                 kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
                 attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None,
                 **extra: Any) -> None:
        asked = {"alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap,
                 "kv_sharing_target_layer_name": kv_sharing_target_layer_name, **extra}
        refused = {name: value for name, value in asked.items() if value not in (None, 0, False)}
        if attn_type != AttentionType.DECODER:
            refused["attn_type"] = attn_type
        if refused:
            raise UnsupportedLayer("attention with " + ", ".join(f"{k}={v!r}" for k, v in refused.items())
                                   + "; vime covers plain causal grouped-query attention")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        # Rows of padding in a captured step: a router must not meet what happened to lie there, which may be NaN.
        self.padding_is_read = experts(get_current_vllm_config().model_config.hf_config.to_dict()) is not None

    def _view(self, kv_cache: torch.Tensor) -> torch.Tensor:
        num_blocks, _, block_size, _ = kv_cache.shape
        return kv_cache.view(ops.kv_cache_shape(num_blocks, block_size, self.num_kv_heads, self.head_size, kv_cache.dtype,
                                                kv_cache.device))

    def do_kv_cache_update(self, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                           slot_mapping: torch.Tensor) -> None:
        ops.kv_cache_write(key, value, self._view(kv_cache), slot_mapping)

    def forward(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                kv_cache: torch.Tensor, attn_metadata: VimeAttentionMetadata | None, output: torch.Tensor,
                output_scale: torch.Tensor | None = None, output_block_scale: torch.Tensor | None = None) -> torch.Tensor:
        """Shapes: query, output ``[T, heads, D]``; key, value ``[T, kv heads, D]`` are already in the cache."""
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedLayer("attention with a quantised output; switch output quantisation off")
        if attn_metadata is None:  # a profiling run without a cache: shapes only
            return output.zero_()
        if self.padding_is_read:
            output.zero_()
        tokens, cache = attn_metadata.num_actual_tokens, self._view(kv_cache)
        lengths = attn_metadata.block_table_BM, attn_metadata.seq_lens_B, attn_metadata.query_start_loc_B1
        # a plan made outside of a capture would be repeated by the graph as it was then
        shape = query.shape[1:], cache.shape[2:], query.is_cuda and torch.cuda.is_current_stream_capturing()
        if attn_metadata.plan is None or attn_metadata.plan[0] != shape:  # the first layer of a step; the others are like it
            attn_metadata.plan = shape, ops.attention_plan(query[:tokens], cache, *lengths)
        ops.attention_paged_into(output[:tokens], query[:tokens], cache, *lengths, self.scale, attn_metadata.plan[1])
        return output


class VimeAttentionBackend(AttentionBackend):
    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "float32"]

    @staticmethod
    def get_name() -> str:
        return backend_name()

    @staticmethod
    def get_impl_cls() -> type[VimeAttentionImpl]:
        return VimeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[VimeAttentionMetadataBuilder]:
        return VimeAttentionMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int,
                           cache_dtype_str: str = "auto") -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, 2 * head_size  # asked for by vLLM 0.26, derived from the spec by 0.32

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        return "HND"  # 0.26: memory order as in get_kv_cache_shape

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        from vllm.v1.kv_cache_layout import KVCacheLayout  # 0.32 only

        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:
        return False  # a shared-prefix split would add keys in another order


def install() -> None:
    register_backend(AttentionBackendEnum[backend_name()], f"{__name__}.VimeAttentionBackend")
