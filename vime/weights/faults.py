"""Planted faults: each does to one place what was once done to a real run, so that finding it can be shown.

``--inject STAGE:FAULT``. A fault acts on one rank (the wrong root on all) at one stage, on a tensor that is chosen
from the plan, and knows where it was planted; the verdict must name that place. A fault that finds nothing to act on
is refused: a control that plants nothing proves nothing.
"""
from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from alignment.verdict import Place
from vime.weights.errors import WeightError
from vime.weights.families.base import Plan
from vime.weights.families.units import SCALE, Unit
from vime.weights.ledger import STAGES, Batch, Key
from vime.weights.topology import Topology
from vime.weights.truth import even_split, head_major, launder, previous, swap_halves, transpose

_HF = ("converted", "stacked", "file", "received")
_MEGATRON = ("local", "source", "pp", "ep", "tp", "full", "loaded")
_ANY = _MEGATRON + _HF
#: fault -> stages at which it can be planted; the first is where it is most at home.
FAULTS: dict[str, tuple[str, ...]] = {
    "wrong-root": ("ep", "pp"),
    "swapped-experts": ("ep", "local", "source", "pp", "full", *_HF, "loaded"),
    "local-id": ("ep", "local", "full", "converted"),
    "gate-up": ("converted", "full", "local", "source", "pp", "tp", "ep", "stacked", "file", "received", "loaded"),
    "transpose": ("converted", "full", "local", "source", "pp", "tp", "ep", "stacked", "file", "received", "loaded"),
    "stale": ("source", *(s for s in _ANY if s != "source")),
    "dropped": ("converted", *(s for s in _ANY if s not in ("converted", "local"))),
    "dtype": ("full", *(s for s in _ANY if s != "full")),
    "missing-scale": ("converted", "stacked", "file", "received"),
    "shard-order": ("tp",),
    "head-major": ("full",),
    "even-split": ("full",),
    "layer-offset": ("local", "full", "converted", "stacked", "file", "received", "loaded"),
    "stale-head": ("local", "loaded", "stacked", "file", "received"),
    "second-reload": ("loaded",),
}
#: What a fault needs that not every model and topology has.
_NEEDS = {
    "missing-scale": "; it needs a checkpoint in block FP8",
    "shard-order": "; it needs a tensor that is cut: --tp 2, for experts --etp 2",
    "even-split": "; it needs a gated projection that is cut: --tp 2 for a dense layer, --etp 2 for experts",
}
_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"experts\.(\d+)\.")

Change = Callable[[torch.Tensor], torch.Tensor]


class FaultError(WeightError):
    """The fault does not exist, not at this stage, or finds nothing to act on in this model and topology."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A planted fault. ``rank`` None: on every rank. ``rename`` maps a key to the one its tensor turns up under
    (None: nowhere); ``change`` alters the tensor of the keys in ``at``."""

    stage: str
    kind: str
    rank: int | None
    place: Place
    at: frozenset[Key] = frozenset()
    rename: Callable[[Key], Key | None] | None = None
    change: Change | None = None

    def rewire(self, keys: Iterable[Key]) -> dict[Key, tuple[Key, Change | None]]:
        """New key -> (key its tensor is taken from, what is done to it)."""
        out: dict[Key, tuple[Key, Change | None]] = {}
        for key in keys:
            new = key if self.rename is None else self.rename(key)
            if new is not None:
                out[new] = (key, self.change if key in self.at else None)
        return out

    def __call__(self, stage: str, batch: Batch) -> Batch:
        if stage != self.stage or self.kind in ("wrong-root", "second-reload"):
            return batch
        return {new: batch[old] if change is None else change(batch[old]) for new, (old, change) in self.rewire(batch).items()}


class Rewired(Mapping[str, torch.Tensor]):
    """A lazy mapping by name under a fault."""

    def __init__(self, base: Mapping[str, torch.Tensor], fault: Fault, part: Callable[[str], int | None]):
        self._base = base
        self._table = {new.name: (old.name, change) for new, (old, change) in
                       fault.rewire([Key(name, part(name)) for name in base]).items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        old, change = self._table[name]
        return self._base[old] if change is None else change(self._base[old])

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def parse(text: str) -> tuple[str, str]:
    """``STAGE:FAULT`` -> (stage, fault). Raises :class:`FaultError` naming what exists."""
    stage, colon, kind = text.partition(":")
    if not colon or stage not in STAGES or kind not in FAULTS:
        raise FaultError(f"--inject {text!r}: expected STAGE:FAULT, STAGE one of {', '.join(STAGES)}, "
                         f"FAULT one of {', '.join(FAULTS)}")
    if stage not in FAULTS[kind]:
        raise FaultError(f"--inject {text!r}: {kind} can be planted at {', '.join(FAULTS[kind])}")
    return stage, kind


class Planter:
    """Chooses the place of a fault from what a stage holds."""

    def __init__(self, plan: Plan, topology: Topology, stage: str):
        self.plan, self.top, self.stage = plan, topology, stage
        self.hf = stage in _HF
        self.sharded = stage in ("local", "source", "pp", "ep", "tp", "loaded")

    def units(self, wanted: Callable[[Unit], bool]) -> list[Unit]:
        """Units that pass this stage, later layers first: a fault in the last layer is the hardest to see by eye."""
        top = self.top
        passes = {
            "pp": lambda u: top.size("pp") > 1,
            "ep": lambda u: u.expert is not None and top.size("ep") > 1,
            "tp": lambda u: u.split != "none" and top.shard_size(u) > 1,
            "received": lambda u: u.place != "mtp" and not u.spare,  # an engine is sent the policy only
        }.get(self.stage, lambda u: True)
        return [u for u in reversed(self.plan.units) if passes(u) and wanted(u)]

    def rank(self, unit: Unit) -> int:
        """The highest rank that shows this unit at the stage; what leaves rank 0 is planted at rank 0."""
        if self.hf:
            return 0
        ranks = range(self.top.world)
        if self.stage in ("local", "source", "loaded"):
            return max(r for r in ranks if self.top.holds(r, unit))
        if self.stage == "pp" and unit.expert is not None:
            return max(r for r in ranks if self.top.index("ep", r) == self.top.ep_index(unit.expert))
        return max(ranks)

    def key(self, unit: Unit, rank: int) -> Key:
        """What the unit is called on ``rank`` at this stage; of several HF pieces the first."""
        if self.hf:
            ref = unit.hf[0]
            return Key(ref.name, ref.part if self.stage == "converted" else None)
        return Key(unit.name, self.top.shard_index(unit, rank) if self.sharded else None)

    def single(self, kind: str, wanted: Callable[[Unit], bool], change: Change | None) -> Fault:
        """One tensor of one rank is changed, or lost."""
        for unit in self.units(wanted):
            rank = self.rank(unit)
            key = self.key(unit, rank)
            if change is not None and self.hf and key.part is None and unit.hf[0].part is not None:
                change = _on_slice(change, unit.hf[0].part)  # type: ignore[arg-type]
            rename = None if change is not None else lambda k, lost=key: None if k == lost else k
            return Fault(self.stage, kind, rank, self.place(unit, rank, key), frozenset([key]), rename, change)
        raise FaultError(f"--inject {self.stage}:{kind}: nothing in this model and topology passes this stage and fits{_NEEDS.get(kind, '')}")

    def place(self, unit: Unit, rank: int, key: Key) -> Place:
        """Where a verdict has to say that the fault is."""
        return Place(stage=self.stage, rank=self.top.coordinates(rank), layer=unit.layer, tensor=key.name, expert=unit.expert)


def plant(text: str, plan: Plan, topology: Topology) -> Fault:
    """Make the fault of ``--inject``. Raises :class:`FaultError` if it has nothing to act on."""
    stage, kind = parse(text)
    make = Planter(plan, topology, stage)
    if kind == "wrong-root":
        return _wrong_root(make, kind)
    if kind in ("swapped-experts", "local-id"):
        return _experts(make, kind)
    if kind == "layer-offset":
        return _layer_offset(make, kind)
    if kind == "stale-head":
        return _stale_head(make)
    if kind == "shard-order":
        found = make.single(kind, lambda u: True, lambda t: t)
        at, size = next(iter(found.at)), topology.shard_size(plan.by_name[next(iter(found.at)).name])
        return dataclasses.replace(found, rename=lambda k: Key(k.name, size - 1 - k.part) if k.name == at.name else k)  # type: ignore[operator]
    if kind == "gate-up":
        return _gate_up(make, kind)
    if kind in ("head-major", "even-split"):
        size = topology.shard_size
        wanted = {"head-major": lambda u: u.groups > 1, "even-split": lambda u: u.split == "glu" and size(u) > 1}[kind]
        found = make.single(kind, wanted, lambda t: t)
        unit = plan.by_name[next(iter(found.at)).name]
        # of rank 0, which sends: the fault has to reach whoever reads the result
        found = dataclasses.replace(found, rank=0, place=make.place(unit, 0, next(iter(found.at))))
        return dataclasses.replace(found, change=lambda t: head_major(unit, t) if kind == "head-major" else even_split(unit, t, size(unit)))
    matrix = [u for u in make.units(lambda u: len(u.hf[0].shape) == 2 and not u.name.endswith(SCALE))]
    square = {u.name for u in matrix if len(set(u.hf[0].shape if make.hf else u.shard_shape(topology.shard_size(u)))) == 1}
    wanted, change = {
        "transpose": (lambda u: u in matrix and (u.name in square or not square), transpose),
        "stale": (lambda u: u.place == "layer", previous),
        "second-reload": (lambda u: u.place == "layer", previous),
        "dtype": (lambda u: u in matrix, launder),
        "dropped": (lambda u: u.place == "layer", None),
        "missing-scale": (lambda u: u.name.endswith(SCALE), None),
    }[kind]
    return make.single(kind, wanted, change)


def _gate_up(make: Planter, kind: str) -> Fault:
    """Two HF tensors exchange their names; a fused one its halves."""
    found = make.single(kind, lambda u: u.split == "glu", swap_halves)
    if make.hf and next(iter(found.at)).name.endswith(("gate_proj.weight", "gate_proj.bias", f"gate_proj.weight{SCALE}")):
        gate = next(iter(found.at)).name
        other = {gate: gate.replace("gate_proj", "up_proj"), gate.replace("gate_proj", "up_proj"): gate}
        return dataclasses.replace(found, at=frozenset(), rename=lambda k: Key(other.get(k.name, k.name), k.part))
    return found


def _experts(make: Planter, kind: str) -> Fault:
    top = make.top
    per_rank = top.experts // top.size("ep") if top.experts else 0
    if kind == "local-id" and top.size("ep") == 1:
        raise FaultError("--inject local-id: with EP 1 local and global ids are the same; give --ep 2 or more")
    for unit in make.units(lambda u: u.expert is not None):
        rank, layer = make.rank(unit), unit.layer
        block = _EXPERT.split(unit.hf[0].name if make.hf else unit.name)[0]
        if kind == "local-id":
            new: Callable[[int], int] = lambda e: e % per_rank  # noqa: E731
            first = top.index("ep", rank) * per_rank if make.stage == "local" else 0
            shown = next(u for u in make.plan.units if u.layer == layer and u.expert == first)
        else:
            # The first two of the last block; after the EP step the last of two blocks, which two ranks held.
            last = unit.expert or 0
            a = last - last % per_rank
            b = a + 1
            if make.stage in ("ep", "tp", "full") and top.size("ep") > 1:
                a, b = last - per_rank, last
            if b >= top.experts or (make.stage in ("local", "source", "pp", "loaded") and per_rank < 2):
                break
            new = lambda e, a=a, b=b: {a: b, b: a}.get(e, e)  # noqa: E731
            shown = next(u for u in make.plan.units if u.layer == layer and u.expert == a)
        if make.hf and unit.hf[0].part is not None and make.stage != "converted":
            if kind == "swapped-experts":
                name = shown.hf[0].name
                order = [new(e) for e in range(top.experts)]
                return Fault(make.stage, kind, rank, make.place(shown, rank, Key(name)), frozenset([Key(name)]), None,
                             lambda t, order=order: t[order])
            break

        def rename(key: Key, layer: int | None = layer, block: str = block, new: Callable[[int], int] = new) -> Key:
            if make.hf and key.part is not None:
                return Key(key.name, new(key.part)) if f"layers.{layer}." in key.name else key
            expert = _EXPERT.search(key.name)
            if not expert or key.name[: expert.start()] != block:
                return key
            return Key(key.name[: expert.start(1)] + str(new(int(expert[1]))) + key.name[expert.end(1) :], key.part)

        return Fault(make.stage, kind, rank, make.place(shown, rank, make.key(shown, rank)), rename=rename)
    raise FaultError(f"--inject {make.stage}:{kind}: no expert passes this stage in this model and topology")


def _layer_offset(make: Planter, kind: str) -> Fault:
    """Layer k turns up as layer k - 1, among equal layers of the rank's stage where there are any; the first
    becomes the last."""
    alike: dict[tuple, list[int]] = {}
    stages: dict[int, list[int]] = {}
    for layer in sorted({u.layer for u in make.plan.units if u.place == "layer"}):  # type: ignore[type-var]
        units = [u for u in make.plan.units if u.layer == layer and u.place == "layer"]
        stage = 0 if make.hf or make.stage == "full" else make.top.stage(units[0])
        alike.setdefault((stage, *((u.name.split(".", 3)[3], u.shape) for u in units)), []).append(layer)  # type: ignore[arg-type]
        stages.setdefault(stage, []).append(layer)  # type: ignore[arg-type]
    unlike = [] if make.stage == "file" else list(reversed(stages.values()))  # a writer takes no name that was not announced
    layers = next((g for g in (*reversed(alike.values()), *unlike) if len(g) > 1), None)
    if layers is None:
        raise FaultError(f"--inject {make.stage}:{kind}: no pipeline stage holds two layers{'' if unlike else ' that are alike'}")
    to = {str(k): str(layers[i - 1]) for i, k in enumerate(layers)}
    unit = next(u for u in make.plan.units if u.layer == layers[0] and u.place == "layer")
    rank = make.rank(unit)

    def rename(key: Key) -> Key:
        found = _LAYER.search(key.name)
        if not found or found[1] not in to or key.name.startswith("mtp."):
            return key
        return Key(key.name[: found.start(1)] + to[found[1]] + key.name[found.end(1) :], key.part)

    return Fault(make.stage, kind, rank, make.place(unit, rank, make.key(unit, rank)), rename=rename)


def _stale_head(make: Planter) -> Fault:
    for unit in make.plan.units:
        if make.hf:
            names = [a for a in unit.hf_alias if a in (make.plan.hf_names or ())]
            rank: int | None = 0
        else:
            names = list(unit.megatron_alias) if make.top.size("pp") > 1 else []
            rank = make.top.world - 1
        if names and rank is not None:
            key = Key(names[0], None if make.hf else make.top.shard_index(unit, rank))
            return Fault(make.stage, "stale-head", rank, make.place(unit, rank, key), frozenset([key]), None, previous)
    raise FaultError(f"--inject {make.stage}:stale-head: the head is no second tensor here (it is one where the embedding "
                     "is tied and PP is 2 or more, or where the files hold lm_head.weight beside a tied embedding)")


def _wrong_root(make: Planter, kind: str) -> Fault:
    """Planted on all ranks; the first place is the lowest rank whose group does not hold the global owner."""
    top = make.top
    for unit in make.plan.units:
        if make.stage == "ep" and (unit.expert is None or top.size("ep") == 1):
            continue
        roots = top.roots(make.stage, unit)
        owner = min(r for r in roots if top.holds(r, unit))
        for rank in range(top.world):
            outside = owner not in top.group(make.stage, rank)
            if outside and roots[rank] != rank and (make.stage == "ep" or unit.expert is None):
                return Fault(make.stage, kind, None, make.place(unit, rank, make.key(unit, rank)))
    raise FaultError(f"--inject {make.stage}:wrong-root: every {make.stage.upper()} group holds the global owner in this topology; "
                     "it needs a second group of that kind and more than one rank in each")


def _on_slice(change: Change, part: int) -> Change:
    def changed(whole: torch.Tensor) -> torch.Tensor:
        whole = whole.clone()
        whole[part] = change(whole[part])
        return whole

    return changed
