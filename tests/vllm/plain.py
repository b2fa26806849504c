"""The three models with experts or latent attention, written out plainly: one sequence, one pass, ops on the files' tensors.

What an engine does with pages, chunks, batches and caches must give the bits of this.
"""
from __future__ import annotations

from pathlib import Path

import torch

from vime import ops
from vime.latent import LATENT_EPS, Experts, Latent, experts, latent
from vime.weights.checkpoint import HfCheckpoint


class Plain:
    """``folder`` in ``dtype``; with ``fp8`` the latent rows go through the FP8 cache. Keeps what each layer chose."""

    def __init__(self, folder: Path, dtype: torch.dtype, fp8: bool = False) -> None:
        source = HfCheckpoint(folder)
        self.c, self.fp8 = source.config, fp8
        self.w = {n: t if n.endswith("e_score_correction_bias") else t.to(dtype) for n, t in source.items()}
        self.latent, self.experts = latent(self.c), experts(self.c)
        self.base = float(self.c["rope_parameters"]["rope_theta"])
        self.index: dict[int, torch.Tensor] = {}
        self.routing: dict[int, torch.Tensor] = {}

    def logits(self, ids: list[int]) -> torch.Tensor:
        position_T = torch.arange(len(ids))
        eps = self.c["rms_norm_eps"]
        x = ops.embedding(torch.tensor(ids), self.w["model.embed_tokens.weight"])
        for i in range(self.c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            h = ops.rms_norm(x, self.w[f"{p}input_layernorm.weight"], eps)
            x = x + (self._mla(i, h, position_T, self.latent) if self.latent else self._gqa(i, h, position_T))
            h = ops.rms_norm(x, self.w[f"{p}post_attention_layernorm.weight"], eps)
            assert self.experts is not None
            x = x + (self._moe(i, h, self.experts) if self.experts.sparse[i] else self._glu(f"{p}mlp.", h))
        return ops.linear(ops.rms_norm(x, self.w["model.norm.weight"], eps), self.w["lm_head.weight"])

    def logprobs(self, prompt: list[int], response: list[int]) -> list[float]:
        logits = self.logits([*prompt, *response])[len(prompt) - 1:-1]
        return ops.token_logprob(logits, torch.tensor(response)).tolist()

    def _gqa(self, i: int, x: torch.Tensor, position_T: torch.Tensor) -> torch.Tensor:
        p, d, eps = f"model.layers.{i}.self_attn.", self.c["head_dim"], self.c["rms_norm_eps"]
        cos, sin = ops.rope_cos_sin(position_T, d, self.base)
        q, k, v = (ops.linear(x, self.w[f"{p}{n}_proj.weight"]).view(len(x), -1, d) for n in "qkv")
        q = ops.apply_rope(ops.rms_norm(q, self.w[f"{p}q_norm.weight"], eps), cos, sin)
        k = ops.apply_rope(ops.rms_norm(k, self.w[f"{p}k_norm.weight"], eps), cos, sin)
        o = ops.attention_varlen(q, k, v, torch.tensor([0, len(x)], dtype=torch.int32), d**-0.5)
        return ops.linear(o.reshape(len(x), -1), self.w[f"{p}o_proj.weight"])

    def _mla(self, i: int, x: torch.Tensor, position_T: torch.Tensor, m: Latent) -> torch.Tensor:
        p = f"model.layers.{i}.self_attn."
        cos, sin = ops.rope_cos_sin(position_T, m.rope, self.base)
        qn = ops.rms_norm(ops.linear(x, self.w[f"{p}q_a_proj.weight"]), self.w[f"{p}q_a_layernorm.weight"], LATENT_EPS)
        row = ops.latent_row(ops.linear(x, self.w[f"{p}kv_a_proj_with_mqa.weight"]), self.w[f"{p}kv_a_layernorm.weight"],
                             LATENT_EPS, cos, sin)
        kv_b = self.w[f"{p}kv_b_proj.weight"].view(m.heads, m.nope + m.v, m.kv_rank)
        q = ops.latent_query(ops.linear(qn, self.w[f"{p}q_b_proj.weight"]).view(len(x), m.heads, -1), kv_b, cos, sin)
        if self.fp8:
            row = ops.through_fp8_cache(row, m.kv_rank)
        rows = ops.causal_index(torch.zeros_like(position_T), position_T)
        if m.indexer is not None:
            s = m.indexer
            if s.full[i]:
                n = f"{p}indexer."
                iq = ops.index_query(ops.linear(qn, self.w[f"{n}wq_b.weight"]).view(len(x), s.heads, s.dim), cos, sin, s.interleaved)
                ik = ops.index_row(ops.linear(x, self.w[f"{n}wk.weight"]), self.w[f"{n}k_norm.weight"], self.w[f"{n}k_norm.bias"],
                                   LATENT_EPS, cos, sin, s.interleaved)
                scores = ops.index_scores(iq, ik, ops.linear(x, self.w[f"{n}weights_proj.weight"]))
                self.index[i] = ops.select(scores, position_T + 1, s.top_k)
            else:
                self.index[i] = self.index[i - 1]
            rows = self.index[i]
        o = ops.out_of_latent(ops.sparse_attention(q, row, rows, m.kv_rank, m.scale), kv_b, m.nope)
        return ops.linear(o.reshape(len(x), -1), self.w[f"{p}o_proj.weight"])

    def _moe(self, i: int, x: torch.Tensor, e: Experts) -> torch.Tensor:
        p = f"model.layers.{i}.mlp."
        scores = ops.router_scores(x, self.w[f"{p}gate.weight"], e.kind)
        bias = self.w[f"{p}gate.e_score_correction_bias"] if e.bias else None
        ids, weights = ops.route(scores, e.top_k, bias_E=bias, **e.route_options())
        self.routing[i] = ids
        slots = [torch.cat([self._glu(f"{p}experts.{int(ids[t, k])}.", x[t:t + 1]) for k in range(e.top_k)]) for t in range(len(x))]
        y = ops.combine_slots(torch.stack(slots), weights)
        return y + self._glu(f"{p}shared_experts.", x) if e.shared else y

    def _glu(self, p: str, x: torch.Tensor) -> torch.Tensor:
        both = torch.cat([ops.linear(x, self.w[f"{p}{n}_proj.weight"]) for n in ("gate", "up")], dim=1)
        return ops.linear(ops.silu_and_mul(both), self.w[f"{p}down_proj.weight"])
