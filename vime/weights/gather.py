"""Rebuilds full tensors from the shards of a running model, one bucket at a time, on every rank.

Order of a bucket: the owning pipeline stage broadcasts within each PP group, each expert block is broadcast within
each EP group, the shards are gathered within each (expert-)TP group. Before the first byte moves, :func:`agree` lets
all ranks tell what they hold and what they are about to do; a rank that would take another root, dtype, shape or
order is named. Memory stays near the largest tensor or ``bucket_bytes``, whichever is more.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from vime.weights.errors import WeightError
from vime.weights.families.base import Plan
from vime.weights.families.units import Unit, read_pieces
from vime.weights.folders import Spec, spec_bytes
from vime.weights.groups import Groups, OwnershipError, all_gather_object
from vime.weights.ledger import Batch, Key, Tap
from vime.weights.raw import raw_bytes
from vime.weights.topology import Topology

BUCKET_BYTES = 64 << 20
_ALIGN = 16

Inventory = dict[str, Spec]


class AgreementError(WeightError):
    """The members of a group are about to do different things."""


def inventory(local: Mapping[str, torch.Tensor]) -> Inventory:
    """Dtype and shape of everything that a rank holds."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in local.items()}


class ShardStore(Mapping[str, torch.Tensor]):
    """What ``rank`` has to hold of a checkpoint, cut when asked for: global Megatron name -> shard."""

    def __init__(self, source: Mapping[str, torch.Tensor], plan: Plan, topology: Topology, rank: int):
        self._source, self._topology, self._rank = source, topology, rank
        self._units = {name: unit for unit in plan.units for name in topology.names_on(rank, unit)}

    def __getitem__(self, name: str) -> torch.Tensor:
        unit = self._units[name]
        full = unit.to_megatron(read_pieces(unit, self._source))
        return unit.shard(full, self._topology.shard_index(unit, self._rank), self._topology.shard_size(unit))

    def __iter__(self) -> Iterator[str]:
        return iter(self._units)

    def __len__(self) -> int:
        return len(self._units)

    def inventory(self) -> Inventory:
        """As :func:`inventory`, without cutting anything."""
        return {name: (self._source[u.hf[0].name].dtype, u.shard_shape(self._topology.shard_size(u)))
                for name, u in self._units.items()}


def check_ownership(plan: Plan, topology: Topology, held: list[Inventory]) -> dict[str, torch.dtype]:
    """Compare what every rank says it holds with what its place says, for every unit and every group.

    Returns the dtype of each unit. Raises :class:`OwnershipError` for the first unit, in model order, of which a
    group has no owner or a rank holds a wrong shape or dtype, for experts of one HF tensor in several dtypes, and for tensors that
    belong to no unit.
    """
    dtypes: dict[str, torch.dtype] = {}
    stacks: dict[str, str] = {}  # HF tensor of several experts -> the first of its units
    ranks = range(len(held))
    expected: list[set[str]] = [set() for _ in ranks]
    for unit in plan.units:
        shape = unit.shard_shape(topology.shard_size(unit))
        for rank in ranks:
            copies = (unit.name,) if is_copy(unit, rank, topology, held[rank]) else ()
            for name in (*topology.names_on(rank, unit), *copies):
                expected[rank].add(name)
                where = f"rank {rank} ({topology.place(rank)})"
                if name not in held[rank]:
                    raise OwnershipError(f"{name}: {where} has to hold it, but does not")
                dtype, found = held[rank][name]
                if found != shape:
                    raise OwnershipError(f"{name}: {where} holds shape {list(found)}, expected {list(shape)}")
                if dtypes.setdefault(unit.name, dtype) != dtype:
                    raise OwnershipError(f"{name}: {where} holds {dtype}, another owner {dtypes[unit.name]}")
                for ref in unit.hf:
                    if ref.part is not None and dtypes[first := stacks.setdefault(ref.name, unit.name)] != dtype:
                        raise OwnershipError(f"{name}: {where} holds {dtype}, but {first} is {dtypes[first]} and both are part of {ref.name}")
    for rank in ranks:
        if surplus := sorted(held[rank].keys() - expected[rank]):
            raise OwnershipError(f"{surplus[0]}: rank {rank} ({topology.place(rank)}) holds it, but its place in the groups "
                                 f"says that another rank does ({len(surplus)} such tensors)")
    return dtypes


def is_copy(unit: Unit, rank: int, topology: Topology, held: Collection[str]) -> bool:
    """Whether what ``rank`` holds under the unit's name is the copy of the embedding that Megatron keeps for its MTP layers."""
    return unit.place == "embedding" and unit.name in held and not topology.holds(rank, unit)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Units that travel together. Experts are listed by EP index, so that every EP rank packs equally much."""

    units: tuple[Unit, ...]
    is_expert: bool


def make_buckets(plan: Plan, topology: Topology, dtypes: Mapping[str, torch.dtype], limit: int = BUCKET_BYTES) -> list[Bucket]:
    """Cut the plan into buckets of full size at most ``limit`` (or one tensor, or one expert of each EP rank)."""
    buckets: list[Bucket] = []
    blocks: dict[tuple[Any, ...], list[Unit]] = {}
    for unit in plan.units:
        block = (unit.place, unit.layer, unit.expert is not None)
        blocks.setdefault(block, []).append(unit)
    per_rank = topology.experts // topology.size("ep") if topology.experts else 1
    for (_, _, is_expert), units in blocks.items():
        if is_expert:
            slots: dict[int, list[Unit]] = {}
            for unit in units:
                slots.setdefault(unit.expert % per_rank, []).append(unit)  # type: ignore[operator]
            lots = list(slots.values())
        else:
            lots = [[unit] for unit in units]
        lot: list[Unit] = []
        used = 0
        for more in lots:
            size = sum(spec_bytes((dtypes[u.name], u.shape)) for u in more)
            if lot and used + size > limit:
                buckets.append(Bucket(tuple(lot), is_expert))
                lot, used = [], 0
            lot, used = lot + more, used + size
        buckets.append(Bucket(tuple(lot), is_expert))
    return buckets


class Gatherer:
    """Iterates over ``(unit, full tensor)``. A collective: every rank must make one, with its own ``local`` tensors.

    Args:
        plan: units of the model, the same on every rank.
        groups: this rank's process groups.
        local: global Megatron name -> this rank's shard, from a model (:mod:`vime.weights.megatron_state`) or cut
            from a checkpoint (:class:`ShardStore`).
        tap: sees every stage (ledger, planted faults), or None.
        wrong_root: plant the public fault at this stage (``pp`` or ``ep``); tests only.
        strict: refuse wrong roots and lost tensors at once. Off where a tap is, unless asked for: a ledger has to see them
            to name their stage.

    That the second copy of a tied tensor is no stale one, and that the gathered bits are right at all, is for who uses
    this: :class:`vime.weights.online.Proof` or a ledger.
    """

    def __init__(self, plan: Plan, groups: Groups, local: Mapping[str, torch.Tensor], tap: Tap | None = None,
                 bucket_bytes: int = BUCKET_BYTES, wrong_root: str | None = None, strict: bool | None = None):
        self.plan, self.groups, self.topology, self.rank = plan, groups, groups.topology, groups.rank
        self.local, self.tap, self.wrong_root = local, tap, wrong_root
        self.strict = tap is None if strict is None else strict
        self.topology.check(plan)
        held = local.inventory() if isinstance(local, ShardStore) else inventory(local)
        self.dtypes = check_ownership(plan, self.topology, all_gather_object(held))
        self.buckets = make_buckets(plan, self.topology, self.dtypes, bucket_bytes)
        self._agree()
        self.device = next((tensor.device for tensor in local.values()), torch.device("cpu"))

    def _agree(self) -> None:
        """All ranks compare their schedules line by line; the first rank and line that differ are named."""
        if self.strict:
            self._check_roots()
        lines = [self._line(number, unit) for number, bucket in enumerate(self.buckets) for unit in bucket.units]
        marks = [xxhash.xxh3_64_intdigest(line.encode()) for line in lines]
        for other, theirs in enumerate(all_gather_object(marks)):
            if theirs != marks:
                at = next((i for i, (a, b) in enumerate(zip(marks, theirs, strict=False)) if a != b), min(len(marks), len(theirs)))
                mine = lines[at] if at < len(lines) else "nothing more"
                raise AgreementError(f"ranks {self.rank} and {other} are about to send different things; the first is number "
                                     f"{at} of {len(lines)}, where rank {self.rank} has: {mine}")

    def _line(self, number: int, unit: Unit) -> str:
        roots = {k: self._roots(k, unit) for k in ("pp", "ep") if k == "pp" or unit.expert is not None}
        return f"bucket {number}, {unit.name}, {self.dtypes[unit.name]}, {unit.shape}, split {unit.split}, roots {roots}"

    def _check_roots(self) -> None:
        """The root that each rank is about to take must be the one owner inside its own group, for every group."""
        asked: set[tuple[str, int]] = set()
        for unit in self.plan.units:
            for kind in ("pp",) if unit.expert is None else ("pp", "ep"):
                position = self.topology.stage(unit) if kind == "pp" else self.topology.ep_index(unit.expert or 0)
                if (kind, position) in asked:
                    continue
                asked.add((kind, position))
                for rank, root in self._roots(kind, unit).items():
                    group = self.topology.group(kind, rank)
                    if root != group[position]:
                        raise AgreementError(f"{unit.name}: rank {rank} ({self.topology.place(rank)}) would take it from rank {root}, "
                                             f"but in its {kind} group {list(group)} rank {group[position]} owns it")

    def __iter__(self) -> Iterator[tuple[Unit, torch.Tensor]]:
        for bucket in self.buckets:
            yield from self.fetch(bucket)

    def fetch(self, bucket: Bucket) -> list[tuple[Unit, torch.Tensor]]:
        """Full tensors of one bucket, on every rank. All its collectives have run when this returns."""
        shards = self._pipeline(bucket)
        if bucket.is_expert:
            shards = self._experts(bucket, shards)
        full = self._tensor_parallel(bucket, shards)
        units = {u.name: u for u in bucket.units} if self.tap is None else self.plan.by_name
        # A planted fault can give a tensor a name that no tensor of the model has; whoever watches has seen it by now.
        return [(units[key.name], tensor) for key, tensor in self._show("full", full).items() if key.name in units]

    def _show(self, stage: str, batch: Batch) -> Batch:
        return batch if self.tap is None else self.tap(stage, batch)

    def _pipeline(self, bucket: Bucket) -> Batch:
        """The owning stage's shards of this EP rank, on every stage."""
        mine = [u for u in bucket.units if u.expert is None or self._in_my_block(u)]
        held = {Key(u.name, self.topology.shard_index(u, self.rank)): self.local[u.name]
                for u in mine if self.topology.holds(self.rank, u) and u.name in self.local}
        held = dict(self._show("source", held))
        if self.topology.size("pp") == 1:
            return held
        roots = self._roots("pp", mine[0])
        return self._show("pp", self._broadcast(mine, held, "pp", roots))

    def _in_my_block(self, unit: Unit) -> bool:
        return self.topology.index("ep", self.rank) == self.topology.ep_index(unit.expert or 0)

    def _experts(self, bucket: Bucket, held: Batch) -> Batch:
        """This rank's ETP shard of every expert in the bucket, block by block, each from its owner in this EP group."""
        if self.topology.size("ep") == 1:
            return held
        shards: dict[Key, torch.Tensor] = {}
        blocks: dict[int, list[Unit]] = {}
        for unit in bucket.units:
            blocks.setdefault(self.topology.ep_index(unit.expert or 0), []).append(unit)
        for units in blocks.values():
            shards.update(self._broadcast(units, held, "ep", self._roots("ep", units[0])))
        return self._show("ep", shards)

    def _roots(self, kind: str, unit: Unit) -> Mapping[int, int]:
        roots = self.topology.roots(kind, unit)
        if self.wrong_root != kind:
            return roots
        # The public fault: one global owner for all groups, and who is not in its group falls back to himself.
        owner = min(r for r in roots if self.topology.holds(r, unit))
        return {r: owner if owner in self.topology.group(kind, r) else r for r in roots}

    def _broadcast(self, units: list[Unit], held: Batch, kind: str, roots: Mapping[int, int]) -> dict[Key, torch.Tensor]:
        """``units`` as the root of this rank's group of that kind holds them."""
        keys = [(Key(u.name, self.topology.shard_index(u, self.rank)), u) for u in units]
        offsets, size = self._offsets(units)
        buffer = torch.zeros(size, dtype=torch.uint8, device=self.device)
        if roots[self.rank] == self.rank:
            owner = any(key in held for key, _ in keys)
            tensors: list[torch.Tensor | None] = [held.get(key) for key, _ in keys] if owner else list(held.values())  # else: see _roots
            _pack(tensors, offsets, buffer)
        if len({roots[r] for r in self.topology.group(kind, self.rank)}) == 1:
            dist.broadcast(buffer, src=roots[self.rank], group=self.groups.handles[kind])
        return self._unpack(keys, offsets, buffer)

    def _tensor_parallel(self, bucket: Bucket, shards: Batch) -> Batch:
        """Full tensors from the shards of this rank's (expert-)TP group."""
        kind = "etp" if bucket.is_expert else "tp"
        size, handle = self.topology.size(kind), self.groups.handles[kind]
        cut = [u for u in bucket.units if u.split != "none" and size > 1]
        parts: dict[Key, torch.Tensor] = {}
        if cut:
            offsets, length = self._offsets(cut)
            mine = torch.zeros(length, dtype=torch.uint8, device=self.device)
            place = self.topology.index(kind, self.rank)
            _pack([shards.get(Key(u.name, place)) for u in cut], offsets, mine)
            buffers = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(buffers, mine, group=handle)
            for part, buffer in enumerate(buffers):
                parts.update(self._unpack([(Key(u.name, part), u) for u in cut], offsets, buffer))
            parts = dict(self._show("tp", parts))
        full: dict[Key, torch.Tensor] = {}
        for unit in bucket.units:
            if unit.split != "none" and size > 1:
                pieces = [parts.get(Key(unit.name, p)) for p in range(size)]
            else:
                pieces = [shards.get(Key(unit.name, self.topology.shard_index(unit, self.rank)))]
            if all(p is not None for p in pieces):
                full[Key(unit.name)] = unit.unshard(pieces)  # type: ignore[arg-type]
            elif self.strict:
                raise WeightError(f"{unit.name} got lost on rank {self.rank}")
        return full

    def _offsets(self, units: list[Unit]) -> tuple[list[int], int]:
        offsets, end = [], 0
        for unit in units:
            offsets.append(end)
            size = spec_bytes((self.dtypes[unit.name], unit.shard_shape(self.topology.shard_size(unit))))
            end += -(-size // _ALIGN) * _ALIGN
        return offsets, end

    def _unpack(self, keys: list[tuple[Key, Unit]], offsets: list[int], buffer: torch.Tensor) -> dict[Key, torch.Tensor]:
        out = {}
        for (key, unit), offset in zip(keys, offsets, strict=True):
            dtype, shape = self.dtypes[unit.name], unit.shard_shape(self.topology.shard_size(unit))
            out[key] = buffer[offset : offset + spec_bytes((dtype, shape))].view(dtype).reshape(shape)
        return out


def _pack(tensors: list[torch.Tensor | None], offsets: list[int], buffer: torch.Tensor) -> None:
    for tensor, offset in zip(tensors, offsets, strict=False):
        if tensor is not None:
            data = raw_bytes(tensor)
            buffer[offset : offset + data.numel()] = data
