"""One Megatron tensor and the Hugging Face tensors it holds: how rows interleave, how tensor parallelism cuts them.

The only layout there is: the rows of the pieces are interleaved by groups. ``groups = kv heads`` is Megatron's
grouped QKV ("q1 q2 k1 v1 | q3 q4 k2 v2", megatron-core ``SelfAttention.get_query_key_value_tensors``), ``groups = 1``
is the fused gate/up projection, one piece is a plain copy.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from vime.weights.errors import ConfigMismatch, WeightError
from vime.weights.raw import same_bits

SCALE = "_scale_inv"  # suffix of the block scales of an FP8 weight (DeepSeek-V3, section 3.3 of its report)
SPLITS = ("none", "column", "row", "glu")


@dataclasses.dataclass(frozen=True)
class Ref:
    """An HF tensor, or one expert's slice of a stacked one (``tensor[part]``). ``shape`` is that of the piece."""

    name: str
    shape: tuple[int, ...]
    part: int | None = None
    parts: int = 1


@dataclasses.dataclass(frozen=True)
class Unit:
    """One Megatron tensor and the HF pieces it is made of. The smallest thing that is converted or checked.

    Attributes:
        name: Megatron name with *global* layer and expert numbers, e.g. ``decoder.layers.3.mlp.router.weight``.
        hf: the pieces, in the order in which they appear in one group of rows.
        groups: number of row groups; piece ``i`` gives ``shape[0] / groups`` rows to each.
        split: how TP cuts it: ``none`` (replicated), ``column`` (rows, even), ``row`` (columns, even),
            ``glu`` (rows, evenly within each of the pieces).
        place: ``embedding``, ``layer``, ``final``, ``head`` or ``mtp``: what decides its pipeline stage.
        layer, expert: global numbers, or None.
        pad_rows: rows after padding (the vocabulary), or None.
        hf_alias, megatron_alias: further names under which the very same tensor may be stored (tied weights).
        buffer: not a parameter.
        spare: in the files, but evaluated by nobody.
    """

    name: str
    hf: tuple[Ref, ...]
    groups: int = 1
    split: str = "none"
    place: str = "layer"
    layer: int | None = None
    expert: int | None = None
    pad_rows: int | None = None
    hf_alias: tuple[str, ...] = ()
    megatron_alias: tuple[str, ...] = ()
    buffer: bool = False
    spare: bool = False

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"{self.name}: split {self.split!r} is none of {SPLITS}")
        for ref in self.hf:
            if ref.shape and ref.shape[0] % self.groups:
                raise ConfigMismatch(
                    f"{ref.name}: {ref.shape[0]} rows do not divide into {self.groups} groups; "
                    "the config's head counts and head_dim contradict each other"
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full Megatron tensor, padding included."""
        first = self.hf[0].shape
        if len(self.hf) == 1 and self.pad_rows is None:
            return first
        rows = sum(ref.shape[0] for ref in self.hf)
        return (self.pad_rows or rows, *first[1:])

    def to_megatron(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        """HF pieces -> the full Megatron tensor. Moves bits, never converts a dtype."""
        self._check(pieces)
        if len(pieces) == 1:
            out = pieces[0]
        else:
            g = self.groups
            grouped = [p.reshape(g, p.shape[0] // g, *p.shape[1:]) for p in pieces]
            out = torch.cat(grouped, dim=1).reshape(-1, *pieces[0].shape[1:])
        if self.pad_rows is not None and self.pad_rows != out.shape[0]:
            out = torch.cat([out, out.new_zeros(self.pad_rows - out.shape[0], *out.shape[1:])])
        return out

    def to_hf(self, full: torch.Tensor) -> list[torch.Tensor]:
        """The full Megatron tensor -> HF pieces (contiguous), in the order of ``hf``."""
        if tuple(full.shape) != self.shape:
            raise ConfigMismatch(f"{self.name}: shape {tuple(full.shape)}, the config says {self.shape}")
        if self.pad_rows is not None:
            full = full[: self.hf[0].shape[0]]
        if len(self.hf) == 1:
            return [full.contiguous()]
        rows = [ref.shape[0] // self.groups for ref in self.hf]
        grouped = full.reshape(self.groups, sum(rows), *full.shape[1:])
        return [p.reshape(ref.shape) for p, ref in zip(torch.split(grouped, rows, dim=1), self.hf, strict=True)]

    def shard(self, full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """What TP rank ``rank`` of ``size`` holds of the full Megatron tensor (a view where it can be)."""
        if self.split == "none" or size == 1:
            return full
        self.check_split(size)
        if self.split == "row":
            return full.chunk(size, dim=1)[rank]
        if self.split == "column":
            return full.chunk(size, dim=0)[rank]
        return torch.cat([half.chunk(size, dim=0)[rank] for half in full.split(self._halves())])

    def unshard(self, shards: list[torch.Tensor]) -> torch.Tensor:
        """The full Megatron tensor from all TP shards, in rank order."""
        if self.split == "none" or len(shards) == 1:
            return shards[0]
        if self.split == "row":
            return torch.cat(shards, dim=1)
        if self.split == "column":
            return torch.cat(shards)
        parts = [shard.split([n // len(shards) for n in self._halves()]) for shard in shards]
        return torch.cat([part[i] for i in range(len(parts[0])) for part in parts])

    def shard_shape(self, size: int) -> tuple[int, ...]:
        if self.split == "none" or size == 1:
            return self.shape
        self.check_split(size)
        axis = 1 if self.split == "row" else 0
        return tuple(n // size if i == axis else n for i, n in enumerate(self.shape))

    def check_split(self, size: int) -> None:
        """Raise :class:`ConfigMismatch` if ``size`` tensor-parallel ranks cannot share this tensor evenly."""
        if self.split == "none" or size == 1:
            return
        if self.split == "row":
            numbers = [self.shape[1]]
        elif self.split == "column":
            numbers = [self.shape[0]]
        else:
            numbers = self._halves()
        if bad := [n for n in numbers if n % size]:
            blocks = " FP8 blocks" if self.name.endswith(SCALE) else ""
            raise ConfigMismatch(
                f"{self.name} {self.shape}: {bad[0]}{blocks} cannot be split evenly over {size} tensor-parallel ranks"
            )

    def _halves(self) -> list[int]:
        """Rows of gate and of up; one piece that holds both (stacked experts) is cut in the middle."""
        rows = [ref.shape[0] for ref in self.hf]
        return rows if len(rows) > 1 else [rows[0] // 2, rows[0] - rows[0] // 2]

    def _check(self, pieces: list[torch.Tensor]) -> None:
        for ref, piece in zip(self.hf, pieces, strict=True):
            if tuple(piece.shape) != ref.shape:
                raise ConfigMismatch(f"{ref.name}: shape {tuple(piece.shape)}, the config says {ref.shape}")
        if len({p.dtype for p in pieces}) > 1:
            raise WeightError(
                f"{self.name} is made of tensors of several dtypes: "
                + ", ".join(f"{r.name} {p.dtype}" for r, p in zip(self.hf, pieces, strict=True))
            )


def read_pieces(unit: Unit, hf_state: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The HF pieces of a unit; aliases that are present must hold the same bits."""
    pieces = []
    for ref in unit.hf:
        pieces.append(hf_state[ref.name] if ref.part is None else _slice(hf_state, ref, ref.part))
    for alias in unit.hf_alias:
        if alias in hf_state and not same_bits(hf_state[alias], pieces[0]):
            raise WeightError(
                f"{alias} and {unit.hf[0].name} are one tensor with two names in this architecture, "
                "but their bits differ in the checkpoint"
            )
    return pieces


def _slice(hf_state: Mapping[str, torch.Tensor], ref: Ref, part: int) -> torch.Tensor:
    """One expert of a stacked tensor; from a checkpoint, that expert alone is read."""
    specs: Any = getattr(hf_state, "specs", None)
    whole = hf_state[ref.name] if specs is None else None
    shape = tuple(specs[ref.name][1] if whole is None else whole.shape)
    if shape != (ref.parts, *ref.shape):
        raise ConfigMismatch(f"{ref.name}: shape {shape}, the config says {(ref.parts, *ref.shape)}")
    return whole[part] if whole is not None else hf_state.part(ref.name, part)  # type: ignore[attr-defined]


def prefixed(pieces: Iterable[Unit], megatron: str, hf: str, **fields: Any) -> Iterator[Unit]:
    """Units of a block -> units of the model: put prefixes before their names and set ``fields``."""
    for unit in pieces:
        yield dataclasses.replace(
            unit,
            name=megatron + unit.name,
            hf=tuple(dataclasses.replace(ref, name=hf + ref.name) for ref in unit.hf),
            **fields,
        )
