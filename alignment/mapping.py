"""Two sets of named tensors, compared in the order in which a model computes them.

The first bad tensor is the news; what differs behind it is downstream. A name that one side lacks is not skipped:
it is a fault of its own, and the coverage says how many tensors and elements were compared of how many there are.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from alignment import bits, exchanged
from alignment.errors import InputError, KeyCollision
from alignment.places import causal_order, place_of, stacked_experts
from alignment.sources import as_source
from alignment.verdict import Cause, Coverage, Place, Status, Verdict, combine, worst

Named = Mapping[str, Any] | Iterable[tuple[str, Any]]


def as_mapping(side: Named, what: str = "side") -> Mapping[str, Any]:
    """A mapping of names to tensors; pairs may not repeat a name (KeyCollision)."""
    if isinstance(side, Mapping):
        odd = next((n for n in side if not isinstance(n, str)), None)
        if odd is not None:
            raise InputError(f"{what} has {odd!r} for the name of a tensor", "names that are text")
        return side
    if hasattr(side, "state_dict"):
        raise InputError(f"{what} is a module", "a mapping of names to tensors",
                         "use alignment.weights.snapshot(module): state_dict() leaves out non-persistent buffers")
    out: dict[str, Any] = {}
    if not isinstance(side, Iterable):
        raise InputError(f"{what} is a {type(side).__name__}", "a mapping of names to tensors, or pairs")
    for item in side:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise InputError(f"{what} has an item of type {type(item).__name__}", "pairs (name, tensor), or a mapping")
        name, value = item
        if not isinstance(name, str):
            raise InputError(f"{what} has an item named {str(name)[:60]!r} of type {type(name).__name__}", "names that are text")
        if name in out:
            raise KeyCollision(f"{what} has {name!r} twice", "one tensor a name", "give each rank's shard a name of its own")
        out[name] = value
    return out


@dataclasses.dataclass
class Options:
    """How :func:`compare` judges: the tier, what is added to each place, and who explains a bad tensor."""

    tier: str | float = "exact"
    place: Place = dataclasses.field(default_factory=Place)
    explain: Callable[[str, Any, Any], list[Cause]] | None = None
    locate: Callable[[str, Place], Place] | None = None
    unit: str = "tensors"


def compare(a: Named, b: Named, name: str, order: Sequence[str] | None = None, options: Options | None = None) -> Verdict:
    """One verdict for two sets; ``info["tensors"]`` holds name -> status, elements compared/total, differing.

    ``order`` is the order of causation; by default the order of ``a`` if it is a plain dict or pairs, else by name.
    """
    opt = options or Options()
    left, right = as_mapping(a, "side a"), as_mapping(b, "side b")
    names = list(order) if order is not None else list(left)
    names += [n for n in left if n not in set(names)] if order is not None else []
    known = set(names)
    names += [n for n in right if n not in known]
    if getattr(left, "unordered", False) and order is None:
        names = causal_order(names)
    faults: list[tuple[Status, Place, str]] = []
    table: dict[str, dict[str, Any]] = {}
    elements, tensors, causes = [0, 0], 0, []
    stats: dict[str, Any] = {"differing": 0, "max_abs": 0.0}
    for n in names:
        place = merged(place_of(n), opt.place)
        if n not in left or n not in right:
            side = "a" if n not in left else "b"
            present = as_source((right if side == "a" else left)[n], n) if n in left or n in right else None
            elements[1] += 0 if present is None else present.size
            table[n] = {"status": "INVALID", "compared": 0, "total": 0 if present is None else present.size}
            place = opt.locate(n, place) if opt.locate else place
            faults.append((Status.INVALID, place, f"{n} is missing on side {side if present is not None else 'a and b'}"))
            if len(faults) == 1 and present is not None:
                causes = exchanged.missing(n, left, right, side)
            continue
        result = bits.compare(left[n], right[n], n, opt.tier)
        row = {"status": result.status.value, "compared": result.compared, "total": result.total,
               "differing": result.differing, "max_abs": result.max_abs}  # fmt: skip
        table[n] = row
        elements[0] += result.compared
        elements[1] += result.total
        tensors += result.compared == result.total
        stats["differing"] += result.over
        stats["max_abs"] = max(stats["max_abs"], result.max_abs)
        if result.status is Status.PASS:
            continue
        if result.status is Status.NOT_RUN:  # both sides have no element: equal, and no evidence
            row["status"] = "PASS"
            continue
        found = bits.verdict_of(result, place).first_bad or place
        if found.index and stacked_experts(n, result.shapes[0]):
            found = dataclasses.replace(found, expert=found.index[0])
        found = opt.locate(n, found) if opt.locate else found
        faults.append((result.status, found, f"{n}: {result.reason}"))
        if len(faults) == 1 and opt.explain is not None:  # what differs behind it is a consequence
            causes = opt.explain(n, left[n], right[n])
            if not causes or causes[0].residual != 0.0:
                causes = exchanged.causes(n, left, right) or causes
    status = worst(f[0] for f in faults) if faults else Status.PASS if elements[0] else Status.NOT_RUN
    stats["tensors_bad"] = len(faults)
    return Verdict(
        name, status, reason=faults[0][2] if faults else "" if elements[0] else "no tensor to compare",
        tier=bits.tier_name(opt.tier),
        coverage={opt.unit: Coverage(tensors, len(names)), "elements": Coverage(*elements)} if names else {},
        first_bad=faults[0][1] if faults else None, causes=causes, downstream=[f[1] for f in faults[1:]], stats=stats,
        info={"tensors": table},
    )  # fmt: skip


def scale_of(name: str, side: Mapping[str, Any]) -> Any:
    """The scale that lies beside a tensor in the same set of tensors, or None."""
    stem = name.rpartition(".")[0]
    for n in (f"{name}_scale", f"{name}_scale_inv", f"{name}.scale", f"{stem}.scale", f"{stem}_scale", f"{stem}.output_scale", f"{stem}.weight_scale"):
        if n in side and n != name:
            return side[n]
    return None


def merged(place: Place, extra: Place) -> Place:
    """``place`` with the fields that ``extra`` sets and it does not."""
    values = {f.name: getattr(extra, f.name) for f in dataclasses.fields(Place)}
    return dataclasses.replace(place, **{k: v for k, v in values.items() if v is not None and getattr(place, k) is None})


def in_order(name: str, children: Sequence[Verdict], **kwargs: Any) -> Verdict:
    """Like :func:`alignment.verdict.combine`, for steps of which each is the input of the next: the place and the
    cause are those of the first child that is not green, also where a later one is worse."""
    out = combine(name, children, **kwargs)
    bad = [c for c in children if c.status is not Status.PASS]
    lead = next((c for c in bad if c.first_bad is not None), bad[0] if bad else None)
    if lead is not None:
        out.first_bad, out.causes = lead.first_bad, list(lead.causes)
        out.reason = f"{lead.name}: {lead.reason}" if lead.reason else lead.name
        places = [p for c in bad for p in ([c.first_bad] if c is not lead and c.first_bad else []) + c.downstream]
        out.downstream = places
    return out
