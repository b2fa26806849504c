"""Plain forms of every operation, in the dtype of their input, built of stock torch.

They say what an operation means, run in float64 under torch's own autograd, and are what the kernels are measured
against. They are not batch-invariant and nothing falls back to them.
"""
from __future__ import annotations

import itertools
import math

import torch


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    y_TN = x_TK @ weight_NK.T
    return y_TN if bias_N is None else y_TN + bias_N


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    return x_TH * torch.rsqrt(x_TH.square().mean(-1, keepdim=True) + eps) * weight_H


def add_rms_norm(x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor,
                 eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    summed_TH = x_TH + residual_TH
    return rms_norm(summed_TH, weight_H, eps), summed_TH


def apply_rope(x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    R = cos_TR.shape[1]
    cos, sin = cos_TR[:, None, :].to(x_THD.dtype), sin_TR[:, None, :].to(x_THD.dtype)
    turned, rest = x_THD[..., :2 * R], x_THD[..., 2 * R:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :R], turned[..., R:]
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((out, rest), dim=-1)


def silu_and_mul(x_T2F: torch.Tensor) -> torch.Tensor:
    gate, up = x_T2F.chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def embedding(ids_T: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    return weight_VH[ids_T.long()]


def attention_varlen(q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, cu_seqlens_B1: torch.Tensor,
                     scale: float, causal: bool = True) -> torch.Tensor:
    groups = q_THD.shape[1] // k_TGD.shape[1]
    bounds = [int(c) for c in cu_seqlens_B1]
    rows = []
    for start, stop in itertools.pairwise(bounds):
        q, k, v = q_THD[start:stop], k_TGD[start:stop], v_TGD[start:stop]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        rows.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    rows.append(torch.zeros_like(q_THD[bounds[-1]:]))
    return torch.cat(rows)


def log_softmax(logits_TV: torch.Tensor, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.to(logits_TV.dtype)[:, None]
    return torch.log_softmax(logits_TV / temperature, dim=-1)


def token_logprob(logits_TV: torch.Tensor, ids_T: torch.Tensor, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
    return log_softmax(logits_TV, temperature).gather(1, ids_T.long()[:, None])[:, 0]


def kept_tokens(logits_V: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """Ids that top-k, then top-p keep, by falling probability, lower id first on ties."""
    scaled = logits_V.double() / temperature
    order = torch.sort(scaled, descending=True, stable=True).indices
    if 0 < top_k < len(order):
        order = order[:top_k]
    if top_p < 1:
        mass = torch.cumsum(torch.softmax(scaled[order], 0), 0)
        order = order[:int((mass < top_p).sum()) + 1]
    return order


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., SC'11), in Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    mask = 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & mask, (p0 >> 32) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def gumbel(seed: int, position: int, vocabulary: int) -> torch.Tensor:
    """float64 Gumbel noise of one row: word ``v % 4`` of counter ``(v // 4, position, 0)``; ``u = (bits + 1/2) / 2^32``."""
    seed &= 0xFFFFFFFFFFFFFFFF
    words: list[int] = []
    for block in range((vocabulary + 3) // 4):
        words += philox4x32((block, position & 0xFFFFFFFF, (position >> 32) & 0xFFFFFFFF, 0), (seed & 0xFFFFFFFF, seed >> 32))
    u = (torch.tensor(words[:vocabulary], dtype=torch.float64) + 0.5) * 2.0 ** -32
    return -torch.log(-torch.log1p(-u))


def sample(logits_V: torch.Tensor, seed: int, position: int, temperature: float, top_k: int = 0, top_p: float = 1.0) -> int:
    """One row of ``vime.ops.sample`` in float64."""
    if temperature == 0:
        return int(torch.argmax(logits_V))
    kept = torch.sort(kept_tokens(logits_V, temperature, top_k, top_p)).values
    scores = logits_V.double() / temperature + gumbel(seed, position, len(logits_V))
    return int(kept[torch.argmax(scores[kept])])
