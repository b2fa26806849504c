"""Rotary position embedding: a table that both sides share, and the rotation.

Stock code builds the table in fp32 on one side and bf16 on another. Here angles are float64, cosine and sine are
evaluated in float64 on the device of the positions and rounded once to fp32.
"""
from __future__ import annotations

import math
from typing import Any

import torch

from vime.ops import registry


def rope_cos_sin(positions_T: torch.Tensor, dim: int, base: float,
                 scaling: dict[str, Any] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``cos(p * f_i), sin(p * f_i)`` with ``f_i = base^(-2i/dim)`` (arXiv:2104.09864).

    Args:
        positions_T: int, any device.
        dim: rotary dimension (even).
        base: ``rope_theta``.
        scaling: Hugging Face ``rope_scaling``/``rope_parameters``; types ``default``, ``linear`` and ``llama3``.

    Returns:
        ``(cos_TR, sin_TR)`` fp32 ``[T, dim/2]`` on the device of ``positions_T``.
    """
    if dim <= 0 or dim % 2:
        raise ValueError(f"rope_cos_sin: dim must be even and positive, found {dim}")
    if positions_T.is_floating_point() or positions_T.dim() != 1:
        raise ValueError(f"rope_cos_sin: positions must be integers [T], found {positions_T.dtype} {tuple(positions_T.shape)}")
    frequencies_R = torch.tensor(inverse_frequencies(dim, float(base), scaling), dtype=torch.float64)
    table = registry.resolve("rope", positions_T.device, torch.float32).functions["table"]
    return table(positions_T.detach().to(torch.int64), frequencies_R.to(positions_T.device))


def inverse_frequencies(dim: int, base: float, scaling: dict[str, Any] | None = None) -> list[float]:
    """The ``dim/2`` rotary frequencies in float64, scaled as Hugging Face ``transformers`` does it."""
    frequencies = [base ** (-2.0 * i / dim) for i in range(dim // 2)]
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if kind == "default":
        return frequencies
    assert scaling is not None
    factor = float(scaling["factor"]) if "factor" in scaling else None
    if factor is None or kind not in ("linear", "llama3"):
        raise ValueError(f"rope_scaling of type {kind!r} with fields {sorted(scaling)} is not covered; "
                         "covered: default, linear (factor), llama3 (factor, low_freq_factor, high_freq_factor, "
                         "original_max_position_embeddings)")
    if kind == "linear":
        return [f / factor for f in frequencies]
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    context = float(scaling["original_max_position_embeddings"])

    def scaled(f: float) -> float:
        wavelength = 2 * math.pi / f
        if wavelength > context / low:
            return f / factor
        if wavelength < context / high:
            return f
        smooth = (context / wavelength - low) / (high - low)
        return (1 - smooth) * f / factor + smooth * f

    return [scaled(f) for f in frequencies]


def apply_rope(x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor,
               interleaved: bool = False) -> torch.Tensor:
    """Rotate the first ``2R`` of ``D`` dimensions by the angle of the row; the rest passes unchanged.

    ``(a, b) -> (a*cos - b*sin, b*cos + a*sin)`` in fp32, each product and sum rounded to fp32, one rounding to the
    model dtype. The pairs are ``(x[i], x[i + R])`` (NeoX, Hugging Face), or ``(x[2i], x[2i + 1])`` when interleaved.

    Args:
        x_THD: fp32 or bf16 ``[T, heads, D]``; may be strided (a slice of a fused projection).
        cos_TR, sin_TR: fp32 ``[T, R]`` from :func:`rope_cos_sin`.

    Returns:
        A new contiguous tensor like ``x_THD``. Differentiable in ``x_THD``.
    """
    if x_THD.dim() != 3 or cos_TR.shape != sin_TR.shape or cos_TR.dim() != 2 or cos_TR.shape[0] != x_THD.shape[0] \
            or 2 * cos_TR.shape[1] > x_THD.shape[2]:
        raise ValueError(f"apply_rope: x {tuple(x_THD.shape)}, cos {tuple(cos_TR.shape)}, sin {tuple(sin_TR.shape)} do not "
                         "fit; expected [T, heads, D], [T, R], [T, R] with 2R <= D")
    if cos_TR.dtype != torch.float32 or sin_TR.dtype != torch.float32:
        raise ValueError(f"apply_rope: cos and sin must be float32, found {cos_TR.dtype} and {sin_TR.dtype}")
    return registry.call("rope", "apply_rope", x_THD, x_THD, cos_TR, sin_TR, bool(interleaved))


def rotate(q_THD: torch.Tensor, k_TGD: torch.Tensor | None, cos_PR: torch.Tensor, sin_PR: torch.Tensor, positions_T: torch.Tensor,
           interleaved: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`apply_rope` of query and key by rows of a table: the same bits, in one launch where the device has one for it.

    Args:
        q_THD, k_TGD: as ``x_THD`` of :func:`apply_rope`; ``k_TGD`` may be None.
        cos_PR, sin_PR: fp32 ``[P, R]`` from :func:`rope_cos_sin`, row by position.
        positions_T: int64 ``[T]``, each less than ``P``.

    Returns:
        ``(q, k)``, new and contiguous; ``k`` is None where none was given. Differentiable in both.
    """
    for name, x in (("q", q_THD), ("k", k_TGD)):
        if x is not None and (x.dim() != 3 or x.shape[0] != positions_T.shape[0] or 2 * cos_PR.shape[-1] > x.shape[2]
                              or x.shape[2] != q_THD.shape[2]):
            raise ValueError(f"rotate: {name} {tuple(x.shape)}, table {tuple(cos_PR.shape)}, positions {tuple(positions_T.shape)} do not "
                             "fit; expected [T, heads, D], [P, R] with 2R <= D, [T]")
    if cos_PR.shape != sin_PR.shape or cos_PR.dim() != 2 or cos_PR.dtype != torch.float32 or sin_PR.dtype != torch.float32 \
            or positions_T.is_floating_point():
        raise ValueError(f"rotate: cos {tuple(cos_PR.shape)} {cos_PR.dtype} and sin {tuple(sin_PR.shape)} {sin_PR.dtype} must be float32 "
                         f"[P, R], positions integers, found {positions_T.dtype}")
    if "rotate" in registry.resolve("rope", q_THD.device, q_THD.dtype).functions:
        return registry.call("rope", "rotate", q_THD, q_THD, k_TGD, cos_PR, sin_PR, positions_T, bool(interleaved))
    cos_TR, sin_TR = cos_PR.index_select(0, positions_T), sin_PR.index_select(0, positions_T)
    return (apply_rope(q_THD, cos_TR, sin_TR, interleaved),
            None if k_TGD is None else apply_rope(k_TGD, cos_TR, sin_TR, interleaved))
