"""Weights of one side, or of one stage of their way, against what they should be.

Two sets of weights can be equal tensor by tensor and still be wrong (a round trip undoes its own mistake), and can be
right tensor by tensor and still be incomplete (a buffer no list names, a path that was never used). So there is one
function for each question:

    judge(a, b)                      are these two sets equal, names, dtypes and shapes included
    judge_stages(stages)             at which stage of load, gather, convert, send did they become wrong
    judge_shards(full, shards)       does each rank hold the right rows, not just all ranks together
    judge_slots, judge_qkv           is each head in its slot
    judge_update(before, after)      did a warm update change what it should and nothing else, buffers included
    judge_received(expected, ...)    was every tensor received or knowingly retained
    judge_paths(paths, expected)     did every transport update every tensor
    judge_checkpoint(saved, loaded)  did loading keep dtypes and bits
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from alignment import bits, mapping, moved_weights
from alignment.errors import InputError, KeyCollision
from alignment.places import expert_of, place_of, rank_dict
from alignment.shards import judge_qkv, judge_shards, judge_slots, split_components, split_qkv
from alignment.sources import as_source
from alignment.verdict import Cause, Coverage, Place, Status, Verdict

__all__ = [
    "judge", "judge_checkpoint", "judge_paths", "judge_qkv", "judge_received", "judge_shards", "judge_slots",
    "judge_stages", "judge_update", "snapshot", "split_components", "split_qkv",
]  # fmt: skip


def snapshot(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter and **every** buffer, the non-persistent ones that state_dict() leaves out included."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named}


def judge(
    a: mapping.Named,
    b: mapping.Named,
    *,
    name: str = "weights",
    tier: str | float = "exact",
    previous: Mapping[str, Any] | Sequence[Mapping[str, Any]] | Mapping[int, Mapping[str, Any]] | None = None,
    tied: Iterable[Sequence[str]] = (),
    tp: int | None = None,
    ep: int | None = None,
    stage: str | None = None,
    place: Place | None = None,
    owners: Mapping[str, Mapping[str, int]] | None = None,
    order: Sequence[str] | None = None,
) -> Verdict:
    """Compare two sets of weights; ``a`` is what is expected.

    Args:
        previous: the version before, to recognise tensors that were not updated (bitwise equal to it); or a list of
            versions, the newest first; or a dict of them by the number of updates before (negative: later ones).
        tied: groups of names that are one tensor: a side may carry any of them; where it carries several they must
            be equal.
        tp: tensor-parallel size, to name the rank that holds padding rows. ep: expert-parallel size, to name the
            rank that owns an expert. owners: name -> parallel rank, where it is known per tensor.
        stage: of which stage of a conversion this is, for the place.
    Returns:
        a Verdict; ``info["tensors"]`` has elements compared of how many for every tensor, ``info["experts"]`` what
        became of the experts where content was moved, copied or lost.
    """
    left, right = mapping.as_mapping(a, "side a"), mapping.as_mapping(b, "side b")
    left, right, broken = _untie(left, right, tied)
    count = 1 + max((e for e in map(expert_of, left) if e is not None), default=-1)
    base = dataclasses.replace(place or Place(), stage=stage or (place.stage if place else None))

    def locate(tensor: str, found: Place) -> Place:
        if owners is not None and tensor in owners:
            return dataclasses.replace(found, rank=dict(owners[tensor]))
        if ep and found.expert is not None and count and count % ep == 0:
            return dataclasses.replace(found, rank={"ep": found.expert // (count // ep)})
        return found

    held = _history(previous)

    def explain(tensor: str, x: Any, y: Any) -> list[Cause]:
        return moved_weights.explain(tensor, x, y, left, right, {k: v[tensor] for k, v in held.items() if tensor in v} or None, tp)

    verdict = mapping.compare(left, right, name, order, mapping.Options(tier, base, explain, locate))
    if verdict.status in (Status.FAIL, Status.INVALID):
        moved_weights.name_padding_rank(verdict)
        moved = moved_weights.expert_table(left, right, verdict)
        if moved:
            verdict.info["experts"] = moved
        if held:
            stale = [n for n, row in verdict.info["tensors"].items() if row["status"] == "FAIL"
                     and any(k > 0 and n in v and bits.is_equal(v[n], right[n]) for k, v in held.items())]  # fmt: skip
            if stale:
                verdict.info["stale"] = stale
    if broken:
        broken_verdict = Verdict(f"{name}.tied", Status.FAIL, broken[1], coverage={"tied": Coverage(1, 1)},
                                 first_bad=mapping.merged(place_of(broken[0]), base))  # fmt: skip
        return mapping.in_order(name, [broken_verdict, verdict], info=verdict.info)
    return verdict


def _history(previous: Any) -> dict[int, Mapping[str, Any]]:
    """Versions by the number of updates before the expected one."""
    if previous is None:
        return {}
    if isinstance(previous, Mapping) and previous and all(isinstance(k, int) for k in previous):
        return dict(previous)
    if isinstance(previous, Mapping):
        return {1: previous} if previous else {}
    if not isinstance(previous, Sequence) or not all(isinstance(v, Mapping) for v in previous):
        raise InputError(f"previous versions of type {type(previous).__name__}", "names to tensors, a list of such, or a dict of such by updates")
    return dict(enumerate(previous, 1))


def _untie(left: Any, right: Any, tied: Iterable[Sequence[str]]) -> tuple[Any, Any, tuple[str, str] | None]:
    broken = None
    groups = [list(g) for g in tied]
    if not groups:
        return left, right, None
    sides = [{n: side[n] for n in side} for side in (left, right)]
    for group in groups:
        if not any(n in left or n in right for n in group):
            raise InputError(f"tied names {group}, of which neither side has one", "names of tensors", "correct the names: this tie would never be checked")
        for label, side in zip("ab", sides, strict=True):
            have = [n for n in group if n in side]
            for other in have[1:]:
                if not bits.is_equal(side[have[0]], side[other]) and broken is None:
                    # The member that also differs from the other side is the one that came loose.
                    loose = next((n for n in have if label == "b" and n in left and not bits.is_equal(left[n], side[n])), other)
                    broken = (loose, f"{have[0]} and {other} are tied and differ on side {label}")
        kept = next((n for n in group if n in sides[0] and n in sides[1]), None)
        for side in sides:
            first = next((n for n in group if n in side), None)
            if first is None:
                continue
            target = kept or group[0]
            value = side.get(target, side[first])
            for n in group:
                side.pop(n, None)
            side[target] = value
    return sides[0], sides[1], broken


def judge_stages(
    stages: Mapping[str, Any],
    truth: Mapping[str, Any] | None = None,
    *,
    name: str = "weights.stages",
    **kwargs: Any,
) -> Verdict:
    """Follow weights through the stages of their way, first to last, and name the first at which they are wrong.

    Args:
        stages: stage -> weights. Weights are {name: tensor}, or {rank: {name: tensor}} for shards held by ranks.
        truth: stage -> what the weights of that stage should be, computed independently of the code under test.
            A stage without an entry is compared with the first stage, which is the source.
        kwargs: as for :func:`judge` (ep, tp, owners, tied ...).
    A stage is never judged by a later one: a round trip can undo its own mistake, and if it does the verdict says so.
    """
    unknown = [s for s in truth or {} if s not in stages]
    if unknown:
        raise InputError(f"a truth for stage {unknown[0]!r}", "a stage that was recorded: " + ", ".join(map(str, stages)))
    if not stages or (len(stages) == 1 and not truth):
        return Verdict(name, Status.NOT_RUN, "no stage was recorded" if not stages else
                       f"only stage {next(iter(stages))} was recorded: nothing to compare it with", coverage={"stages": Coverage(0, 2)})
    flat: dict[str, tuple[Mapping[str, Any], dict[str, dict[str, int]]]] = {}
    for s, w in stages.items():
        try:
            flat[s] = _by_name(w, s)
        except KeyCollision as e:
            cause = Cause("duplicate", "two ranks hold different content under one name: one would overwrite the other")
            return Verdict(name, Status.INVALID, str(e), coverage={"stages": Coverage(len(flat), len(stages))}, first_bad=e.place,
                           causes=[cause])  # fmt: skip
    first = next(iter(flat))
    source = flat[first][0]
    children = []
    for stage, (content, owners) in flat.items():
        want = source
        if truth is not None and stage in truth:
            want = _by_name(truth[stage], stage)[0]
        extra = {**kwargs, "owners": {**owners, **(kwargs.get("owners") or {})} or None}
        children.append(judge(want, content, name=stage, stage=stage, **extra))
    out = mapping.in_order(name, children)
    bad = [c.name for c in children if c.status is not Status.PASS]
    out.coverage["stages"] = Coverage(sum(c.status is not Status.NOT_RUN for c in children), len(children))
    out.info["stages"] = {c.name: ("PASS" if c.status is Status.PASS else c.status.value if c.name == bad[0] else "downstream")
                          for c in children}  # fmt: skip
    last = list(flat)[-1]
    if bad and last not in bad and last != bad[0]:
        out.info["round_trip"] = f"{last} equals the source although {bad[0]} is wrong: a round trip does not see this fault"
    lead = next((c for c in children if c.status is not Status.PASS), None)
    if lead is not None and "experts" in lead.info:
        out.info["experts"] = lead.info["experts"]
    return out


def _by_name(content: Any, stage: str) -> tuple[Mapping[str, Any], dict[str, dict[str, int]]]:
    """{rank: {name: tensor}} as one mapping and the owner of each name; replicas must be equal bit by bit."""
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Mapping) for v in content.values()):
        return mapping.as_mapping(content, f"stage {stage}"), {}
    out: dict[str, Any] = {}
    owners: dict[str, dict[str, int]] = {}
    for rank, shard in content.items():
        for n, tensor in shard.items():
            if n in out and not bits.is_equal(out[n], tensor):
                fault = KeyCollision(f"stage {stage}: ranks {owners[n]} and {rank_dict(rank)} hold different {n}",
                                     "one content a name", "give local expert ids and slices global names, or use judge_shards")
                fault.place = place_of(n, stage=stage, rank=rank_dict(rank))
                raise fault
            out.setdefault(n, tensor)
            owners.setdefault(n, rank_dict(rank))
    return out, owners


def judge_update(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    expected: Mapping[str, Any] | None = None,
    *,
    update: int | None = None,
    name: str = "weights.update",
) -> Verdict:
    """A warm update: everything in ``expected`` has its new bits, and everything else (every buffer!) is untouched.

    ``before`` and ``after`` come from :func:`snapshot`. An update that changes no weight is NOT_RUN: it shows nothing.
    """
    new = dict(expected or {})
    unknown = [n for n in new if n not in before and n not in after]
    want = {**before, **{n: v for n, v in new.items() if n not in unknown}}
    place = Place(step=update)
    out = judge(want, after, name=name, previous=before, place=place)
    if unknown:
        fault = Verdict(name, Status.INVALID, f"{unknown[0]} was sent and is neither a parameter nor a buffer here",
                        coverage={"tensors": Coverage(0, len(unknown))}, first_bad=mapping.merged(place_of(unknown[0]), place))  # fmt: skip
        return mapping.in_order(name, [fault, out], info=out.info)
    if out.status is Status.FAIL and out.first_bad is not None:
        bad = out.first_bad.tensor or ""
        if bad not in new and bad in before:
            was, now = (as_source(side[bad], bad) for side in (before, after))
            change = f"{_value(was)} → {_value(now)}" if was.size == now.size == 1 else f"{out.stats['differing']} elements"
            text = f"{bad} was not part of the update and changed: {change} (reset or reallocated by the reload)"
            out.causes = [Cause("buffer_reset", text, 0.0, {"tensor": bad})]
    if out.status is Status.PASS and all(n in before and bits.is_equal(before[n], v) for n, v in new.items()):
        return Verdict(name, Status.NOT_RUN, "the update changed no weight: it shows nothing", coverage=dict(out.coverage))
    return out


def _value(source: Any) -> str:
    return f"{float(source.tensor().double().flatten()[0]):.6g}"


def judge_received(
    expected: Iterable[str] | Mapping[str, Any],
    received: Iterable[str] | Mapping[str, Any],
    retained: Iterable[str] = (),
    state: Mapping[str, Any] | None = None,
    *,
    name: str = "weights.received",
) -> Verdict:
    """Before any forward pass: every tensor the receiver needs was received, or is knowingly retained.

    Args:
        expected: every parameter and buffer the receiver uses (scales included), or a mapping of them to what they
            should hold. received: what the update carried. retained: what it deliberately left as it was.
        state: what the receiver holds now: must be finite, and equal to ``expected`` where that has content.
    A finite default (a scale of 1.0) fails like an uninitialised one: nobody sent it.
    """
    if any(isinstance(x, str) for x in (expected, received, retained)):
        raise InputError("a name where names are asked for", "a list of names, or a mapping")
    names, listed = list(expected), list(received)
    twice = sorted({n for n in listed if listed.count(n) > 1}) if len(listed) != len(set(listed)) else []
    got, kept = set(received), set(retained)
    lost = [n for n in names if n not in got and n not in kept]
    extra = sorted(n for n in got if n not in set(names))
    children = []
    text = f"{lost[0]} neither received nor retained" + (f" ({len(lost)} such)" if len(lost) > 1 else "") if lost else ""
    if not lost and extra:
        text = f"{extra[0]} was received and is not known here"
    if not lost and not extra and twice:
        text = f"{twice[0]} was received twice: one copy overwrote the other"
    if not text and not got and kept:
        text = "nothing was received: an update that carries nothing shows nothing"
    bad = lost or extra or twice
    status = Status.FAIL if lost else Status.INVALID if bad else Status.NOT_RUN if text else Status.PASS
    children.append(Verdict(
        f"{name}.coverage", status, text, coverage={"tensors": Coverage(len(names) - len(lost), len(names))} if names else {},
        first_bad=place_of(bad[0]) if bad else None, downstream=[place_of(n) for n in bad[1:]],
        causes=[Cause("not_received", f"the update carries {len(got)} tensor(s) and not {lost[0]}", 0.0, {"lost": lost})] if lost else [],
        info={"received": len(got), "retained": len(kept), "neither": lost},
    ))  # fmt: skip
    if state is not None:
        held = {n: state[n] for n in names if n in state}
        want = expected if isinstance(expected, Mapping) else held  # compared with itself: is it finite
        children.append(judge(want, held, name=f"{name}.state", order=names))
    return mapping.in_order(name, children) if len(children) > 1 else children[0]


def judge_paths(
    paths: Mapping[str, Mapping[str, Any] | None],
    expected: Mapping[str, Any],
    previous: Mapping[str, Any] | Sequence[Mapping[str, Any]] | Mapping[int, Mapping[str, Any]] | None = None,
    *,
    required: Iterable[str] = (),
    name: str = "weights.paths",
) -> Verdict:
    """Each transport (ipc, nccl, disk ...) against the new version, every tensor of every model of the receiver
    (draft and target). A required path that was not used is NOT_RUN; ``info["paths"]`` lists each with its coverage."""
    children = []
    for path in [*paths, *(p for p in required if p not in paths)]:
        held = paths.get(path)
        if held is None:
            children.append(Verdict(path, Status.NOT_RUN, f"path {path} was not used", coverage={"tensors": Coverage(0, len(expected))}))
            continue
        children.append(judge(expected, held, name=path, previous=previous, place=Place(run=path)))
    out = mapping.in_order(name, children)
    out.info["paths"] = {c.name: {"verdict": c.status.value, **{u: str(x) for u, x in c.coverage.items()}} for c in children}
    before = _history(previous).get(1)
    changed = before is None or any(n not in before or not bits.is_equal(before[n], v) for n, v in expected.items())
    if out.status is Status.PASS and not changed:
        return Verdict(name, Status.NOT_RUN, "the new version equals the old one: an update that changes nothing shows nothing",
                       coverage=dict(out.coverage), info=out.info)  # fmt: skip
    return out


def judge_checkpoint(saved: mapping.Named, loaded: mapping.Named, *, name: str = "weights.checkpoint", **kwargs: Any) -> Verdict:
    """What was saved against what was loaded, before anything converts it: a silent cast to the dtype of the template
    is a dtype difference at stage "checkpoint load"."""
    return judge(saved, loaded, name=name, stage="checkpoint load", **kwargs)
