"""Log-probabilities of one side against those of the other, token by token.

The judgement is on the largest absolute difference and on the number of differing tokens. A mean is printed as
information and judges nothing: +0.5 and -0.5 have mean zero, and one wrong token among a thousand disappears in it.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from alignment import bits, diagnose, masks, match
from alignment.errors import InputError
from alignment.metrics import gate_metrics
from alignment.places import rank_dict, rank_text
from alignment.sources import Source, as_source, as_tensor
from alignment.verdict import Coverage, Place, Status, Verdict, combine

__all__ = ["behind", "blocked", "gate_metrics", "judge", "judge_ranks"]

def judge(
    a: Any,
    b: Any,
    *,
    name: str = "logprobs",
    tier: str | float = "exact",
    mask: Any = None,
    tokens: Any = None,
    tokens_a: Any = None,
    tokens_b: Any = None,
    mask_a: Any = None,
    mask_b: Any = None,
    logits: Any = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    place: Place | None = None,
) -> Verdict:
    """Compare log-probs of two sides.

    Args:
        a, b: arrays [T], [B, T] or [T, V] of one shape; or what :func:`alignment.match.sequences` reads with values
            (mapping request -> record with ``token_ids`` and ``logprobs``, a list of records): these are matched by
            request, position and token first.
        mask: True where a token counts, shape of ``a``. Nothing counts: NOT_RUN.
        tokens: token ids of both sides, shape of ``a``; ``tokens_a`` and ``tokens_b`` where each side has its own:
            then token identity is judged first, and if it fails the log-probs are NOT_RUN (blocked). ``mask_a`` and
            ``mask_b`` say which of them are real where the two sides are padded in different ways.
        logits: the logits [..., V] the tokens were drawn from, for the diagnosis of a temperature.
        temperature, top_p, top_k: the sampling parameters in effect, to say when raw and processed log-probs are
            the same numbers and this comparison cannot tell them apart.
    Returns:
        a Verdict; FAIL names sequence (request), position and token. InputError for arguments that do not fit.
    """
    if tokens_a is not None or tokens_b is not None:
        if tokens_a is None or tokens_b is None:
            raise InputError("token ids of one side only", "tokens_a and tokens_b, or tokens for both")
        if mask_a is not None or mask_b is not None:
            left, right = match.sequences(tokens_a, mask_a, a), match.sequences(tokens_b, mask_b, b)
            wrong = masks.of_one_array(tokens_a, tokens_b, mask_a, mask_b, name)
            if wrong is not None:
                return combine(name, [wrong, Verdict(name, Status.NOT_RUN, "blocked: the masks differ", coverage={"logprobs": Coverage(0, 1)})])
            out = _records(left, right, name, tier, temperature, top_p, top_k)
            masks.tell(out, masks.left_out(*(masks.count(m) for m in (mask_a, mask_b))))
            return out
        gate = match.judge(tokens_a, tokens_b, f"{name}.tokens")
        if gate.status is not Status.PASS:
            return blocked(gate, name)
        tokens = tokens_a
        count, short = as_tensor(tokens, "tokens"), as_source(a, name)
        if short.shape == as_source(b, name).shape and tuple(count.shape) != short.shape[: count.ndim]:  # the last one, perhaps, trimmed on both sides
            return combine(name, [gate, Verdict(name, Status.INVALID, f"log-probs {list(short.shape)} for tokens {list(count.shape)}: one a token is expected",
                                                coverage={"logprobs": Coverage(min(short.size, count.numel()), max(short.size, count.numel(), 1))})])  # fmt: skip
        inner = judge(a, b, name=name, tier=tier, mask=mask, tokens=tokens, logits=logits, temperature=temperature,
                      top_p=top_p, top_k=top_k, place=place)
        return behind(gate, inner, name)
    if _is_records(a) or _is_records(b):
        return _records(a, b, name, tier, temperature, top_p, top_k)
    sa, sb = as_source(a, name), as_source(b, name)
    if "bool" in (sa.dtype, sb.dtype):
        raise InputError(f"{name} of dtype {sa.dtype} and {sb.dtype}", "log-probs, which are numbers", "a mask was taken for them")
    _real(name, sa, sb)
    for given, source in ((a, sa), (b, sb)):
        if not isinstance(given, list | tuple):
            _fractions(name, source.dtype)
    if tokens is not None and sa.shape == sb.shape and tuple((ids := as_tensor(tokens, "tokens")).shape) != sa.shape[: ids.ndim]:
        raise InputError(f"tokens of shape {list(ids.shape)} for log-probs {list(sa.shape)}", "the same leading shape")
    if mask is None:
        verdict = bits.judge(a, b, name, tier, place or Place(), explain=False)
        where: Any = None
    else:
        given = as_tensor(mask, "mask")
        if given.is_floating_point() and bool(given.isnan().any()):
            raise InputError("a mask that is NaN somewhere", "true where a token counts, false where it does not")
        keep = given.bool().cpu()
        if tuple(keep.shape) != sa.shape:
            raise InputError(f"a mask of shape {list(keep.shape)} for log-probs {list(sa.shape)}", "the same shape")
        if sa.shape != sb.shape:
            verdict, where = bits.judge(a, b, name, tier, place or Place(), explain=False), None
        else:
            where = keep.nonzero()
            verdict = bits.judge(_select(sa, keep), _select(sb, keep), name, tier, place or Place(), explain=False)
            verdict.first_bad = _unmask(verdict.first_bad, where)
            if verdict.status is Status.NOT_RUN:
                verdict.reason = "0 tokens after masking"
            out = masks.masked_out(keep.numel() - len(where), keep.numel())
            verdict.info.update(masks.left_out(out, out))
    verdict.coverage = {"tokens": verdict.coverage["elements"]}
    if sa.shape != sb.shape and verdict.first_bad is not None:
        at = min(sa.shape[0], sb.shape[0]) if len(sa.shape) == len(sb.shape) == 1 else None
        verdict.first_bad = dataclasses.replace(verdict.first_bad, tensor=name, position=at)
    _locate(verdict, sa.shape, tokens)
    _max_place(verdict, where)
    return _finish(verdict, sa, sb, logits, tokens, mask, temperature, top_p, top_k)


def blocked(gate: Verdict, name: str = "logprobs") -> Verdict:
    """The verdict on log-probs whose tokens did not match: the gate's own, with the log-probs NOT_RUN behind it."""
    behind = Verdict(name, Status.NOT_RUN, reason=f"blocked: {gate.name} is {gate.status}",
                     coverage={"logprobs": Coverage(0, max(c.expected for c in gate.coverage.values()))})
    return combine(name, [gate, behind])


def judge_ranks(pairs: Mapping[Any, tuple[Any, Any]], *, name: str = "logprobs", **kwargs: Any) -> Verdict:
    """One verdict a rank, none averaged with another: ``{rank: (a, b)}``. Keyword arguments as for :func:`judge`.

    A rank is a number, or a parallel rank such as ``(("dp", 0), ("tp", 1))`` or ``"dp0-tp1"``.
    """
    if not isinstance(pairs, Mapping) or not all(isinstance(p, tuple | list) and len(p) == 2 for p in pairs.values()):
        raise InputError(f"pairs of type {type(pairs).__name__}", "a mapping rank -> (a, b)")
    children = []
    for rank, (a, b) in pairs.items():
        place = Place(rank=rank_dict(rank))
        children.append(judge(a, b, name=f"{name}[{rank_text(rank)}]", place=place, **kwargs))
    out = combine(name, children)
    out.coverage["ranks"] = Coverage(sum(c.coverage["tokens"].compared > 0 for c in children if "tokens" in c.coverage),
                                     len(children))
    return out


# --- the parts ----------------------------------------------------------------------------------------------------


def _is_records(side: Any) -> bool:
    if isinstance(side, Mapping | match.Packed | match.Tokens):
        return True
    simple = (bool, int, float, list, tuple, np.generic, np.ndarray, torch.Tensor)
    return isinstance(side, list | tuple) and bool(side) and not isinstance(side[0], simple)


def _real(name: str, *sides: Source) -> None:
    odd = next((s.dtype for s in sides if s.dtype.startswith("complex")), None)
    if odd is not None:
        raise InputError(f"{name} of dtype {odd}", "log-probs, which are real numbers", "another tensor was taken for them")


def _fractions(name: str, dtype: str) -> None:
    """Whole numbers of a fixed dtype are log-probs that were cut off, which are equal where the log-probs are not."""
    if "int" in dtype:
        raise InputError(f"{name} of dtype {dtype}", "log-probs, which are fractions", "do not convert them to integers; or token ids were taken for them")


def _records(a: Any, b: Any, name: str, tier: Any, temperature: Any, top_p: Any, top_k: Any) -> Verdict:
    pairs, gate = match.match(a, b, f"{name}.tokens")
    if gate.status is not Status.PASS:
        return blocked(gate, name)
    rows = [row for pair in pairs for row in (pair.a, pair.b)]
    if rows and all(row.values is None or (hasattr(row.values, "__len__") and not len(row.values)) for row in rows):
        count = sum(len(pair.a.tokens) for pair in pairs)
        return combine(name, [gate, Verdict(name, Status.NOT_RUN, f"no log-probs: neither side has one for any of its {count} tokens",
                                            coverage={"tokens": Coverage(0, max(count, 1))})])  # fmt: skip
    wrong = masks.differ(pairs, name)
    if wrong is not None:
        return combine(name, [gate, wrong, Verdict(name, Status.NOT_RUN, "blocked: the masks differ", coverage={"logprobs": Coverage(0, 1)})])
    columns: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    where: list[tuple[match.Tokens, int]] = []
    plain = [True, True]
    out, total = 0, 0
    for pair in pairs:
        keep = [i for i in range(len(pair.a.tokens)) if pair.a.mask is None or pair.a.mask[i]]
        out, total = out + len(pair.a.tokens) - len(keep), total + len(pair.a.tokens)
        for side, row in enumerate((pair.a, pair.b)):
            if isinstance(row.values, Mapping | str) or (isinstance(row.values, list | tuple) and not {dict, str}.isdisjoint(map(type, row.values))):
                raise InputError(f"{name} of request {row.request} is {str(row.values)[:60]!r}", "a list of numbers, one a token",
                                 "take the number out of each entry")
            count = len(row.values) if hasattr(row.values, "__len__") else 0
            if count != len(row.tokens):
                fault = Verdict(name, Status.INVALID, f"request {row.request} on side {'ab'[side]}: {count} log-probs for "
                                f"{len(row.tokens)} tokens", coverage={"tokens": Coverage(count, len(row.tokens))},
                                first_bad=Place(request=row.request))  # fmt: skip
                return combine(name, [gate, fault])
            plain[side] &= isinstance(row.values, list | tuple)
            column = as_tensor(row.values, f"{name} of request {row.request}").cpu()
            if column.dtype is torch.bool or (isinstance(row.values, list | tuple) and any(isinstance(v, bool) for v in row.values)):
                raise InputError(f"{name} of request {row.request} holds true and false", "log-probs, which are numbers",
                                 "a mask was taken for them, or a comparison was written in their place")
            if column.is_complex():
                _real(f"{name} of request {row.request}", as_source(column))
            if not isinstance(row.values, list | tuple):
                _fractions(f"{name} of request {row.request}", str(column.dtype))
            column = column if side == 0 or pair.order_b is None else column[list(pair.order_b)]
            columns[side].append(column if len(keep) == len(row.tokens) else column[keep])
        where += [(pair.a, i) for i in keep]
    if not where and out:
        return combine(name, [gate, Verdict(name, Status.NOT_RUN, "0 tokens after masking", coverage={"tokens": Coverage(0, 0)})])
    dtypes = [{c.dtype for c in column if c.numel()} for column in columns]
    if any(len(d) > 1 for d in dtypes):
        fault = Verdict(name, Status.INVALID, f"records of one side have several dtypes: {dtypes}",
                        coverage=dict(gate.coverage))  # fmt: skip
        return combine(name, [gate, fault])
    shapes = [sorted({tuple(c.shape[1:]) for c in column if len(c)}) for column in columns]
    if any(len(s) > 1 or 0 in (s or [()])[0] for s in shapes):
        fault = Verdict(name, Status.INVALID, f"log-probs of one side have several shapes a token, or none in one: {shapes[0]} on side a, "
                        f"{shapes[1]} on side b; expected one number", coverage=dict(gate.coverage))  # fmt: skip
        return combine(name, [gate, fault])
    left, right = (torch.cat([c for c in column if c.numel()]) for column in columns)
    values = [x.tolist() if p and x.ndim == 1 else x for x, p in zip((left, right), plain, strict=True)]
    verdict = bits.judge(*values, name, tier, Place(), explain=False)  # a list takes the dtype of the other side
    verdict.info.update(masks.left_out(*(2 * [masks.masked_out(out, total)])))
    if verdict.first_bad == Place() and where:  # a difference of all elements, such as the dtype
        verdict.first_bad = Place(request=where[0][0].request, tensor=name)
    verdict.coverage = {"tokens": Coverage(*((len(where),) * 2) if verdict.stats.get("compared") else (0, len(where)))}
    for key, target in (("first_bad", verdict.first_bad),):
        if target is not None and target.index:
            row, i = where[target.index[0]]
            setattr(verdict, key, Place(request=row.request, position=row.position(i), token=row.tokens[i], index=(i,)))
    at = verdict.stats.get("max_index")
    if at:
        row, i = where[at[0]]
        verdict.stats["max_at"] = str(Place(request=row.request, position=row.position(i), token=row.tokens[i]))
    inner = _finish(verdict, as_source(left), as_source(right), None, None, None, temperature, top_p, top_k)
    if inner.status is Status.FAIL:
        both = list(zip(*columns, strict=True))
        lagging = [] if _exact(inner) else diagnose.lag_of_rows(both, "request")
        inner.causes = diagnose.exchanged_rows(both, [p.a.request for p in pairs], "request") or lagging or inner.causes
    return behind(gate, inner, name)


def _exact(verdict: Verdict) -> bool:
    return bool(verdict.causes) and verdict.causes[0].residual == 0.0


def behind(gate: Verdict, inner: Verdict, name: str) -> Verdict:
    """The log-probs' verdict with the passed token gate before it; a token is counted once."""
    out = combine(name, [gate, inner], tier=inner.tier, stats=inner.stats, info={**gate.info, **inner.info})
    out.coverage = {**gate.coverage, **inner.coverage}
    parts = {side: list(dict.fromkeys(v.info["left_out"][side] for v in (gate, inner) if side in v.info.get("left_out", {}))) for side in "ab"}
    if any(parts.values()):
        masks.tell(out, {"left_out": {side: "; ".join(texts) for side, texts in parts.items() if texts}})
    return out


def _select(source: Source, keep: torch.Tensor) -> torch.Tensor:
    return source.tensor()[keep]


def _masked(values: torch.Tensor, keep: torch.Tensor) -> torch.Tensor | None:
    """What belongs to the tokens that count; None where its leading shape is another (one row of logits for all)."""
    return values[keep] if values.shape[: keep.ndim] == keep.shape else values if values.ndim == 1 else None


def _unmask(place: Place | None, where: torch.Tensor) -> Place | None:
    if place is None or not place.index:
        return place
    return dataclasses.replace(place, index=tuple(where[place.index[0]].tolist()))


def _locate(verdict: Verdict, shape: tuple[int, ...], tokens: Any) -> None:
    """Turn the index of the first bad element into sequence, position and token."""
    place = verdict.first_bad
    if place is None or not place.index:
        return
    index = place.index
    ids = None if tokens is None else as_tensor(tokens, "tokens")
    token = None
    if ids is not None and ids.ndim <= len(index):
        if tuple(ids.shape) != shape[: ids.ndim]:
            raise InputError(f"tokens of shape {list(ids.shape)} for log-probs {list(shape)}", "the same leading shape")
        token = int(ids[index[: ids.ndim]])
    sequence = {"row": index[0], "position": index[1]} if len(index) == 2 else {"position": index[0]}
    verdict.first_bad = dataclasses.replace(place, token=token, **sequence)


def _max_place(verdict: Verdict, where: torch.Tensor | None) -> None:
    at = verdict.stats.get("max_index")
    if at is not None and where is not None:
        verdict.stats["max_index"] = where[at[0]].tolist()


def _finish(
    verdict: Verdict, sa: Source, sb: Source, logits: Any, tokens: Any, mask: Any,
    temperature: float | None, top_p: float | None, top_k: int | None,
) -> Verdict:  # fmt: skip
    plain_top_k = top_k is None or top_k <= 0
    if temperature == 1 and top_p == 1 and plain_top_k:
        verdict.info["logprob_mode"] = ("at temperature 1 and top-p 1 raw and processed log-probs are the same numbers: "
                                        "this comparison cannot tell the two modes apart")  # fmt: skip
    if verdict.status is Status.INVALID and sa.shape != sb.shape:
        verdict.causes = diagnose.vocabularies(sa, sb) or diagnose.tensor(sa, sb, verdict.name if verdict.name else "logprobs")
    if verdict.status is Status.FAIL and sa.shape == sb.shape:
        rows: list[Any] = []
        if mask is not None:
            keep = as_tensor(mask, "mask").bool().cpu()
            if keep.ndim == 2:
                rows = [(x[k], y[k]) for x, y, k in zip(sa.tensor(), sb.tensor(), keep, strict=True)]
            sa, sb = as_source(_select(sa, keep)), as_source(_select(sb, keep))
            tokens, logits = (None if x is None else _masked(as_tensor(x), keep) for x in (tokens, logits))
        verdict.causes = diagnose.logprobs(sa.tensor(), sb.tensor(), logits=logits, tokens=tokens, temperature=temperature,
                                           top_p=top_p, top_k=top_k)  # fmt: skip
        if len(sa.shape) == 2 and not rows:
            rows = list(zip(sa.tensor(), sb.tensor(), strict=True))
        if rows:
            lagging = diagnose.lag_of_rows(rows, "row") if mask is not None and not _exact(verdict) else []
            verdict.causes = diagnose.exchanged_rows(rows, [str(i) for i in range(len(rows))], "row") or lagging or verdict.causes
    return verdict
