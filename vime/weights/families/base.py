"""One description of a model family from which every other weight question is answered.

A checkpoint goes wrong in the places where two formats are described twice. Here a family lists its *units* once:
one Megatron tensor, the Hugging Face tensors it holds, how their rows interleave, how tensor parallelism cuts it,
and which layer or expert it belongs to. Conversion both ways, per-rank shards, ownership, the ledger's truth at
each stage and the shape checks are all read from that list, and none of them knows a family.

The only layout there is: the rows of the pieces are interleaved by groups. ``groups = kv heads`` is Megatron's
grouped QKV ("q1 q2 k1 v1 | q3 q4 k2 v2", megatron-core ``SelfAttention.get_query_key_value_tensors``), ``groups = 1``
is the fused gate/up projection, one piece is a plain copy.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

SCALE = "_scale_inv"  # suffix of the block scales of an FP8 weight (DeepSeek-V3, section 3.3 of its report)
SYNONYMS = {"num_experts": ("num_local_experts",), "n_routed_experts": ("num_local_experts",)}  # by transformers version
SPLITS = ("none", "column", "row", "glu")


class WeightError(ValueError):
    """A tensor, a name or a file that is not what it has to be. The message names all three."""


class UnknownArchitecture(WeightError):
    """No family covers this config."""


class ConfigMismatch(WeightError):
    """The config and the tensors, or the config and the topology, contradict each other."""


class Config:
    """Read access to an HF ``config.json`` (its ``text_config`` where it has one). Attributes are numbers: a missing field, or
    one that is no integer, is an error."""

    def __init__(self, hf_config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None):
        self.raw = dict(hf_config)
        self._fields = {**(defaults or {}), **(hf_config.get("text_config") or hf_config)}

    def __getattr__(self, name: str) -> Any:
        for known in (name, *SYNONYMS.get(name, ())):
            if known in self._fields:
                value = self._fields[known]
                if not isinstance(value, int) or isinstance(value, bool):
                    raise ConfigMismatch(f"config.json: {known} is {value!r}; expected an integer")
                return value
        raise ConfigMismatch(f"config.json has no field {name!r}, which this architecture needs")

    def get(self, name: str, default: Any = None) -> Any:
        value = self._fields.get(name)
        return default if value is None else value

    @property
    def head_dim(self) -> int:
        return self.get("head_dim") or self.hidden_size // self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        return self.get("num_key_value_heads") or self.num_attention_heads


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


@dataclasses.dataclass(frozen=True)
class Plan:
    """The units of one checkpoint in model order, after the optional ones were resolved against real names."""

    family: str
    units: tuple[Unit, ...]
    carried: tuple[str, ...] = ()  # HF tensors outside the language model: copied, never converted
    hf_names: frozenset[str] | None = None  # the names found, None where the plan came from Megatron names

    @property
    def by_name(self) -> dict[str, Unit]:
        """Units by Megatron name, aliases included."""
        return {n: u for u in self.units for n in (u.name, *u.megatron_alias)}

    @property
    def stacked(self) -> frozenset[str]:
        """HF tensors that hold one expert a slice."""
        return frozenset(ref.name for unit in self.units for ref in unit.hf if ref.part is not None)

    def hf_tensors(self) -> dict[str, tuple[int, ...]]:
        """Every HF tensor the units describe (aliases not included) -> its whole shape."""
        out: dict[str, tuple[int, ...]] = {}
        for unit in self.units:
            for ref in unit.hf:
                out[ref.name] = ref.shape if ref.part is None else (ref.parts, *ref.shape)
        return out


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family: its architectures and a function that lists the units of a config."""

    name: str
    architectures: tuple[str, ...]
    list_units: Callable[[Config, Callable[[str], bool]], Iterable[Unit]]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    carried_prefixes: tuple[str, ...] = ()

    def plan(
        self,
        cfg: Mapping[str, Any],
        hf_names: Collection[str] | None = None,
        megatron_names: Collection[str] | None = None,
        vocab_multiple: int = 1,
    ) -> Plan:
        """The units of ``cfg``.

        Optional units (MTP layers, FP8 scales) are in if ``hf_names`` or ``megatron_names`` holds them; with neither
        they are out. ``vocab_multiple``: Megatron pads the vocabulary to a multiple of it. A name that no unit
        describes, or a described name that is missing, raises :class:`WeightError`. Names may be a mapping from
        name to file, for the message.
        """
        names = frozenset(hf_names if hf_names is not None else megatron_names or ())
        config = Config(cfg, self.defaults)
        units = []
        for unit in self.list_units(config, names.__contains__):
            if unit.place in ("embedding", "head") and unit.split == "column":
                rows = -(-unit.hf[0].shape[0] // vocab_multiple) * vocab_multiple
                unit = dataclasses.replace(unit, pad_rows=rows)
            units.append(unit)
        carried = tuple(n for n in sorted(names) if n.startswith(self.carried_prefixes)) if self.carried_prefixes else ()
        plan = Plan(self.name, tuple(units), carried, None if hf_names is None else names)
        if hf_names is not None:
            known = set(plan.hf_tensors())
            extra = known | set(carried) | {a for u in units for a in u.hf_alias}
            _check_names(f"the {self.name} checkpoint", hf_names, known, extra)
        elif megatron_names is not None:
            known = {u.name for u in units}
            _check_names("the Megatron state", names, known, set(plan.by_name))
        return plan

    def hf_to_megatron(
        self, hf_state: Mapping[str, torch.Tensor], cfg: Mapping[str, Any], vocab_multiple: int = 1
    ) -> dict[str, torch.Tensor]:
        """Full HF state dict -> full Megatron state dict (TP1, PP1, EP1), bit for bit, dtypes kept."""
        plan = self.plan(cfg, hf_names=hf_state.keys(), vocab_multiple=vocab_multiple)
        return {unit.name: unit.to_megatron(read_pieces(unit, hf_state)) for unit in plan.units}

    def megatron_to_hf(
        self,
        state: Mapping[str, torch.Tensor],
        cfg: Mapping[str, Any],
        vocab_multiple: int = 1,
        aliases: Collection[str] = (),
    ) -> dict[str, torch.Tensor]:
        """The inverse. ``aliases``: further HF names to write for tied tensors (as the source checkpoint had them)."""
        plan = self.plan(cfg, megatron_names=state.keys(), vocab_multiple=vocab_multiple)
        out: dict[str, torch.Tensor] = {}
        stacks: dict[str, list[torch.Tensor | None]] = {}
        for unit in plan.units:
            for alias in unit.megatron_alias:
                if alias in state and not same_bits(state[alias], state[unit.name]):
                    raise WeightError(f"{alias} and {unit.name} are tied, but their bits differ")
            for ref, piece in zip(unit.hf, unit.to_hf(state[unit.name]), strict=True):
                if ref.part is None:
                    out[ref.name] = piece
                else:
                    stacks.setdefault(ref.name, [None] * ref.parts)[ref.part] = piece
            out.update({alias: out[unit.hf[0].name] for alias in unit.hf_alias if alias in aliases})
        out.update({name: torch.stack(parts) for name, parts in stacks.items()})  # type: ignore[arg-type]
        return out


def read_pieces(unit: Unit, hf_state: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The HF pieces of a unit; aliases that are present must hold the same bits."""
    pieces = []
    for ref in unit.hf:
        tensor = hf_state[ref.name]
        if ref.part is not None:
            if tuple(tensor.shape) != (ref.parts, *ref.shape):
                raise ConfigMismatch(
                    f"{ref.name}: shape {tuple(tensor.shape)}, the config says {(ref.parts, *ref.shape)}"
                )
            tensor = tensor[ref.part]
        pieces.append(tensor)
    for alias in unit.hf_alias:
        if alias in hf_state and not same_bits(hf_state[alias], pieces[0]):
            raise WeightError(
                f"{alias} and {unit.hf[0].name} are one tensor with two names in this architecture, "
                "but their bits differ in the checkpoint"
            )
    return pieces


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as a flat uint8 view (a copy only where it is not contiguous)."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same dtype, shape and bytes. Used to refuse bad input; verdicts come from ``alignment``."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw_bytes(a), raw_bytes(b))


def _check_names(what: str, found: Collection[str], needed: set[str], known: set[str]) -> None:
    """``found`` may be a mapping from name to file; then the file is part of the message."""
    files = found if isinstance(found, Mapping) else {}
    missing = sorted(needed - set(found))
    unknown = [f"{n} (in {files[n]})" if n in files else n for n in sorted(set(found) - known)]
    lines = []
    for title, names in (("missing", missing), ("unknown", unknown)):
        if names:
            shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
            lines.append(f"  {len(names)} {title}: {shown}")
    if lines:
        raise WeightError(
            f"{what} does not hold the tensors its config describes:\n" + "\n".join(lines)
            + "\nEither the config belongs to another checkpoint, or files are missing."
        )


def prefixed(pieces: Iterable[Unit], megatron: str, hf: str, **fields: Any) -> Iterator[Unit]:
    """Units of a block -> units of the model: put prefixes before their names and set ``fields``."""
    for unit in pieces:
        yield dataclasses.replace(
            unit,
            name=megatron + unit.name,
            hf=tuple(dataclasses.replace(ref, name=hf + ref.name) for ref in unit.hf),
            **fields,
        )
