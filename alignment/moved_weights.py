"""What became of weights that are not what they should be: moved or lost experts, padding that stayed, a version before."""
from __future__ import annotations

import dataclasses
import re
from typing import Any

from alignment import diagnose, mapping
from alignment.places import expert_of
from alignment.sources import as_source
from alignment.verdict import Cause, Verdict


def explain(tensor: str, x: Any, y: Any, left: Any, right: Any, old: Any, tp: int | None) -> list[Cause]:
    """Why weight ``tensor`` is ``y`` and not ``x``; ``left`` and ``right`` are all of both sides, ``old`` its versions before."""
    group = _expert_group(tensor, left, right)
    if group is not None:
        stale = diagnose.tensor(x, y, tensor, previous=old, weights=True) if old is not None else []
        if stale and stale[0].kind == "stale":
            return stale
        found = diagnose.experts(*group)
        if found is not None:
            return [found]
    if "expert" in tensor:  # all experts in one tensor, one row each
        sx, sy = as_source(x, tensor), as_source(y, tensor)
        if sx.shape == sy.shape and len(sx.shape) >= 3 and 2 <= sx.shape[0] <= 1024 and sx.nbytes <= 1 << 28:
            tx, ty = sx.tensor(), sy.tensor()
            found = diagnose.experts(dict(enumerate(tx)), dict(enumerate(ty)))
            if found is not None:
                return [found]
    return diagnose.tensor(x, y, tensor, previous=old, tp=tp, weights=True, scale=mapping.scale_of(tensor, left))


def _pattern(name: str) -> str:
    e = expert_of(name)
    return name if e is None else re.sub(rf"(experts?\.){e}(\.|$)|(weight|bias){e}$", r"\1\3*\2", name)


def _expert_group(tensor: str, left: Any, right: Any) -> tuple[dict[int, Any], dict[int, Any]] | None:
    """The same tensor of every expert of that layer, on both sides."""
    if expert_of(tensor) is None:
        return None
    want = _pattern(tensor)
    sides = [{e: side[n] for n in side if (e := expert_of(n)) is not None and _pattern(n) == want} for side in (left, right)]
    return (sides[0], sides[1]) if len(sides[0]) > 1 else None


def expert_table(left: Any, right: Any, verdict: Verdict) -> list[dict[str, Any]]:
    """One row for each kind of expert tensor that has a bad one: where the content of each expert came from."""
    out, seen = [], set()
    for name, row in verdict.info["tensors"].items():
        if row["status"] == "PASS" or expert_of(name) is None or _pattern(name) in seen:
            continue
        seen.add(_pattern(name))
        group = _expert_group(name, left, right)
        found = diagnose.experts(*group) if group else None
        if found is not None:
            out.append({"tensor": _pattern(name), "kind": found.kind, "text": found.text, **found.evidence})
    return out


def name_padding_rank(verdict: Verdict) -> None:
    """Add the rank and the stage that kept padding rows to the place of a verdict."""
    for cause in verdict.causes:
        ranks = cause.evidence.get("tp_ranks")
        if cause.kind != "padded_vocabulary" or verdict.first_bad is None:
            continue
        rank = {**(verdict.first_bad.rank or {}), "tp": ranks[0]} if ranks else verdict.first_bad.rank
        stage = verdict.first_bad.stage or "export (un-pad)"
        verdict.first_bad = dataclasses.replace(verdict.first_bad, rank=rank, stage=stage)
