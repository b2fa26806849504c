"""Rotary embedding: the table that ``RotaryEmbedding.forward`` builds and the rotation that ``Attention`` calls.

Megatron passes angles, built in fp32, from one to the other. Here the table is cosine and sine from float64, so the
carried tensor is ``[S, 1, 2, R]`` (cosine, sine) where the stock one is ``[S, 1, 1, 2R]``: the two can't be mixed up,
and it is still one plain tensor, as full recompute needs.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch

from vime import ops
from vime.megatron.patch import HookPoint, Refused, note

OP = "rope"
_EMBEDDING = "megatron.core.models.common.embeddings.rotary_pos_embedding"
MODULES = (f"{_EMBEDDING}.RotaryEmbedding",)
_ATTRIBUTE = "vime_rope_parameters"


@dataclasses.dataclass(frozen=True)
class RopeParameters:
    """What a rotary table is made of; Megatron's module keeps only the fp32 frequencies.

    ``scaling`` is a Hugging Face ``rope_scaling`` dictionary or None.
    """

    dim: int
    base: float
    scaling: dict[str, Any] | None = None

    def key(self) -> tuple[Any, ...]:
        return self.dim, self.base, tuple(sorted((self.scaling or {}).items()))


def declare(rotary: torch.nn.Module, parameters: RopeParameters) -> None:
    """Tell what the table of this ``RotaryEmbedding`` is made of."""
    setattr(rotary, _ATTRIBUTE, parameters)


def parameters_of(model: Any) -> RopeParameters | None:
    """What the table of a ``GPTModel`` is made of: as declared, or worked out and checked against its frequencies.

    Raises:
        Refused: the model's frequencies are not those of its ``rotary_base`` and Llama-3 scaling.
    """
    rotary = getattr(model, "rotary_pos_emb", None)
    if rotary is None or not hasattr(rotary, "inv_freq"):
        return None
    declared = getattr(rotary, _ATTRIBUTE, None)
    if declared is not None:
        return declared
    found_R = rotary.inv_freq.detach().to("cpu", torch.float64)
    dim, base = 2 * found_R.numel(), float(model.rotary_base)
    scaling = None
    if getattr(model, "rotary_scaling", False):
        # Megatron's constants; only the factor varies, and the lowest frequency is divided by all of it.
        factor = float(base ** (-(dim - 2) / dim) / found_R[-1])
        scaling = {"rope_type": "llama3", "factor": round(factor, 3), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8192}
    expected_R = torch.tensor(ops.rope.inverse_frequencies(dim, base, scaling), dtype=torch.float64)
    error = float(((found_R - expected_R) / expected_R).abs().max())
    if error > 2e-6:  # fp32 power and division, a few roundings
        raise Refused(f"the rotary frequencies of the model are not those of base {base:g}"
                      f"{' with Llama-3 scaling' if scaling else ''}: up to {error:.1e} off (relative). Declare them with "
                      "vime.megatron.routes.rope.declare(model.rotary_pos_emb, RopeParameters(...)), or exclude 'rope'.")
    return RopeParameters(dim, base, scaling)


@functools.lru_cache(maxsize=16)
def _table(key: tuple[Any, ...], length: int, offset: int, device: torch.device) -> torch.Tensor:
    dim, base, scaling = key
    positions_S = torch.arange(offset, offset + length, device=device)  # the device whose table the engine uses as well
    cos_SR, sin_SR = ops.rope_cos_sin(positions_S, dim, base, dict(scaling) or None)
    return torch.stack((cos_SR, sin_SR), dim=1)[:, None]


def _route_table(stock: Any) -> Any:
    del stock

    def forward(self: Any, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> torch.Tensor:
        del packed_seq
        parameters = getattr(self, _ATTRIBUTE, None)
        if parameters is None:
            raise Refused("a RotaryEmbedding outside a GPTModel was called; declare what its table is made of with "
                          "vime.megatron.routes.rope.declare, or exclude 'rope'")
        group = cp_group if cp_group is not None else getattr(self, "cp_group", None)
        if group is not None and group.size() > 1:
            raise Refused(f"context parallel size is {group.size()}; rope is aligned for 1 only")
        device = self.inv_freq.device
        if device.type == "cpu":
            device = torch.device(torch.cuda.current_device())  # as Megatron does; the CPU module answers "cpu"
        return _table(parameters.key(), max_seq_len, offset, device)

    return forward


# The last answer: every layer asks for the positions of the same pack, twice. (boundaries, their version, tokens, positions)
_last: tuple[torch.Tensor, int, int, torch.Tensor] | None = None


def positions_of(cu_seqlens_B1: torch.Tensor, tokens: int) -> torch.Tensor:
    """Position of each packed token in its own sequence, ``[T]``."""
    global _last
    if cu_seqlens_B1.is_inference():  # its changes can't be noticed
        return _positions(cu_seqlens_B1, tokens)
    if _last is None or _last[0] is not cu_seqlens_B1 or _last[1:3] != (cu_seqlens_B1._version, tokens):
        _last = (cu_seqlens_B1, cu_seqlens_B1._version, tokens, _positions(cu_seqlens_B1, tokens))
    return _last[3]


def _positions(cu_seqlens_B1: torch.Tensor, tokens: int) -> torch.Tensor:
    starts_B, lengths_B = cu_seqlens_B1[:-1].long(), (cu_seqlens_B1[1:] - cu_seqlens_B1[:-1]).long()
    return torch.arange(tokens, device=starts_B.device) - torch.repeat_interleave(starts_B, lengths_B, output_size=tokens)


def _route_rotation(stock: Any) -> Any:
    del stock

    def apply_rotary_pos_emb(t: torch.Tensor, freqs: torch.Tensor, config: Any, cu_seqlens: torch.Tensor | None = None,
                             mscale: float = 1.0, cp_group: Any = None, mla_rotary_interleaved: bool = False) -> torch.Tensor:
        del cp_group
        if freqs.dim() != 4 or freqs.shape[2] != 2:
            raise Refused(f"rope got angles {tuple(freqs.shape)} that vime's table did not make (a cached stock table, or "
                          "other code); build them after vime.enable(), or exclude 'rope'")
        if mscale != 1.0 or mla_rotary_interleaved:
            raise Refused(f"rope with mscale={mscale}, mla_rotary_interleaved={mla_rotary_interleaved} is not aligned")
        note(OP)
        cos_SR, sin_SR = freqs[:, 0, 0], freqs[:, 0, 1]
        if cu_seqlens is not None:
            return ops.rotate(t, None, cos_SR, sin_SR, positions_of(cu_seqlens, t.shape[0]), config.rotary_interleaved)[0]
        length, batch, heads, dim = t.shape
        x_THD = t.reshape(length * batch, heads, dim)
        cos_TR = cos_SR[:length].repeat_interleave(batch, dim=0)
        sin_TR = sin_SR[:length].repeat_interleave(batch, dim=0)
        return ops.apply_rope(x_THD, cos_TR, sin_TR, config.rotary_interleaved).view(length, batch, heads, dim)

    return apply_rotary_pos_emb


def hook_points() -> list[HookPoint]:
    return [HookPoint(f"{_EMBEDDING}:RotaryEmbedding", "forward", _route_table),
            HookPoint("megatron.core.transformer.attention", "apply_rotary_pos_emb", _route_rotation)]


def refusals(module: Any, config: Any) -> Iterator[str]:
    del config
    if getattr(module, "seq_len_interpolation_factor", None) is not None:
        yield "seq_len_interpolation_factor is set"
