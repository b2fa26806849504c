"""Megatron's own sparse attention as an oracle: its absorbed MLA, its indexer, its router and its dispatcher, with our weights.

Never the thing that is gated. A whole model can be built with 0.19 only (:func:`whole_models`); 0.16 has the parts of an earlier
form. Its parameters carry the same names as ours, so a state dict moves across as it is.
"""
from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from vime import latent as latents
from vime.megatron import model as models

_VARIANT = "megatron.core.transformer.experimental_attention_variant"


def whole_models() -> bool:
    """Whether this megatron-core can build GLM's form: with shared layers, interleaved pairs and packed sequences.

    0.16's is DeepSeek-V3.2's in bf16 alone: each layer has an indexer, which always takes a Hadamard transform (of a package that
    nothing here needs), and sequences are not packed.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    return "dsa_indexer_topk_freq" in {f.name for f in dataclasses.fields(TransformerConfig)}


def scores_of(q_THD: torch.Tensor, k_SD: torch.Tensor, weights_TH: torch.Tensor) -> torch.Tensor:
    """Index scores ``[T, S]`` from what the indexer's projections gave, as this release adds them up."""
    dsa = importlib.import_module(f"{_VARIANT}.dsa")
    scaled_TH = weights_TH * q_THD.shape[1]**-0.5 * q_THD.shape[2]**-0.5
    inputs = (q_THD[:, None], scaled_TH[:, None], k_SD[:, None])
    if hasattr(dsa, "_compute_index_scores"):
        return dsa._compute_index_scores(*inputs)[0]
    return dsa.DSAIndexer._compute_index_scores(None, *inputs)[0]


def attention_of(q_THD: torch.Tensor, kv_SD: torch.Tensor, index_TK: torch.Tensor, value_dim: int, scale: float) -> torch.Tensor:
    """Attention of one sequence over chosen rows, ``[T, heads, value_dim]``. Rows without a choice name a later one, which the
    causal mask hides."""
    dsa = importlib.import_module(f"{_VARIANT}.dsa")
    heads, last = q_THD.shape[1], kv_SD.shape[0] - 1
    kv_SBHD = kv_SD[:, None, None].expand(-1, 1, heads, -1)
    chosen_BTK = torch.where(index_TK >= 0, index_TK.long(), last)[None]
    out_TBD = dsa.unfused_dsa_fn(q_THD[:, None], kv_SBHD, kv_SBHD[..., :value_dim], chosen_BTK, scale)
    return out_TBD[:, 0].unflatten(1, (heads, value_dim))


def config_of(hf_config: dict[str, Any], dtype: torch.dtype, **changes: Any) -> Any:
    """Megatron's ``MLATransformerConfig`` for a GLM config. Raises ValueError for what it has no field for."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    plain, m = models.transformer_config(hf_config, dtype), latents.latent(hf_config)
    offset = sum(1 for _ in iter(m.indexer.full)) - list(m.indexer.full)[::-1].index(True)
    freq = len(m.indexer.full)  # no second full layer after the first shared one
    if m.indexer.full != tuple(i < offset for i in range(freq)):
        raise ValueError("Megatron states which layers share as one offset and one frequency")
    if plain.layernorm_epsilon != latents.LATENT_EPS:
        raise ValueError("Megatron has one epsilon for all RMSNorms; it must be that of the norms inside MLA")
    fields = {f.name: getattr(plain, f.name) for f in dataclasses.fields(plain) if f.init}
    return MLATransformerConfig(**{
        **fields, "multi_latent_attention": True, "qk_layernorm": True, "q_lora_rank": m.q_rank, "kv_lora_rank": m.kv_rank,
        "qk_head_dim": m.nope, "qk_pos_emb_head_dim": m.rope, "v_head_dim": m.v, "rope_type": "rope", "rotary_base": m.base,
        "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": m.indexer.heads, "dsa_indexer_head_dim": m.indexer.dim,
        "dsa_indexer_topk": m.indexer.top_k, "dsa_indexer_topk_freq": freq, "dsa_indexer_skip_topk_offset": offset,
        "dsa_indexer_rope_interleaved": m.indexer.interleaved, "dsa_indexer_rotate_activation": False,
        "dsa_indexer_k_norm_epsilon": latents.LATENT_EPS, "dsa_indexer_loss_coeff": 0.0, **changes})


def build(hf_config: dict[str, Any], weights: dict[str, torch.Tensor], **changes: Any) -> Any:
    """A stock ``GPTModel`` with Megatron's DSA, in fp32. Build and run it with vime off."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_dsa_module_spec_for_backend,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    class Backend(LocalSpecProvider):
        """The local parts. They lack a layer for projections that every rank holds whole, which a TP size of 1 makes the same."""

        def linear(self) -> type:
            return ColumnParallelLinear

    class Whole(ColumnParallelLinear):
        def __init__(self, *args: Any, parallel_mode: str, **kwargs: Any) -> None:
            assert parallel_mode == "duplicated"
            super().__init__(*args, **kwargs)

    config, experts = config_of(hf_config, torch.float32, **changes), latents.experts(hf_config)
    specs = []
    for i in range(config.num_layers):
        spec = get_gpt_layer_local_spec(num_experts=experts.count if experts.sparse[i] else None, normalization="RMSNorm")
        attention = get_dsa_module_spec_for_backend(config, Backend())
        indexer = attention.submodules.core_attention.submodules.indexer.submodules
        indexer.linear_wq_b = indexer.linear_wk = indexer.linear_weights_proj = Whole
        spec.submodules.self_attention = attention
        specs.append(spec)
    model = GPTModel(config=config, transformer_layer_spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=WrappedTorchNorm),
                     vocab_size=hf_config["vocab_size"], max_sequence_length=hf_config["max_position_embeddings"], parallel_output=False,
                     share_embeddings_and_output_weights=False, position_embedding_type="rope", rotary_base=config.rotary_base)
    own = set(model.state_dict())
    model.load_state_dict({name: value for name, value in weights.items() if name in own}, strict=True)
    assert not {n for n in weights.keys() - own if "extra_state" not in n}, "a weight of ours has no place in Megatron's model"
    return model


@dataclasses.dataclass
class Seen:
    """What a pass left. ``scores[layer]``: of each sequence ``[n, n]``; ``chosen[layer]``: ``[T, top k]`` rows of the batch, ``-1``
    where there is none; ``attention[layer]``: the attention's output ``[T, H]``."""

    logits_TV: torch.Tensor
    scores: dict[int, list[torch.Tensor]]
    chosen: dict[int, torch.Tensor]
    attention: dict[int, torch.Tensor]


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Megatron casts to fp32 in the middle of its scores and its softmax; inside, these casts give float64."""
    stock = torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.float = stock  # type: ignore[method-assign]


def look(model: Any, sequences: Sequence[Sequence[int]]) -> Seen:
    """Run Megatron's own model on packed sequences and keep what its parts gave."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.experimental_attention_variant import dsa

    lengths = [len(s) for s in sequences]
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    packing = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    scores: dict[int, list[torch.Tensor]] = {}
    attention: dict[int, torch.Tensor] = {}

    def keep_scores(layer: int) -> Any:
        def hook(core: Any, args: Any, kwargs: Any) -> None:
            if core.indexer is not None:
                q, k, weights = core.indexer.forward_before_topk(kwargs["x"], kwargs["qr"], kwargs["packed_seq_params"])
                whole = dsa._compute_index_scores(q, weights, k)[0].detach()
                scores[layer] = [whole[a:b, a:b] for a, b in zip(cu.tolist(), cu.tolist()[1:], strict=False)]

        return hook

    def keep_attention(layer: int) -> Any:
        return lambda module, args, out: attention.update({layer: out[0].detach().flatten(0, 1)})

    handles = []
    for i, layer in enumerate(model.decoder.layers):
        handles.append(layer.self_attention.core_attention.register_forward_pre_hook(keep_scores(i), with_kwargs=True))
        handles.append(layer.self_attention.register_forward_hook(keep_attention(i)))
    try:
        ids = torch.tensor([[t for s in sequences for t in s]])
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        logits = model(ids, positions, None, packed_seq_params=packing)[0]
    finally:
        for handle in handles:
            handle.remove()
    held = getattr(packing, dsa.DSAttention._HOLDER_ATTR)
    chosen = {i: held[core.source_layer][0] for i, layer in enumerate(model.decoder.layers)
              for core in [layer.self_attention.core_attention]}
    return Seen(logits, scores, chosen, attention)
