"""Latent attention of vLLM (MLA), dense or with an indexer, routed to ``vime.ops`` as one layer.

vLLM wraps projections, norms, rotation, indexer and attention of such a layer in one replaceable class. Ours keeps the
submodules, so loading and names stay vLLM's, and evaluates the equations of :mod:`vime.ops.mla` on their live weights. Its
cache is one cell per token (:mod:`vime.vllm.latent_rows`): the indexer's own cache, which has no form on a CPU, is taken
out. Stock vLLM refuses sparse attention on a CPU where it picks a backend, and switches chunked prefill and the prefix
cache off for latent attention; with the plugin neither holds. vLLM 0.26, the release for GPUs here, differs in what it asks
of a layer with a cache and in its LayerNorm, which is no custom op there; both forms are met below.
"""
from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp, PluggableLayer, op_registry_oot
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.mla import MLAModules, MultiHeadLatentAttentionWrapper
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from vime import ops
from vime.latent import LATENT_EPS, Latent, latent
from vime.vllm import fp8, latent_device
from vime.vllm.attention import VimeAttentionBackend, VimeAttentionMetadata
from vime.vllm.latent_rows import RowFormat, Sequences, sequences
from vime.vllm.layers import UnsupportedLayer

FP8 = ("fp8", "fp8_e4m3")
_SPEC_FIELDS = frozenset(field.name for field in dataclasses.fields(MLAAttentionSpec))


class VimeLatentBackend(VimeAttentionBackend):
    """The metadata of plain attention serves latent attention too; only what is made of it differs."""

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int,
                           cache_dtype_str: str = "auto") -> tuple[int, ...]:
        return num_blocks, block_size, head_size  # asked for by vLLM 0.26; head_size is the width of a cell


class VimeLayerNorm(LayerNorm):
    """``ops.layer_norm``, with parameters in the model dtype: what the checkpoint holds is what is held."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True,
                 dtype: torch.dtype | None = None) -> None:
        if not (elementwise_affine and bias):
            raise UnsupportedLayer(f"LayerNorm of width {hidden_size} without weight or bias; covered: with both")
        if issubclass(LayerNorm, CustomOp):
            super().__init__(hidden_size, eps, elementwise_affine, bias, None)
            return
        super().__init__(hidden_size, eps)  # 0.26: parameters in fp32
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight is not None and self.bias is not None
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class VimeLatentAttention(MultiHeadLatentAttentionWrapper, AttentionLayerBase):
    """See the module's docstring."""

    def __init__(self, hidden_size: int, num_heads: int, scale: float, qk_nope_head_dim: int, qk_rope_head_dim: int,
                 v_head_dim: int, q_lora_rank: int | None, kv_lora_rank: int, mla_modules: MLAModules, cache_config: Any = None,
                 quant_config: Any = None, prefix: str = "", skip_topk: bool = False, **extra: Any) -> None:
        torch.nn.Module.__init__(self)
        vllm_config = get_current_vllm_config()
        m = latent(vllm_config.model_config.hf_config.to_dict())
        self.layer_name, self.layer = f"{prefix}.attn", extract_layer_index(prefix)
        self.m = _require(m, self.layer_name, mla_modules, num_heads, skip_topk)
        # Held in a tuple: DeepseekV2MLAAttention owns these modules, and each is to have one name.
        self._modules_of = (mla_modules,)
        self.has_indexer = mla_modules.indexer is not None
        if self.has_indexer:
            _without_cache(mla_modules.indexer, vllm_config)
            _with_our_norm(mla_modules.indexer)
        for norm in (mla_modules.q_a_layernorm, mla_modules.kv_a_layernorm):
            norm.variance_epsilon = LATENT_EPS  # type: ignore[union-attr]
        index = self.m.indexer.dim if self.has_indexer and self.m.indexer is not None else 0
        fp8_cache = cache_config is not None and cache_config.cache_dtype in FP8
        if cache_config is not None and not fp8_cache and cache_config.cache_dtype != "auto":
            raise UnsupportedLayer(f"{self.layer_name}: kv_cache_dtype {cache_config.cache_dtype!r}; covered: auto, fp8_e4m3")
        dtype: Any = vllm_config.model_config.dtype
        self.format = RowFormat(self.m.kv_rank, self.m.rope, index, dtype, fp8_cache)
        context = vllm_config.compilation_config.static_forward_context
        self._source: tuple[VimeLatentAttention, ...] = ()
        if self.m.indexer is not None and not self.has_indexer:
            full = max(i for i in range(self.layer) if self.m.indexer.full[i])
            self._source = (context[self.layer_name.replace(f".{self.layer}.", f".{full}.", 1)],)
        context[self.layer_name] = self
        self.kv_cache = torch.tensor([])
        self._chosen: tuple[Any, torch.Tensor] | None = None
        self._counted = [0, 0]
        # Graphs repeat what the device does, not what the host does. An eager engine lays its sequences out on the host.
        self.on_device = bool(vllm_config.compilation_config.cudagraph_mode) and torch.device(vllm_config.device_config.device).type == "cuda"
        self.counts_2: torch.Tensor | None = None  # keys seen and dropped, where they are counted on the device
        self.vime_decides, self.vime_observer = "index" if self.m.indexer is not None else None, None

    # -- what vLLM asks of a layer with a cache -----------------------------------------------------------------------

    def get_attn_backend(self) -> type[VimeLatentBackend]:
        return VimeLatentBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MLAAttentionSpec:
        shards = {"max_tp_shards": 1} if "max_tp_shards" in _SPEC_FIELDS else {}  # not in 0.26
        return MLAAttentionSpec(block_size=vllm_config.cache_config.block_size, num_kv_heads=1,
                                head_size=self.format.width, dtype=self.format.cache_dtype, **shards)

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """``kv_cache`` becomes ``[blocks, block size, width]``; 0.26 assigns it in that shape without a call."""
        self.kv_cache = kv_cache.squeeze(1)

    @property
    def _cells(self) -> torch.Tensor:
        """``[blocks, block size, width of this layer's cell]`` of the cache. 0.26 gives every layer the first layer's width,
        which has an indexer wherever one has."""
        self._require_width()
        return self.kv_cache[..., :self.format.width]

    def _require_width(self) -> None:
        if self.kv_cache.shape[-1] < self.format.width:
            raise UnsupportedLayer(f"{self.layer_name}: vLLM made its cache {self.kv_cache.shape[-1]} wide; a cell needs {self.format.width}")

    @property
    def keys_seen(self) -> int:
        """Keys that the queries of this layer's indexer could have read."""
        return self._counted[0] + (0 if self.counts_2 is None else int(self.counts_2[0]))

    @property
    def keys_dropped(self) -> int:
        """How many of these it left out."""
        return self._counted[1] + (0 if self.counts_2 is None else int(self.counts_2[1]))

    # -- the layer ----------------------------------------------------------------------------------------------------

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor,
                llama_4_scaling: torch.Tensor | None = None) -> torch.Tensor:
        """Shapes: positions ``[T]``, hidden_states ``[T, H]`` (after the input norm) -> ``[T, H]``."""
        if llama_4_scaling is not None:
            raise UnsupportedLayer(f"{self.layer_name}: llama 4 scaling; covered: none")
        context: Any = get_forward_context()
        if context.attn_metadata is None:  # a profiling run without a cache: shapes only
            return torch.zeros_like(hidden_states)
        metadata: VimeAttentionMetadata = context.attn_metadata[self.layer_name]
        n = metadata.num_actual_tokens
        out = self._tokens(hidden_states[:n], positions[:n], metadata, context)
        return out if n == hidden_states.shape[0] else torch.cat([out, out.new_zeros(hidden_states.shape[0] - n, out.shape[1])])

    def _tokens(self, x_TH: torch.Tensor, positions_T: torch.Tensor, metadata: VimeAttentionMetadata, step: Any) -> torch.Tensor:
        m = self.m
        p: Any = self._modules_of[0]
        cos_PR, sin_PR = p.rotary_emb._table(x_TH.device)
        cos_TR, sin_TR = cos_PR.index_select(0, positions_T), sin_PR.index_select(0, positions_T)
        down_TD = fp8.evaluate(p.fused_qkv_a_proj, x_TH)
        qn_TQ = ops.rms_norm(down_TD[:, :m.q_rank].contiguous(), p.q_a_layernorm.weight, LATENT_EPS)
        row_TD = ops.latent_row(down_TD[:, m.q_rank:], p.kv_a_layernorm.weight, LATENT_EPS, cos_TR, sin_TR)
        q_THD = fp8.evaluate(p.q_b_proj, qn_TQ).view(-1, m.heads, m.nope + m.rope)
        kv_b_HOL = p.kv_b_proj.weight.view(m.heads, m.nope + m.v, m.kv_rank)
        query_THD = ops.latent_query(q_THD, kv_b_HOL, cos_TR, sin_TR)
        index = self._index(x_TH, qn_TQ, cos_TR, sin_TR) if self.has_indexer else None
        if self.on_device:
            self._require_width()
            o_THL = latent_device.attend(self, metadata, query_THD, row_TD, index, step)
            return fp8.evaluate(p.o_proj, ops.out_of_latent(o_THL, kv_b_HOL, m.nope).reshape(-1, m.heads * m.v))
        self._write(self.format.pack(row_TD, None if index is None else index[1]), metadata.slot_mapping_T)
        layout = self._layout(metadata)
        cells_SW = self._cells[layout.block_S, layout.offset_S]
        rows_TK = self._rows(layout, cells_SW, index, step)
        o_THL = ops.sparse_attention(query_THD, self.format.rows(cells_SW), rows_TK, m.kv_rank, m.scale)
        o_THV = ops.out_of_latent(o_THL, kv_b_HOL, m.nope)
        return fp8.evaluate(p.o_proj, o_THV.reshape(-1, m.heads * m.v))

    def _index(self, x_TH: torch.Tensor, qn_TQ: torch.Tensor, cos_TR: torch.Tensor,
               sin_TR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The indexer's query ``[T, Hi, Di]``, key ``[T, Di]`` and head weights ``[T, Hi]`` of this step's tokens."""
        indexer: Any = self._modules_of[0].indexer
        spec = self.m.indexer
        assert spec is not None
        both_TO = ops.linear(x_TH, indexer.wk_weights_proj.weight)
        q_THD = ops.linear(qn_TQ, indexer.wq_b.weight).view(-1, spec.heads, spec.dim)
        norm = indexer.k_norm
        key_TD = ops.index_row(both_TO[:, :spec.dim].contiguous(), norm.weight, norm.bias, LATENT_EPS, cos_TR, sin_TR, spec.interleaved)
        return ops.index_query(q_THD, cos_TR, sin_TR, spec.interleaved), key_TD, both_TO[:, spec.dim:].contiguous()

    def _write(self, cells_TW: torch.Tensor, slots_T: torch.Tensor) -> None:
        slots = slots_T[:cells_TW.shape[0]].long()
        size = self.kv_cache.shape[1]
        self._cells[slots // size, slots % size] = cells_TW

    def _layout(self, metadata: VimeAttentionMetadata) -> Sequences:
        if metadata.sequences is None:
            metadata.sequences = sequences(metadata.query_start_loc_B1.tolist(), metadata.seq_lens_B.tolist(),
                                           metadata.block_table_BM, self.kv_cache.shape[1])
        return metadata.sequences

    def _rows(self, layout: Sequences, cells_SW: torch.Tensor, index: Any, step: Any) -> torch.Tensor:
        """The rows that each token reads: all earlier ones, or those that this or the last full layer chose."""
        if self.m.indexer is None:
            return ops.causal_index(layout.start_T, layout.position_T)
        chosen_TK = self.choice(None if index is None else self._choose(layout, self.format.keys(cells_SW), index), step)
        return torch.where(chosen_TK >= 0, chosen_TK + layout.start_T[:, None], -1).to(torch.int32)

    def choice(self, own_TK: torch.Tensor | None, step: Any) -> torch.Tensor:
        """The keys of this step: those just chosen, kept for the layers that share them, or those of the last full layer."""
        if own_TK is not None:
            self._chosen = step, own_TK
        kept = self._chosen if own_TK is not None else self._source[0]._chosen
        if kept is None or kept[0] is not step:
            raise UnsupportedLayer(f"{self.layer_name} shares the keys that {self._source[0].layer_name} chose, but that "
                                   "layer has not run in this step")
        if self.vime_observer is not None:
            self.vime_observer(kept[1])
        return kept[1]

    def _choose(self, layout: Sequences, keys_SI: torch.Tensor, index: Any) -> torch.Tensor:
        """Positions ``[T, top_k]`` in rising order, ``-1`` past the end; each sequence by itself."""
        q_THD, _, weights_TH = index
        spec = self.m.indexer
        assert spec is not None
        out = torch.full((q_THD.shape[0], spec.top_k), -1, dtype=torch.int32, device=q_THD.device)
        for start, length, (begin, end) in zip(layout.starts, layout.lengths, layout.queries, strict=True):
            scores_TS = ops.index_scores(q_THD[begin:end], keys_SI[start:start + length], weights_TH[begin:end])
            chosen = ops.select(scores_TS, layout.position_T[begin:end] + 1, spec.top_k)
            out[begin:end, :chosen.shape[1]] = chosen
        seen = int((layout.position_T + 1).sum())
        self._counted = [self._counted[0] + seen, self._counted[1] + seen - int((out >= 0).sum())]
        return out


def _require(m: Latent | None, name: str, modules: MLAModules, heads: int, skip_topk: bool) -> Latent:
    """The reading of the config, if vLLM built the layer as it says. Raises UnsupportedLayer naming the difference."""
    if m is None:
        raise UnsupportedLayer(f"{name}: latent attention of a model type that vime does not cover; covered: deepseek_v3, glm_moe_dsa")
    if heads != m.heads:
        raise UnsupportedLayer(f"{name}: {heads} of {m.heads} heads (tensor parallel); covered: tensor parallel size 1")
    if modules.fused_qkv_a_proj is None or modules.q_a_layernorm is None or modules.q_b_proj is None:
        raise UnsupportedLayer(f"{name}: queries without a low rank; covered: q_lora_rank")
    if getattr(modules, "g_proj", None) is not None:  # not in 0.26
        raise UnsupportedLayer(f"{name}: a gate on the output; covered: none")
    if type(modules.rotary_emb).__name__ != "VimeRotaryEmbedding":
        raise UnsupportedLayer(f"{name}: rotary embedding {type(modules.rotary_emb).__name__}; latent attention needs the "
                               "operation rope aligned, and covers plain rotary embedding")
    if m.indexer is None:
        return m
    full = m.indexer.full[extract_layer_index(name)]
    if full != (modules.indexer is not None) or full == skip_topk:
        raise UnsupportedLayer(
            f"{name}: the config says its indices are {'computed' if full else 'shared'} (indexer_types), vLLM "
            f"{'computes' if modules.indexer is not None and not skip_topk else 'shares'} them; write index_topk_freq and "
            "index_skip_topk_offset of config.json so that they give the same layers")
    return m


def _without_cache(indexer: Any, vllm_config: VllmConfig) -> None:
    """Take the stock cache and scoring out of an indexer: keys lie in the cells of the attention layer."""
    vllm_config.compilation_config.static_forward_context.pop(indexer.k_cache.prefix)
    indexer.k_cache = indexer.indexer_op = None


def _with_our_norm(indexer: Any) -> None:
    """vLLM 0.26 builds a LayerNorm that no registration replaces; put ours in its place before weights are loaded."""
    norm = indexer.k_norm
    if type(norm) is LayerNorm:
        indexer.k_norm = VimeLayerNorm(norm.weight.shape[0], norm.eps).to(norm.weight.device)


def _keep_scheduling(stock: Any) -> Any:
    @functools.wraps(stock)
    def check_and_update_config(cls: Any, vllm_config: VllmConfig) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        asked = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching, cache.block_size
        by_user = cache.user_specified_block_size
        stock.__func__(cls, vllm_config)
        if vllm_config.model_config is not None and vllm_config.model_config.use_mla:
            scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching, block_size = asked
            if by_user:
                cache.block_size = block_size

    return classmethod(check_and_update_config)


def install() -> None:
    """Register the layer, its norm, and on a CPU keep what was asked for of scheduling and cache."""
    if issubclass(LayerNorm, CustomOp) and op_registry_oot.get("LayerNorm") is not VimeLayerNorm:
        CustomOp.register_oot(name="LayerNorm")(VimeLayerNorm)
    if op_registry_oot.get("MultiHeadLatentAttentionWrapper") is not VimeLatentAttention:
        PluggableLayer.register_oot(name="MultiHeadLatentAttentionWrapper")(VimeLatentAttention)
    platform: Any = type(current_platform) if not isinstance(current_platform, type) else current_platform
    stock = platform.check_and_update_config
    if current_platform.is_cpu() and not hasattr(stock, "__wrapped__"):
        platform.check_and_update_config = _keep_scheduling(stock)
