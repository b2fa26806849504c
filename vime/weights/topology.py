"""Which rank holds what, read from the process groups themselves.

Expert-parallel and tensor-parallel groups fold over each other, so "the owner's rank" is a different number in every
subgroup. The public fault behind this module: a global owner rank was used as the root of an EP subgroup, every
member outside fell back to itself, and experts 0 and 32 came out the same. Here a root is always asked for per
group (:meth:`Topology.roots`), it is a member of that group, and all groups are checked before anything is sent.

Ranks are laid out as megatron-core does with its default order ``tp-cp-ep-dp-pp`` (``parallel_state.RankGenerator``):
dense ``rank = tp + TP * (dp + DP * pp)``, experts ``rank = etp + ETP * (ep + EP * (edp + EDP * pp))``.
"""
from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable

from vime.weights.errors import WeightError
from vime.weights.families.base import Plan
from vime.weights.families.units import Unit

KINDS = ("tp", "pp", "ep", "etp")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")

Groups = tuple[tuple[int, ...], ...]


class TopologyError(WeightError):
    """The sizes do not fit the model or each other, or a rank does not hold what its place says."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Parallel sizes. ``world`` 0: the smallest that holds ``tp * ep`` (and ``ep * etp``) ranks a stage.

    Raises:
        TopologyError: a size below 1, a ``world`` that the sizes do not divide, or layers of a first or last stage where there
            is one stage.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    world: int = 0
    first_stage: int | None = None  # layers of the first pipeline stage, where it is uneven
    last_stage: int | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "etp", "vpp"):
            if getattr(self, name) < 1:
                raise TopologyError(f"--{name} is {getattr(self, name)}; expected at least 1")
        for name, layers in (("first", self.first_stage), ("last", self.last_stage)):
            if layers is not None and self.pp == 1:
                raise TopologyError(f"the {name} stage was given {layers} layers and --pp is 1: one stage holds all layers; give --pp 2 or "
                                    f"more, or leave the layers of the {name} stage out")
        if not self.world:
            object.__setattr__(self, "world", self.pp * math.lcm(self.tp * self.ep, self.ep * self.etp))
        for inner, names in ((self.tp, "tp"), (self.ep * self.etp, "ep * etp")):
            if self.world % (self.pp * inner):
                raise TopologyError(f"a world of {self.world} ranks is not a multiple of pp * {names} = {self.pp * inner}")

    def __str__(self) -> str:
        extra = [f"VPP{self.vpp}"] if self.vpp > 1 else []
        extra += [f"last stage {self.last_stage} layers"] if self.last_stage is not None else []
        return " ".join([f"TP{self.tp}/PP{self.pp}/EP{self.ep}/ETP{self.etp} on {self.world} ranks", *extra])


@dataclasses.dataclass(frozen=True)
class Topology:
    """Process groups and the layers of each pipeline stage.

    ``groups[kind]`` lists every group of a kind, each in group-rank order. ``stages[pp][chunk]`` are the global
    numbers of the decoder layers in a (virtual) chunk, in order. ``experts``: routed experts of a layer.
    """

    groups: dict[str, Groups]
    stages: tuple[tuple[tuple[int, ...], ...], ...]
    experts: int = 0

    def __post_init__(self) -> None:
        world = sorted(r for g in self.groups["tp"] for r in g)
        for kind in KINDS:
            members = sorted(r for g in self.groups[kind] for r in g)
            if members != list(range(len(members))) or members != world:
                raise TopologyError(f"the {kind} groups {self.groups[kind]} do not hold every rank exactly once")
            if len({len(g) for g in self.groups[kind]}) != 1:
                raise TopologyError(f"the {kind} groups {self.groups[kind]} are not of one size")
        layers = sorted(n for stage in self.stages for chunk in stage for n in chunk)
        if layers != list(range(len(layers))):
            raise TopologyError(f"the pipeline stages {self.stages} do not hold every layer exactly once")
        if len(self.stages) != self.size("pp"):
            raise TopologyError(f"{len(self.stages)} pipeline stages for PP groups of {self.size('pp')}")
        if self.experts % self.size("ep"):
            raise TopologyError(f"EP {self.size('ep')} does not divide the {self.experts} experts of a layer")
        lookup = {k: {r: (g, i) for g in gs for i, r in enumerate(g)} for k, gs in self.groups.items()}
        object.__setattr__(self, "_lookup", lookup)
        owner = {layer: (s, c, i) for s, stage in enumerate(self.stages)
                 for c, chunk in enumerate(stage) for i, layer in enumerate(chunk)}
        object.__setattr__(self, "_owner", owner)
        object.__setattr__(self, "_roots", {})

    @classmethod
    def build(cls, sizes: Sizes, num_layers: int, experts: int = 0) -> Topology:
        """The topology that Megatron makes for these sizes. ``experts``: routed experts of a layer, 0 for a dense model.

        Raises :class:`TopologyError`, also for EP or ETP above 1 without experts: nothing would be cut by them.
        """
        if not experts and (asked := [f"--{kind} {size}" for kind, size in (("ep", sizes.ep), ("etp", sizes.etp)) if size > 1]):
            raise TopologyError(f"{' and '.join(asked)} would cut routed experts, and this model has none; expected 1, leave "
                                f"{'them' if asked[1:] else 'it'} out")
        return cls(rank_groups(sizes), split_layers(num_layers, sizes), experts)

    @property
    def world(self) -> int:
        return len(self._lookup["tp"])  # type: ignore[attr-defined]

    def size(self, kind: str) -> int:
        """Ranks of a group of that kind, one of :data:`KINDS`."""
        return len(self.groups[kind][0])

    def group(self, kind: str, rank: int) -> tuple[int, ...]:
        """Global ranks of the group of that kind that holds ``rank``, in group-rank order."""
        return self._lookup[kind][rank][0]  # type: ignore[attr-defined]

    def index(self, kind: str, rank: int) -> int:
        """Place of a global rank in its group of that kind."""
        return self._lookup[kind][rank][1]  # type: ignore[attr-defined]

    def coordinates(self, rank: int) -> dict[str, int]:
        """The full parallel rank."""
        return {"rank": rank, **{kind: self.index(kind, rank) for kind in ("pp", "tp", "ep", "etp")}}

    def place(self, rank: int) -> str:
        """The full parallel rank in words: ``pp 0, tp 1, ep 3, etp 0``."""
        return ", ".join(f"{kind} {at}" for kind, at in self.coordinates(rank).items() if kind != "rank")

    def shard_kind(self, unit: Unit) -> str:
        """Routed experts are cut by expert-TP, all else by TP."""
        return "tp" if unit.expert is None else "etp"

    def shard_index(self, unit: Unit, rank: int) -> int:
        return self.index(self.shard_kind(unit), rank)

    def shard_size(self, unit: Unit) -> int:
        return self.size(self.shard_kind(unit))

    def stage(self, unit: Unit) -> int:
        """Pipeline stage that holds a unit. MTP layers, final norm and head are on the last."""
        if unit.place == "embedding":
            return 0
        if unit.place in ("final", "head", "mtp"):
            return len(self.stages) - 1
        return self._owner[unit.layer][0]  # type: ignore[attr-defined]

    def ep_index(self, expert: int) -> int:
        """EP rank that holds a global expert: Megatron gives each rank a contiguous block."""
        return expert // (self.experts // self.size("ep"))

    def holds(self, rank: int, unit: Unit) -> bool:
        """Whether ``rank`` stores the unit (or a shard of it) under its own name."""
        if self.index("pp", rank) != self.stage(unit):
            return False
        return unit.expert is None or self.index("ep", rank) == self.ep_index(unit.expert)

    def names_on(self, rank: int, unit: Unit) -> tuple[str, ...]:
        """Global names under which ``rank`` stores the unit: its own, and the tied head on the last stage (PP > 1)."""
        own = (unit.name,) if self.holds(rank, unit) else ()
        last = self.size("pp") > 1 and self.index("pp", rank) == self.size("pp") - 1
        return own + (unit.megatron_alias if last else ())

    def roots(self, kind: str, unit: Unit) -> dict[int, int]:
        """For every rank that takes part, the global rank of the root **inside its own group** of that kind.

        ``pp``: all ranks; the root is the member on the owning stage. ``ep``: all ranks; the root is the member with
        the owning EP index (after the PP step every stage holds its EP share).
        """
        position = self.stage(unit) if kind == "pp" else self.ep_index(unit.expert or 0)
        cache = self._roots  # type: ignore[attr-defined]
        if (kind, position) not in cache:
            cache[kind, position] = {rank: group[position] for group in self.groups[kind] for rank in group}
        return cache[kind, position]

    def local_name(self, name: str, rank: int) -> tuple[int, str]:
        """Global Megatron name -> (chunk, the name that rank's own model uses)."""
        chunk = 0
        if found := _LAYER.match(name):
            _, chunk, local = self._owner[int(found[1])]  # type: ignore[attr-defined]
            name = f"decoder.layers.{local}.{name[found.end():]}"
        elif name.startswith(("decoder.final", "output_layer", "mtp.")):
            chunk = len(self.stages[-1]) - 1
        if found := _EXPERT.search(name):
            local = int(found[1]) - self.index("ep", rank) * (self.experts // self.size("ep"))
            name = _EXPERT.sub(f".local_experts.{local}.", name)
        return chunk, name

    def global_name(self, chunk: int, name: str, rank: int) -> str:
        """The inverse: layer and expert numbers of the whole model."""
        if found := _LAYER.match(name):
            layer = self.stages[self.index("pp", rank)][chunk][int(found[1])]
            name = f"decoder.layers.{layer}.{name[found.end():]}"
        if found := _EXPERT.search(name):
            expert = int(found[1]) + self.index("ep", rank) * (self.experts // self.size("ep"))
            name = _EXPERT.sub(f".local_experts.{expert}.", name)
        return name

    def check(self, plan: Plan) -> None:
        """Raise before anything is read if this model cannot be cut this way."""
        layers = {u.layer for u in plan.units if u.place == "layer"}
        if layers != set(self._owner):  # type: ignore[attr-defined]
            raise TopologyError(f"the pipeline stages hold {len(self._owner)} layers, the model has {len(layers)}")  # type: ignore[attr-defined]
        for unit in plan.units:
            if unit.expert is not None and unit.expert >= self.experts:
                raise TopologyError(f"{unit.name}: the topology was made for {self.experts} experts a layer")
            unit.check_split(self.shard_size(unit))


def experts_of(plan: Plan) -> int:
    """Routed experts of a layer (0: a dense model)."""
    return 1 + max((u.expert for u in plan.units if u.expert is not None), default=-1)


def layers_of(plan: Plan) -> int:
    """Decoder layers, MTP layers not counted."""
    return len({u.layer for u in plan.units if u.place == "layer"})


def rank_groups(sizes: Sizes) -> dict[str, Groups]:
    """Every group of every kind, in Megatron's default order."""
    per_stage = sizes.world // sizes.pp

    def cut(base: Iterable[int], stride: int, count: int) -> Groups:
        return tuple(tuple(b + stride * i for i in range(count)) for b in base)

    ranks = range(sizes.world)
    block = sizes.etp * sizes.ep
    return {
        "tp": cut(ranks[:: sizes.tp], 1, sizes.tp),
        "pp": cut(range(per_stage), per_stage, sizes.pp),
        "etp": cut(ranks[:: sizes.etp], 1, sizes.etp),
        "ep": cut((r for r in ranks if r % block < sizes.etp), sizes.etp, sizes.ep),
    }


def split_layers(num_layers: int, sizes: Sizes) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """``[stage][chunk] -> global layers``, as Megatron distributes them (``get_transformer_layer_offset``).

    Where the layers do not divide evenly and nothing else is asked for, the last stage takes what is left (less than the
    others, where it can be).

    Raises:
        TopologyError: a stage would be empty, or the layers cannot be dealt as asked.
    """
    pp, vpp, first, last = sizes.pp, sizes.vpp, sizes.first_stage, sizes.last_stage
    if first is None and last is None and num_layers % pp:
        per = -(-num_layers // pp)
        per = per if num_layers > (pp - 1) * per else num_layers // pp
        last = num_layers - (pp - 1) * per
    if num_layers < pp:
        raise TopologyError(f"{num_layers} layers cannot be put on {pp} pipeline stages: each needs at least one")
    counts = [first if s == 0 else last if s == pp - 1 else None for s in range(pp)]
    middle, left = counts.count(None), num_layers - sum(c or 0 for c in counts)
    if left < middle or (left % middle if middle else left) or any(c is not None and c < 1 for c in counts):
        raise TopologyError(f"{num_layers} layers cannot be put on {pp} pipeline stages with {first} on the first and {last} on the last")
    full = [left // middle if c is None else c for c in counts]
    if bad := [c for c in full if c % vpp]:
        raise TopologyError(f"a pipeline stage of {bad[0]} layers cannot be cut into {vpp} virtual chunks")
    stages: list[list[tuple[int, ...]]] = [[] for _ in range(pp)]
    n = 0
    for _ in range(vpp):
        for s, count in enumerate(full):
            stages[s].append(tuple(range(n, n + count // vpp)))
            n += count // vpp
    return tuple(tuple(s) for s in stages)
