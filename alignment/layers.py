"""What each module of a model put out on one side against the other, in the order of the forward pass.

The first module whose output differs although its input is equal holds the fault; everything behind it differs as a
consequence and is listed as downstream, not as news.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from alignment import bits, diagnose, mapping, match
from alignment.diagnose.waves import wave_of
from alignment.errors import InputError
from alignment.places import layer_of
from alignment.sources import as_source, as_tensor
from alignment.verdict import Cause, Coverage, Place, Status, Verdict, combine

#: Positions below which a rotary embedding at 1-token prompts looks right whatever it does.
LONG_ENOUGH = 1024
#: Parts of the names of chosen ids.
_CHOSEN = ("topk", "top_k", "top1", "top2", "top4", "top6", "top8", "ids", "indices", "index", "experts", "argmax", "selected", "chosen")
#: Ends of the names of ids that nobody chose among: their order is content.
_GIVEN = ("token_ids", "input_ids", "position_ids", "request_ids", "sequence_ids")
#: Elements of an operand that is read to explain a product: more would take gigabytes.
_OPERAND = 1 << 26


def judge(
    a: mapping.Named,
    b: mapping.Named,
    *,
    name: str = "layers",
    tier: str | float = "exact",
    order: Sequence[str] | None = None,
    tokens: Any = None,
    tokens_a: Any = None,
    tokens_b: Any = None,
    positions: Any = None,
    request: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    weights: Mapping[str, Any] | None = None,
    scores: Mapping[str, Any] | None = None,
    place: Place | None = None,
    min_position: int = 1,
) -> Verdict:
    """Compare module outputs by name, first to last.

    Args:
        a, b: name -> output, rows are tokens ([T, ...]); in the order of the forward pass, or pairs (name, output).
            Names such as ``layers.3.mlp.output``, ``layers.3.router.topk_ids``, ``lm_head.output``.
        order: the names in the order of the forward pass, where the mappings are not in it.
        tokens, positions, request: what each row is [T] (or {name: [T]} where modules have different rows), to say
            which token differs first. ``tokens_a`` and
            ``tokens_b`` where each side has its own: token identity is judged first and blocks the rest.
        inputs: name -> input of that module (equal on both sides), for diagnoses of a norm, projection or rotary.
        weights: name -> weight of that module [N, K], for the diagnosis of a transposed one.
        scores: name -> what a selection (``...topk_ids``) was made from, in full precision; by default the tensor
            of the same module named ``logits`` or ``scores``.
        min_position: positions must reach this far, or the comparison is NOT_RUN: a rotary embedding is the identity
            at position 0. Checked where ``positions`` are given.
    """
    if tokens_a is not None or tokens_b is not None:
        gate = match.judge(tokens_a if tokens_a is not None else [], tokens_b if tokens_b is not None else [], f"{name}.tokens")
        if gate.status is not Status.PASS:
            behind = Verdict(name, Status.NOT_RUN, f"blocked: {gate.name} is {gate.status}", coverage={"layers": Coverage(0, 1)})
            return combine(name, [gate, behind])
        tokens = tokens_a
    left, right = mapping.as_mapping(a, "side a"), mapping.as_mapping(b, "side b")
    ids, at = _rows_of(tokens, "tokens"), _rows_of(positions, "positions")
    for key, values in (("token", tokens), ("position", positions)):
        if values is not None and not isinstance(values, Mapping):
            _fit(key, as_tensor(values, f"{key}s").numel(), left)

    def locate(tensor: str, found: Place) -> Place:
        if not found.index:
            return found
        row = found.index[0]
        rows = (left[tensor] if tensor in left else right[tensor])
        count = as_source(rows, tensor).shape[0]
        extra: dict[str, Any] = {"row": row, "request": request}
        for key, values in (("token", ids(tensor)), ("position", at(tensor))):
            if values is not None:
                if len(values) != count and tensor.rpartition(".")[2] not in ("cos", "sin", "inv_freq"):
                    raise InputError(f"{len(values)} {key}s for {count} rows of {tensor}", "one a row")
                extra[key] = values[row] if row < len(values) else None
        return dataclasses.replace(found, **{k: v for k, v in extra.items() if v is not None})

    def explain(tensor: str, x: Any, y: Any) -> list[Cause]:
        known = [_beside(tensor, leaf, left, right) for leaf in ("input", "weight")]
        return _explain(tensor, x, y, left, right, {**known[0], **(inputs or {})}, {**known[1], **(weights or {})}, scores or {}, positions)

    options = mapping.Options(tier, place or Place(), explain, locate, "layers")
    if isinstance(positions, Mapping) and positions and not any(n in left or n in right for n in positions):
        raise InputError(f"positions of {', '.join(map(str, list(positions)[:3]))}", "positions of outputs that are there: others prove nothing about these")
    verdict = mapping.compare(left, right, name, order, options)
    _probe(verdict, positions, min_position)
    return verdict


def _beside(tensor: str, leaf: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """What was recorded of the same module under another leaf, where it is equal on both sides: {tensor: value} or {}."""
    near = f"{tensor.rpartition('.')[0]}.{leaf}"
    if near == tensor or near not in left or near not in right or as_source(left[near], near).size > _OPERAND:
        return {}
    return {tensor: left[near]} if bits.is_equal(left[near], right[near]) else {}


def _fit(key: str, count: int, outputs: Mapping[str, Any]) -> None:
    """Tokens and positions belong to the rows of some output; others prove nothing about any."""
    rows = {n: as_source(v, n).shape[:1] for n, v in outputs.items()}
    if rows and not any(shape == (count,) for shape in rows.values()):
        first = next(iter(rows))
        raise InputError(f"{count} {key}s for {rows[first][0] if rows[first] else 'no'} rows of {first}", "one a row")


def _rows_of(values: Any, what: str) -> Callable[[str], list[int] | None]:
    if values is None:
        return lambda name: None
    if isinstance(values, Mapping):
        table = {n: _whole(v, what) for n, v in values.items()}
        return table.get
    flat = _whole(values, what)
    return lambda name: flat


def _whole(values: Any, what: str) -> list[int]:
    flat = as_tensor(values, what).flatten()
    if flat.is_complex() or (flat.is_floating_point() and not bool(flat.isfinite().all())):
        raise InputError(f"{what} that are not all numbers", "whole numbers, one a row")
    return flat.tolist()


def _probe(verdict: Verdict, positions: Any, least: int) -> None:
    """Say so where the probe could not have seen a rotary fault: every row was at position 0."""
    columns = positions.values() if isinstance(positions, Mapping) else [] if positions is None else [positions]
    tops = [int(as_tensor(p, "positions").max()) for p in columns if len(p)]
    if tops:
        top = max(tops)
        verdict.info["longest_position"] = top
        if top < least and verdict.status is Status.PASS:
            verdict.status = Status.NOT_RUN
            verdict.reason = (f"positions reach {top}, {least} or more are asked for: at position 0 a rotary embedding is "
                              "the identity; use longer prompts")  # fmt: skip
        elif top < LONG_ENOUGH:
            verdict.info["note"] = f"positions reach {top}; rotary faults grow with the position: {LONG_ENOUGH} or more is better"


def _fitting(positions: Any, name: str, value: Any) -> Any:
    """The positions of the rows of one tensor, or None where they are those of other rows."""
    found = positions.get(name) if isinstance(positions, Mapping) else positions
    shape = as_source(value, name).shape
    return found if found is not None and len(shape) > 1 and len(found) == shape[-2] else None


def _scores(name: str, a: Any, b: Any, left: Mapping[str, Any], right: Mapping[str, Any]) -> Any:
    """What ids were selected from: of the same module by name, or a tensor of the same layer, equal on both sides, by whose
    largest entries one side chose."""
    module, ids = name.rpartition(".")[0], [as_tensor(as_source(x, name), name).long() for x in (a, b)]
    for key in ("logits", "scores"):
        if f"{module}.{key}" in left:
            return left[f"{module}.{key}"]
    if ids[0].shape != ids[1].shape or not ids[0].numel():
        return None
    for n in left:
        s = as_source(left[n], n)
        rows = tuple(s.shape[:-1])
        if n == name or n not in right or not s.format.is_float or layer_of(n) != layer_of(name) or len(s.shape) < 2 or s.size > diagnose.LARGEST \
                or rows not in (tuple(ids[0].shape), tuple(ids[0].shape[:-1])) or not bits.is_equal(left[n], right[n]):  # fmt: skip
            continue
        z = s.tensor().double()
        for chosen in ids:
            picked = chosen if rows == tuple(chosen.shape[:-1]) else chosen[..., None]
            if int(picked.min()) < 0 or int(picked.max()) >= z.shape[-1] or picked.shape[-1] >= z.shape[-1]:
                break
            if bool((z.gather(-1, picked).amin(-1) >= z.topk(picked.shape[-1]).values[..., -1]).all()):
                return left[n]
    return None


def _residuals(name: str, a: Any, b: Any, left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Cause]:
    """A tensor of the same shape, equal on both sides, that is the whole difference."""
    shape = as_source(a, name).shape
    tried = 0
    for n in reversed(list(left)):
        if n == name or n not in right or as_source(left[n], n).shape != shape or tried >= 16:
            continue
        tried += 1
        if bits.is_equal(left[n], right[n]):
            found = diagnose.residual(left[n], a, b, n)
            if found is not None:
                return [found]
    return []


def _explain(
    name: str, a: Any, b: Any, left: Mapping[str, Any], right: Mapping[str, Any], inputs: Mapping[str, Any], weights: Mapping[str, Any],
    scores: Mapping[str, Any], positions: Any,
) -> list[Cause]:  # fmt: skip
    if max(as_source(a, name).size, as_source(b, name).size) > diagnose.LARGEST:
        return diagnose.tensor(a, b, name)
    leaf = name.rpartition(".")[2]
    found: list[Cause | None] = []
    if as_source(a, name).format.kind == "int" and any(word in leaf for word in _CHOSEN) and not leaf.endswith(_GIVEN):
        found.append(diagnose.topk(a, b, scores.get(name, _scores(name, a, b, left, right))))
    x, w = inputs.get(name), weights.get(name)
    if w is not None and "norm" in name and len(as_source(w, name).shape) == 1:
        found.append(diagnose.norm_weight(*(as_tensor(v, name) for v in (a, b, w))))
    if x is not None and w is not None and len(as_source(w, name).shape) > 1:
        found.append(diagnose.projection(x, w, a, b))
    elif x is not None and "norm" in name:
        found.append(diagnose.norm(x, a, b))
    elif x is not None and any(w in name for w in ("act", "silu", "gelu", "swiglu")) and "attention" not in leaf:
        found.append(diagnose.activation(x, a, b))
    elif (wave := wave_of(name)) is not None:
        found.append(diagnose.tables(a, b, positions=_fitting(positions, name, a), what=wave))
    elif x is not None and ("rope" in name or "rotary" in name):
        found.append(diagnose.rotary(x, a, b, positions))
    elif x is None and any(w in name.lower() for w in ("rope", "rotary", "rotated")) and as_source(a, name).format.is_float:
        fit = _fitting(positions, name, a) if len(as_source(a, name).shape) == 2 else positions if not isinstance(positions, Mapping) else positions.get(name)
        found.append(diagnose.rerotated(a, b, fit if fit is not None and len(fit) == as_source(a, name).shape[0] else None))
    causes = [c for c in found if c is not None]
    if not causes:
        causes = diagnose.tensor(a, b, name, scale=mapping.scale_of(name, left))
    if not causes or causes[0].residual is None:
        causes = _residuals(name, a, b, left, right) or causes
    if leaf == "logits" and not causes:
        causes = diagnose.argmax(a, b)
    return causes
