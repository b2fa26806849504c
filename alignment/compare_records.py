"""Records of two runs, or of the two sides of one run, compared: facts, ranks, weights, layers, log-probs.

The sides may be parallel in different ways. Rows that carry tokens are matched by request, position and token,
whichever rank wrote them; tensors that carry none are matched by name, and by rank where ranks hold different shards.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from alignment import bits, fingerprints, layers, logprobs, mapping, match, weights
from alignment.digest import digest
from alignment.errors import KeyCollision
from alignment.places import by_layer, place_of
from alignment.records import Entry, RecordReader, rank_name
from alignment.verdict import Coverage, Place, Status, Verdict


def judge(a: RecordReader, b: RecordReader, *, name: str = "records", tier: str | float = "exact") -> Verdict:
    """One verdict with a child for each thing both sides recorded, in the order of causation.

    Raises KeyCollision if two ranks of one side recorded different values under one key.
    """
    sides = [list(r) for r in (a, b)]
    children = [*_facts(a, b, name), *_ranks(a, b, name)]
    steps = sorted(dict.fromkeys(e.step for side in sides for e in side), key=lambda s: (s is not None, s or 0))
    held = [{_label(e): e.value for e in sides[0] if e.step == s and e.kind in _STORED} for s in steps]
    for at, step in enumerate(steps):
        left, right = ([e for e in side if e.step == step] for side in sides)
        place = Place(step=step)
        versions = {at - i: table for i, table in enumerate(held) if i != at and abs(at - i) <= 8 and table}
        children += _stored(left, right, name, tier, place, versions)
        children += _layers(left, right, name, tier, place)
        children += _logprobs(left, right, name, tier, place)
    if not any(len(s) for s in sides):
        return Verdict(name, Status.NOT_RUN, "neither side recorded anything", tier=str(tier))
    out = mapping.in_order(name, children, tier=bits.tier_name(tier))
    worst = max((c.stats.get("max_abs", 0.0) for c in children), default=0.0)
    out.stats = {"differing": sum(c.stats.get("differing", 0) for c in children), "max_abs": worst}
    return out


def _facts(a: RecordReader, b: RecordReader, name: str) -> list[Verdict]:
    """Contract, kernels and fingerprints that both sides state, compared between all ranks that state them (a rank may run other ops)."""
    sides = {}
    for label, reader in (("a", a), ("b", b)):
        for rank, head in reader.heads.items():
            facts = {"kernels": head.get("kernels") or {}, "fingerprints": head.get("fingerprints") or {}}
            if head.get("contract"):
                facts["contract"] = head["contract"]
            sides[f"side {label} {rank}"] = fingerprints.flat(facts)
    stated = [{f for s, facts in sides.items() if s.startswith(f"side {label} ") for f in facts} for label in "ab"]
    groups: dict[tuple[str, ...], list[str]] = {}  # the facts by who states them
    for fact in sorted(stated[0] & stated[1]):
        groups.setdefault(tuple(s for s, facts in sides.items() if fact in facts), []).append(fact)
    out = []
    for ranks, facts in groups.items():
        if len(ranks) == len(sides) or any(sides[s][f] is not None for s in ranks for f in facts):
            table = {s: {f: v for f, v in sides[s].items() if f in facts} for s in ranks}
            out.append(fingerprints.judge(table, what="config", name=f"{name}.facts", side="side"))
    return out


def _ranks(a: RecordReader, b: RecordReader, name: str) -> list[Verdict]:
    out = []
    for label, reader in (("a", a), ("b", b)):
        found = len(reader.heads)
        if found != reader.world:
            out.append(Verdict(f"{name}.ranks", Status.INVALID, f"side {label} has records of {found} of {reader.world} ranks",
                               coverage={"ranks": Coverage(found, reader.world)}, first_bad=Place(run=f"side {label}")))  # fmt: skip
    return out


_STORED = ("weight", "buffer")


def _stored(left: list[Entry], right: list[Entry], name: str, tier: Any, place: Place, versions: dict[int, Any]) -> list[Verdict]:
    """Weights, buffers, and whatever has no token to a row. ``versions``: weights of other steps of side a, to tell stale ones."""
    out = []
    for kinds, judge_kind in ((_STORED, weights.judge), (("layer", "routing", "logits", "other", "logprobs"), layers.judge)):
        # Weights are no rows of tokens, whatever was recorded with them: what no one compares would be silent.
        picked = [[e for e in side if e.kind in kinds and (e.tokens is None or kinds is _STORED)] for side in (left, right)]
        if not any(picked):
            continue
        tables = _by_name(picked)
        what = "weights" if judge_kind is weights.judge else "tensors"
        extra: dict[str, Any] = {"previous": versions} if judge_kind is weights.judge else {}
        extra["order"] = by_layer(dict.fromkeys([*tables[0], *tables[1]]))
        out.append(judge_kind(*tables, name=f"{name}.{what}{_at(place)}", tier=tier, place=place, **extra))
    return out


def _at(place: Place) -> str:
    return "" if place.step is None else f"[step {place.step}]"


def _by_name(sides: list[list[Entry]]) -> list[dict[str, Any]]:
    """Names to tensors; a name that ranks hold with different content (shards) carries the rank, on both sides."""
    sharded = set()
    for side in sides:
        held: dict[str, Any] = {}
        for e in side:
            key = _label(e)
            if key in held and not bits.is_equal(held[key], e.value):
                sharded.add(key)
            held.setdefault(key, e.value)
    return [{(f"{_label(e)} [{rank_name(e.rank)}]" if _label(e) in sharded else _label(e)): e.value for e in side} for side in sides]


def _label(e: Entry) -> str:
    return e.name if e.request is None else f"{e.name} (request {e.request})"


def _layers(left: list[Entry], right: list[Entry], name: str, tier: Any, place: Place) -> list[Verdict]:
    kinds = ("layer", "routing", "logits", "other")
    picked = [[e for e in side if e.kind in kinds and e.tokens is not None] for side in (left, right)]
    requests = list(dict.fromkeys(e.request for side in picked for e in side))
    out = []
    longest = max((p for side in picked for e in side for p in e.positions or ()), default=0)
    for request in requests:
        merged = [_merge(e for e in side if e.request == request) for side in picked]
        names = list(merged[0])
        pairs: dict[str, match.Pair] = {}
        gate = None
        for n in names:
            if n in merged[1]:
                matched, verdict = match.match([merged[0][n]], [merged[1][n]], f"{name}.tokens")
                if verdict.status is not Status.PASS:
                    gate = verdict
                    extra = mapping.merged(place, place_of(n))
                    gate.first_bad = mapping.merged(gate.first_bad or Place(), extra)
                    break
                pairs[n] = matched[0]
        title = f"{name}.layers[{request}]{_at(place)}"
        if gate is not None:
            out.append(logprobs.blocked(gate, title))
            continue
        a = {n: t.values for n, t in merged[0].items()}
        b = {n: t.values if n not in pairs or pairs[n].order_b is None else t.values[list(pairs[n].order_b)] for n, t in merged[1].items()}
        out.append(layers.judge(
            a, b, name=title, tier=tier, place=mapping.merged(place, Place(request=request)), request=request,
            order=by_layer(dict.fromkeys([*a, *b])), min_position=0 if longest else 1,
            tokens={n: torch.tensor(t.tokens) for n, t in merged[0].items()},
            positions={n: torch.tensor(t.positions) for n, t in merged[0].items()},
        ))  # fmt: skip
    return out


def _logprobs(left: list[Entry], right: list[Entry], name: str, tier: Any, place: Place) -> list[Verdict]:
    picked = [[e for e in side if e.kind == "logprobs" and e.tokens is not None] for side in (left, right)]
    out = []
    for n in dict.fromkeys(e.name for side in picked for e in side):
        sides = []
        for side in picked:
            requests = dict.fromkeys(e.request for e in side if e.name == n)
            sides.append({r: _merge(e for e in side if e.name == n and e.request == r)[n] for r in requests})  # {}: no request, no token
        verdict = logprobs.judge(*sides, name=f"{name}.{n}{_at(place)}", tier=tier)
        if verdict.first_bad is not None:
            verdict.first_bad = mapping.merged(verdict.first_bad, place)
        out.append(verdict)
    return out


def _merge(entries: Iterable[Entry]) -> dict[str, match.Tokens]:
    """Rows of one request by name, from all ranks that hold some (context parallel) or the same (tensor parallel)."""
    found: dict[str, dict[int, tuple[int, Any, Entry]]] = {}
    for e in entries:
        value = e.value.tensor() if hasattr(e.value, "tensor") else e.value
        rows = found.setdefault(e.name, {})
        for i, (token, position) in enumerate(zip(e.tokens or (), e.positions or (), strict=True)):
            old = rows.get(position)
            if old is None:
                rows[position] = (token, value[i], e)
            elif old[0] != token or not _same_row(old[1], value[i]):
                fault = KeyCollision(
                    f"{e.name}, request {e.request}, position {position}: ranks {rank_name(old[2].rank)} and "
                    f"{rank_name(e.rank)} recorded different {'tokens' if old[0] != token else 'values'}", "one value a key",
                    "replicas of one rank group disagree: compare the ranks of this side with each other first")  # fmt: skip
                fault.place = mapping.merged(place_of(e.name, rank=e.rank), Place(step=e.step, request=e.request, position=position,
                                                                                  token=token))  # fmt: skip
                raise fault
    out = {}
    for name, rows in found.items():
        order = sorted(rows)
        values = torch.stack([rows[p][1] for p in order]) if order else torch.empty(0)
        request = next(iter(rows.values()))[2].request if rows else None
        out[name] = match.Tokens(str(request), tuple(rows[p][0] for p in order), tuple(order), values)
    return out


def _same_row(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.dtype == y.dtype and digest(x) == digest(y)
