"""What must be at every stage, derived from the source checkpoint alone.

Every entry of a ledger is compared with what slicing the source gives for that rank and stage, never with the entry
of the stage before: only then the first wrong stage is the one with the fault.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

import torch

from alignment.digest import digest
from alignment.ledger import Cell, Origin
from vime.weights.families.base import Plan
from vime.weights.families.units import Unit, read_pieces
from vime.weights.ledger import STAGES, Key
from vime.weights.manifest import digest_of
from vime.weights.raw import raw_bytes
from vime.weights.topology import Topology

_SHARD_STAGES = ("local", "source", "pp", "ep", "tp", "loaded")
_HF_STAGES = ("converted", "stacked", "file", "received")


class Truth:
    """Digests of every shard, full tensor and HF piece (a tensor, or one expert of a stacked one) of a checkpoint.

    They are those of a :class:`vime.weights.ledger.Ledger` of the form ``host``. ``progress`` is called with the number of units
    that are done.
    """

    def __init__(self, source: Mapping[str, torch.Tensor], plan: Plan, topology: Topology,
                 progress: Callable[[int], None] | None = None):
        self.source, self.plan, self.topology = source, plan, topology
        self.units = plan.by_name
        self.pieces_of: dict[Key, Unit] = {}
        self.shards: dict[Key, str] = {}
        self.full: dict[Key, str] = {}
        self.pieces: dict[Key, str] = {}
        self._by_digest: tuple[Mapping[Key, str], dict[str, list[Key]]] | None = None
        for number, unit in enumerate(plan.units):
            self._add(unit)
            if progress is not None:
                progress(number + 1)

    def _add(self, unit: Unit) -> None:
        pieces = read_pieces(unit, self.source)
        full = unit.to_megatron(pieces)
        size = self.topology.shard_size(unit)
        whole = digest(full)
        for name in (unit.name, *unit.megatron_alias):
            self.full[Key(name)] = whole
            for part in range(size):
                cut = unit.split != "none" and size > 1
                self.shards[Key(name, part)] = digest(unit.shard(full, part, size)) if cut else whole
        for ref, piece in zip(unit.hf, pieces, strict=True):
            key = Key(ref.name, ref.part)
            self.pieces_of[key] = unit
            self.pieces[key] = digest(piece)
        for alias in unit.hf_alias:
            if alias in self.source:
                self.pieces_of[Key(alias)] = unit
                self.pieces[Key(alias)] = digest(self.source[alias])

    @functools.cached_property
    def served(self) -> dict[str, str]:
        """HF name -> digest of the bytes of that whole tensor, as an engine tells them. The source is read once for it."""
        return {name: f"bytes:{digest_of(tensor)}" for name, tensor in self.source.items()}

    @functools.cached_property
    def served_names(self) -> dict[str, str]:
        """The inverse of :attr:`served`; of several tensors with the same bytes the first."""
        return {bits: name for name, bits in reversed(self.served.items())}

    def table(self, stage: str) -> Mapping[Key, str]:
        """Key -> true digest of everything that any rank may show at a stage."""
        if stage in _SHARD_STAGES:
            return self.shards
        return self.full if stage == "full" else self.pieces

    def keys(self, stage: str, rank: int) -> Iterator[Key]:
        """What ``rank`` has to show at a stage; of HF tensors rank 0 alone, which sends."""
        top = self.topology
        if stage in _HF_STAGES:
            if rank == 0:
                yield from self.table(stage)
            return
        for unit in self.plan.units:
            own = Key(unit.name, top.shard_index(unit, rank))
            if stage in ("local", "loaded"):
                yield from (Key(name, own.part) for name in top.names_on(rank, unit))
            elif stage == "source":
                yield from [own] if top.holds(rank, unit) else []
            elif stage == "pp" and top.size("pp") > 1:
                if unit.expert is None or top.ep_index(unit.expert) == top.index("ep", rank):
                    yield own
            elif stage == "ep" and top.size("ep") > 1:
                yield from [own] if unit.expert is not None else []
            elif stage == "tp" and top.shard_size(unit) > 1 and unit.split != "none":
                yield from (Key(unit.name, part) for part in range(top.shard_size(unit)))
            elif stage == "full":
                yield Key(unit.name)

    def cells(self, entries: list[Mapping[str, Mapping[Key, str]]], stages: tuple[str, ...] = STAGES) -> Iterator[Cell]:
        """Every expected and every found entry of all ranks: stage by stage, in model order, then by rank."""
        for stage in stages:
            table = self.table(stage)
            order: dict[str, int] = {}
            for key in table:
                order.setdefault(key.name, len(order))
            rows: list[tuple[int, int, int, Key, bool]] = []
            for rank, ledger in enumerate(entries):
                wanted = set(self.keys(stage, rank))
                rows += [(order[key.name], rank, key.part or 0, key, True) for key in wanted]
                rows += [(len(order), rank, key.part or 0, key, False) for key in ledger.get(stage, {}).keys() - wanted]
            for _, rank, _, key, known in sorted(rows):
                want = table[key] if known else None
                yield self._cell(stage, key, want, entries[rank].get(stage, {}).get(key), self.topology.coordinates(rank))

    def _cell(self, stage: str, key: Key, want: str | None, found: str | None, place: dict[str, int]) -> Cell:
        unit = self.pieces_of.get(key) if stage in _HF_STAGES else self.units.get(key.name)
        return Cell(stage, key.name, want, found, place, None if unit is None else unit.layer,
                    None if unit is None else unit.expert, key.part)

    def tensor(self, stage: str, key: Key) -> torch.Tensor:
        """The true tensor of a cell."""
        if stage in _HF_STAGES:
            return self.source[key.name] if key.part is None else self.source[key.name][key.part]
        unit = self.units[key.name]
        full = unit.to_megatron(read_pieces(unit, self.source))
        return full if stage == "full" else unit.shard(full, key.part or 0, self.topology.shard_size(unit))

    def origin(self, cell: Cell) -> Origin | None:
        """Where a wrong digest comes from: another tensor of the checkpoint, or a known corruption of this one."""
        if cell.found is None:
            return None
        last = cell.found.partition(" ")[0]  # "<last> after <first>"
        if (other := self._reverse(cell, last)) is not None:
            unit = self.units.get(other.name) or self.pieces_of.get(other)
            return Origin(other.name, None if unit is None else unit.layer, None if unit is None else unit.expert, other.part)
        if cell.want is None:
            return None
        true = self.tensor(cell.stage, Key(cell.name, cell.shard))
        for kind, note, variant in (*corruptions(true), *self._repacked(cell, true)):
            if digest(variant) == last:
                return Origin(cell.name, kind=kind, note=note)
        return None

    def _repacked(self, cell: Cell, true: torch.Tensor) -> Iterator[tuple[str, str, torch.Tensor]]:
        """A full tensor of several pieces in the wrong order of rows."""
        unit = self.units.get(cell.name)
        if cell.stage != "full" or unit is None:
            return
        if unit.groups > 1:
            yield "head_major", "its rows are in order of query, key and value, not group by group", head_major(unit, true)
        if unit.split == "glu" and (size := self.topology.shard_size(unit)) > 1:
            yield "even_split", "its shards were put one after the other: gate and up are mixed", even_split(unit, true, size)

    def _reverse(self, cell: Cell, bits: str) -> Key | None:
        """The tensor of the same kind with these bits: of the same layer and the same name but for the expert, if any."""
        table = self.table(cell.stage)
        if self._by_digest is None or self._by_digest[0] is not table:
            by: dict[str, list[Key]] = {}
            for key, value in table.items():
                by.setdefault(value, []).append(key)
            self._by_digest = (table, by)
        block, leaf = cell.name.partition("experts.")[0], cell.name.rsplit(".", 2)[1:]
        found = self._by_digest[1].get(bits, [])
        return max(found, key=lambda k: (k.name.rsplit(".", 2)[1:] == leaf, k.name.partition("experts.")[0] == block), default=None)


def previous(tensor: torch.Tensor) -> torch.Tensor:
    """What a planted stale tensor holds: the same with the lowest bit of every element flipped, as a tiny update
    would leave it."""
    flipped = raw_bytes(tensor).clone()
    flipped[:: tensor.dtype.itemsize] ^= 1
    return flipped.view(tensor.dtype).reshape(tensor.shape)


def swap_halves(tensor: torch.Tensor) -> torch.Tensor:
    """Gate and up exchanged."""
    half = tensor.shape[0] // 2
    return torch.cat([tensor[half:], tensor[:half]])


def transpose(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of the transposed matrix in the shape of the original."""
    return tensor.t().reshape(tensor.shape)


def head_major(unit: Unit, full: torch.Tensor) -> torch.Tensor:
    """A grouped projection packed as all queries, all keys, all values, where it has to be group by group."""
    return torch.cat(unit.to_hf(full))


def even_split(unit: Unit, full: torch.Tensor, size: int) -> torch.Tensor:
    """Shards of a gated projection put one after the other, as if gate and up had not been cut each on its own."""
    return torch.cat([unit.shard(full, part, size) for part in range(size)])


def launder(tensor: torch.Tensor) -> torch.Tensor:
    """Rounded through the next narrower format and back."""
    narrow = {torch.float32: torch.bfloat16, torch.float64: torch.float32, torch.float8_e4m3fn: torch.float8_e5m2}.get(
        tensor.dtype, torch.float8_e4m3fn)
    return tensor.to(narrow).to(tensor.dtype)


def corruptions(true: torch.Tensor) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(kind, words, tensor) of everything that commonly happens to one tensor."""
    yield "stale", "equal to the weights of the update before (stale)", previous(true)
    yield "zeros", "all zeros: the buffer was never filled", torch.zeros_like(true)
    if true.dim() and true.shape[0] % 2 == 0:
        yield "gate_up_swapped", "its two halves are exchanged (gate and up)", swap_halves(true)
    if true.dim() == 2:
        yield "transposed", "it is transposed", transpose(true)
    if true.is_floating_point():
        for through in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
            if through.itemsize <= true.dtype.itemsize and through != true.dtype:
                yield "laundered", f"it was rounded through {str(through)[6:]} and back", true.to(through).to(true.dtype)
        for other in (torch.float32, torch.bfloat16, torch.float16):
            if other != true.dtype:
                yield "dtype", f"it has dtype {str(other)[6:]} instead of {str(true.dtype)[6:]}", true.to(other)
