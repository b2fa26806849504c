"""Latent attention (MLA), dense or sparse (DSA), as one self-attention module for every covered Megatron release.

Megatron's own local form is broken in 0.16.1 and 0.19.2 (its core attention does not take the arguments that MLA
passes), and only 0.19 has an indexer, so there is nothing stock to route. This module is put where a ``TransformerLayer``
has its self-attention. It is built of Megatron's linear layers and norms, under the parameter names of Megatron's MLA and
DSA, and holds no numerics: every step is a function of :mod:`vime.ops`.

Which keys a shared layer reads is not computed there: it takes the choice of the last full layer before it. The choice
travels on the ``PackedSeqParams`` of the forward. Under full recompute the shared layers run again *before* the full one,
and then find what the full layer chose in the forward.
"""
from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm

import vime
from vime import ops
from vime.latent import LATENT_EPS, Indexer, Latent
from vime.megatron.patch import Refused, note
from vime.megatron.routes.attention import packed_boundaries
from vime.megatron.routes.rope import positions_of

_CHOICES = "vime_index_choices"
#: What latent attention cannot run without: there is no stock form of it to fall back to.
NEEDED = ("attention", "rope")


def _linear(config: Any, rows_in: int, rows_out: int, pg_collection: Any, *, row_parallel: bool = False) -> torch.nn.Module:
    """One of Megatron's two parallel linear layers, at tensor parallel size 1."""
    backend = LocalSpecProvider()
    common = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": False, "is_expert": False,
              "tp_group": getattr(pg_collection, "tp", None)}
    if row_parallel:
        return backend.row_parallel_linear()(rows_in, rows_out, input_is_parallel=True, **common)
    return backend.column_parallel_linear()(rows_in, rows_out, gather_output=False, **common)


class IndexNorm(torch.nn.Module):
    """Weight and bias of the LayerNorm of index keys; :func:`vime.ops.index_row` evaluates it."""

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(dim, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(dim, dtype=dtype))


class LightningIndexer(MegatronModule):
    """The indexer of one full layer: which keys each query may read. No gradient flows in or out."""

    def __init__(self, config: Any, latent: Latent, indexer: Indexer, pg_collection: Any) -> None:
        super().__init__(config=config)
        self.indexer = indexer
        self.linear_wq_b = _linear(config, latent.q_rank, indexer.heads * indexer.dim, pg_collection)
        self.linear_wk = _linear(config, config.hidden_size, indexer.dim, pg_collection)
        self.linear_weights_proj = _linear(config, config.hidden_size, indexer.heads, pg_collection)
        self.k_norm = IndexNorm(indexer.dim, config.params_dtype)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, x_TH: torch.Tensor, qn_TD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor,
                lengths: list[int]) -> torch.Tensor:
        """Rows of the packed batch that each token reads, in rising order, then ``-1``; int32 ``[T, K]``."""
        spec = self.indexer
        q_THD = ops.index_query(self.linear_wq_b(qn_TD)[0].view(-1, spec.heads, spec.dim), cos_TR, sin_TR, spec.interleaved)
        k_TD = ops.index_row(self.linear_wk(x_TH)[0], self.k_norm.weight, self.k_norm.bias, LATENT_EPS, cos_TR, sin_TR,
                             spec.interleaved)
        w_TH = self.linear_weights_proj(x_TH)[0]
        width, start, chosen = min(spec.top_k, max(lengths)), 0, []
        for n in lengths:  # the columns of the scores are positions of the token's own sequence
            part = slice(start, start + n)
            counts_T = torch.arange(1, n + 1, device=x_TH.device)
            places_TK = ops.select(ops.index_scores(q_THD[part], k_TD[part], w_TH[part]), counts_T, spec.top_k)
            rows_TK = torch.where(places_TK >= 0, places_TK + start, -1)
            chosen.append(torch.nn.functional.pad(rows_TK, (0, width - rows_TK.shape[1]), value=-1))
            start += n
        return torch.cat(chosen).to(torch.int32)


class SparseCore(MegatronModule):
    """Core attention over cache rows, with the indexer of the layer where it has one of its own."""

    def __init__(self, config: Any, latent: Latent, layer: int, pg_collection: Any) -> None:
        super().__init__(config=config)
        self.latent, self.layer = latent, layer
        full = latent.indexer is not None and latent.indexer.full[layer]
        self.indexer = LightningIndexer(config, latent, latent.indexer, pg_collection) if full else None  # type: ignore[arg-type]

    def choose(self, packing: Any, x_TH: torch.Tensor, qn_TD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor,
               starts_T: torch.Tensor, positions_T: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """The rows that each token reads, int32 ``[T, K]``."""
        if self.latent.indexer is None:
            return ops.causal_index(starts_T, positions_T)
        choices: dict[int, torch.Tensor] = getattr(packing, _CHOICES, None) or {}
        setattr(packing, _CHOICES, choices)
        if self.indexer is not None:
            choices[self.layer] = self.indexer(x_TH.detach(), qn_TD.detach(), cos_TR, sin_TR, lengths)
            return choices[self.layer]
        source = max(i for i in range(self.layer) if self.latent.indexer.full[i])
        if source not in choices:
            raise Refused(f"layer {self.layer} takes the indices of layer {source}, which has not run in this forward; index "
                          "sharing cannot cross pipeline stages, and each forward needs a PackedSeqParams of its own")
        return choices[source]

    def forward(self, q_THL: torch.Tensor, rows_TD: torch.Tensor, index_TK: torch.Tensor) -> torch.Tensor:
        return ops.sparse_attention(q_THL, rows_TD, index_TK, self.latent.kv_rank, self.latent.scale)


class LatentSelfAttention(MegatronModule):
    """MLA in its latent form on packed sequences. Takes and gives what Megatron's ``SelfAttention`` does.

    Args:
        config: the model's ``TransformerConfig``, with ``kv_channels`` equal to the rotary dimension.
        layer_number: from 1, as Megatron counts.
        latent: the shapes.
        fp8_cache: round the rows as the engine's FP8-E4M3 cache does.
    """

    def __init__(self, config: Any, layer_number: int, latent: Latent, fp8_cache: bool = False, pg_collection: Any = None,
                 **_: Any) -> None:
        super().__init__(config=config)
        self.latent, self.layer_number, self.fp8_cache = latent, layer_number, fp8_cache
        hidden = config.hidden_size
        self.linear_q_down_proj = _linear(config, hidden, latent.q_rank, pg_collection)
        self.q_layernorm = WrappedTorchNorm(config, latent.q_rank, eps=LATENT_EPS)
        self.linear_q_up_proj = _linear(config, latent.q_rank, latent.heads * (latent.nope + latent.rope), pg_collection)
        self.linear_kv_down_proj = _linear(config, hidden, latent.row, pg_collection)
        self.kv_layernorm = WrappedTorchNorm(config, latent.kv_rank, eps=LATENT_EPS)
        self.linear_kv_up_proj = _linear(config, latent.kv_rank, latent.heads * (latent.nope + latent.v), pg_collection)
        self.linear_proj = _linear(config, latent.heads * latent.v, hidden, pg_collection, row_parallel=True)
        self.core_attention = SparseCore(config, latent, layer_number - 1, pg_collection)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, *, rotary_pos_emb: torch.Tensor | None = None,
                packed_seq_params: Any = None, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """``[T, 1, H]`` in and out; the second result is the bias, which there is none of."""
        given = [name for name, value in kwargs.items() if value is not None]
        if given:
            raise Refused(f"latent attention was called with {', '.join(given)}, which it can't align")
        missing = [op for op in NEEDED if not vime.is_enabled(op)]
        if missing or packed_seq_params is None or rotary_pos_emb is None:
            raise Refused("latent attention has no stock form in Megatron: it needs "
                          f"{' and '.join(NEEDED)} aligned (missing: {', '.join(missing) or 'nothing'}) and packed sequences "
                          f"({'given' if packed_seq_params is not None else 'not given'})")
        if self.training and self.config.attention_dropout > 0:
            raise Refused(f"attention dropout is {self.config.attention_dropout} in train mode; latent attention has none: set "
                          "attention_dropout to 0.0 or call model.eval()")
        note("attention")
        m, x_TH = self.latent, hidden_states.reshape(-1, hidden_states.shape[-1])
        cu_B1 = packed_boundaries(packed_seq_params)
        positions_T = positions_of(cu_B1, x_TH.shape[0])
        lengths = (cu_B1[1:] - cu_B1[:-1]).tolist()
        starts_T = torch.arange(x_TH.shape[0], device=positions_T.device) - positions_T
        cos_TR, sin_TR = rotary_pos_emb[:, 0, 0][positions_T], rotary_pos_emb[:, 0, 1][positions_T]
        qn_TD = self.q_layernorm(self.linear_q_down_proj(x_TH)[0])
        q_THD = self.linear_q_up_proj(qn_TD)[0].view(-1, m.heads, m.nope + m.rope)
        rows_TD = ops.latent_row(self.linear_kv_down_proj(x_TH)[0], self.kv_layernorm.weight, LATENT_EPS, cos_TR, sin_TR)
        if self.fp8_cache:
            rows_TD = ops.through_fp8_cache(rows_TD, m.kv_rank)
        kv_b_HOL = self.linear_kv_up_proj.get_parameter("weight").view(m.heads, m.nope + m.v, m.kv_rank)
        index_TK = self.core_attention.choose(packed_seq_params, x_TH, qn_TD, cos_TR, sin_TR, starts_T, positions_T, lengths)
        o_THL = self.core_attention(ops.latent_query(q_THD, kv_b_HOL, cos_TR, sin_TR), rows_TD, index_TK)
        out_TH = self.linear_proj(ops.out_of_latent(o_THL, kv_b_HOL, m.nope).reshape(x_TH.shape[0], -1))[0]
        return out_TH.view(hidden_states.shape), None
