"""Which record of one side answers which of the other: by request, position **and** token.

A log-probability belongs to a token at a position of a request. Two lists of equal length may belong to different
tokens, and then every number in them is right and their difference means nothing. So tokens are matched first, and
where they do not match nothing behind them is compared. Nothing is aligned by text, trimmed or padded; what looks
like a shift, a padding or a retokenisation is named as the cause, and stays a fault.
"""
from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from alignment import masks
from alignment.errors import InputError
from alignment.retokenised import explain
from alignment.sources import as_source, as_tensor
from alignment.verdict import Cause, Coverage, Place, Status, Verdict, worst


@dataclasses.dataclass(frozen=True)
class Tokens:
    """One request on one side. ``positions`` is None where the tokens simply count from ``start``.

    ``values`` is what was recorded for each token (log-probs [T], or anything with T rows), or None. ``prompt`` are the
    ids before ``start``: a log-probability depends on them too. ``mask`` is true for the tokens whose values count.
    """

    request: str
    tokens: tuple[int, ...]
    positions: tuple[int, ...] | None = None
    values: Any = None
    start: int = 0
    prompt: tuple[int, ...] | None = None
    mask: tuple[bool, ...] | None = None

    def position(self, i: int) -> int:
        return self.start + i if self.positions is None else self.positions[i]


@dataclasses.dataclass(frozen=True)
class Packed:
    """Sequences one after another in one buffer, as a trainer packs them.

    ``cu_seqlens`` [B+1] are the bounds of the real tokens, counted without padding; where each sequence is padded to
    a multiple, ``cu_seqlens_padded`` [B+1] are the bounds in the buffer. ``values`` has one row a buffer place, ``mask`` one entry:
    true where values count.
    """

    tokens: Any
    cu_seqlens: Any
    cu_seqlens_padded: Any = None
    requests: tuple[str, ...] | None = None
    values: Any = None
    mask: Any = None

    def left_out(self) -> str:
        """What of the buffer belongs to no sequence, or ""; call it after :func:`unpack` accepted the bounds."""
        real, rows = _ints(self.cu_seqlens, "cu_seqlens")[-1], len(_ints(self.tokens, "tokens"))
        end = real if self.cu_seqlens_padded is None else _ints(self.cu_seqlens_padded, "cu_seqlens_padded")[-1]
        tail = f", {rows - end} of them behind the last bound" if rows > end else ""
        return f"{rows - real} of {rows} rows are in no sequence{tail}" if rows > real else ""


def unpack(buffer: Any, cu_seqlens: Any, cu_seqlens_padded: Any = None) -> list[Any]:
    """The sequences of a packed buffer (rows of ``buffer``), without their padding.

    Raises InputError for bounds that do not start at 0, go backwards, or leave a sequence too little room.
    """
    real = _ints(cu_seqlens, "cu_seqlens")
    padded = real if cu_seqlens_padded is None else _ints(cu_seqlens_padded, "cu_seqlens_padded")
    rows = len(buffer)
    for name, bounds in (("cu_seqlens", real), ("cu_seqlens_padded", padded)):
        if not bounds or bounds[0] != 0 or any(y < x for x, y in itertools.pairwise(bounds)):
            raise InputError(f"{name} is {bounds}", "0 followed by bounds that do not go backwards")
        if bounds[-1] > rows:
            raise InputError(f"{name} ends at {bounds[-1]} in a buffer of {rows}", f"at most {rows}")
    if len(real) != len(padded):
        raise InputError(f"{len(real) - 1} sequences and {len(padded) - 1} padded ones", "one padded bound a bound")
    out = []
    for i in range(len(real) - 1):
        length, room = real[i + 1] - real[i], padded[i + 1] - padded[i]
        if length > room:
            raise InputError(f"sequence {i} has {length} tokens and room for {room}", "padding that only adds")
        out.append(buffer[padded[i] : padded[i] + length])
    return out


def sequences(side: Any, mask: Any = None, values: Any = None) -> list[Tokens]:
    """What one side recorded, as a list of :class:`Tokens`.

    Accepts a flat list or tensor of token ids; a [B, T] tensor or array with ``mask`` [B, T] (True: a real token;
    without it every place counts; positions count real tokens, so that left and right padding meet) and ``values``
    [B, T]; :class:`Packed`; a mapping request -> token ids, or request -> record; a list of
    records. A record is a mapping or an object with ``token_ids`` (or ``tokens``), and optionally ``request_id`` (or
    ``request``), ``positions``, ``logprobs`` (or ``values``), and ``prompt_token_ids``, which only shifts positions.
    """
    if isinstance(side, Packed):
        rows = unpack(_ints(side.tokens, "tokens"), side.cu_seqlens, side.cu_seqlens_padded)
        held = [None] * len(rows)
        if side.values is not None:
            held = unpack(as_tensor(side.values, "values"), side.cu_seqlens, side.cu_seqlens_padded)
        counted: list[Any] = [None] * len(rows)
        if side.mask is not None:
            flat = as_tensor(side.mask, "mask").bool().flatten().tolist()
            if len(flat) != len(side.tokens):
                raise InputError(f"a mask of {len(flat)} entries for a buffer of {len(side.tokens)} rows", "one entry a row")
            counted = [tuple(m) for m in unpack(flat, side.cu_seqlens, side.cu_seqlens_padded)]
        names = side.requests or tuple(str(i) for i in range(len(rows)))
        if len(names) != len(rows):
            raise InputError(f"{len(names)} requests for {len(rows)} packed sequences", "one name a sequence")
        return [Tokens(n, tuple(r), values=v, mask=m) for n, r, v, m in zip(names, rows, held, counted, strict=True)]
    if isinstance(side, Mapping):
        return [_record(value, str(name)) for name, value in side.items()]
    if isinstance(side, Tokens):
        return [side]
    if mask is None and isinstance(side, list | tuple) and side and not (np.isscalar(side[0]) or getattr(side[0], "ndim", 1) == 0):
        return [_record(value, str(i)) for i, value in enumerate(side)]
    ids = as_tensor(side, "tokens")
    if ids.ndim == 1:
        ids = ids[None]
        mask = None if mask is None else as_tensor(mask, "mask").reshape(1, -1)
    if ids.ndim != 2:
        raise InputError(f"tokens of shape {list(ids.shape)}", "[T] or [B, T]")
    keep = torch.ones(ids.shape, dtype=torch.bool) if mask is None else as_tensor(mask, "mask").bool()
    if keep.shape != ids.shape:
        raise InputError(f"a mask of shape {list(keep.shape)} for tokens {list(ids.shape)}", "the same shape")
    held = None if values is None else as_tensor(values, "values").reshape(ids.shape[0], -1)
    if held is not None and held.shape != ids.shape:
        raise InputError(f"values of shape {list(held.shape)} for tokens {list(ids.shape)}", "the same shape")
    return [Tokens(str(i), tuple(_ints(ids[i][keep[i]], f"row {i}")), values=None if held is None else held[i][keep[i]])
            for i in range(ids.shape[0])]


def _record(value: Any, fallback: str) -> Tokens:
    if isinstance(value, Tokens):
        return value

    def get(*names: str) -> Any:
        for n in names:
            found = value.get(n) if isinstance(value, Mapping) else getattr(value, n, None)
            if found is not None:
                return found
        return None

    if isinstance(value, list | tuple | range | np.ndarray | torch.Tensor):
        return Tokens(fallback, tuple(_ints(value, f"tokens of request {fallback}")))
    ids = get("token_ids", "tokens", "input_ids")
    request = get("request_id", "request")
    request = fallback if request is None else str(request)
    if ids is None:
        raise InputError(f"the record of request {request} has no token ids", "a field token_ids (or tokens)")
    positions = get("positions")
    prompt = get("prompt_token_ids")
    mask = None if (found := get("mask")) is None else tuple(as_tensor(found, f"mask of request {request}").bool().flatten().tolist())
    prompt = None if prompt is None else tuple(_ints(prompt, f"prompt of request {request}"))
    return Tokens(
        request, tuple(_ints(ids, f"tokens of request {request}")),
        None if positions is None else tuple(_ints(positions, f"positions of request {request}")),
        get("logprobs", "values"), start=0 if prompt is None else len(prompt), prompt=prompt, mask=mask,
    )  # fmt: skip


def _ints(value: Any, name: str) -> list[int]:
    if isinstance(value, list | tuple) and any(isinstance(x, bool) for x in value):  # among numbers they would count as 1 and 0
        raise InputError(f"{name}: true and false among numbers", "a flat list of integers")
    source = as_source(value, name)
    if source.size and (source.format.kind != "int" or len(source.shape) != 1):
        raise InputError(f"{name}: {source.dtype} of shape {list(source.shape)}", "a flat list of integers")
    return [] if not source.size else [int(x) for x in source.tensor().tolist()]


@dataclasses.dataclass(frozen=True)
class Pair:
    """A request that both sides have, with the same tokens at the same positions (in the order of side a)."""

    a: Tokens
    b: Tokens
    order_b: tuple[int, ...] | None = None  # index into b of each entry of a, where the orders differ


def judge(a: Any, b: Any, name: str = "tokens", mask_a: Any = None, mask_b: Any = None) -> Verdict:
    """Token identity of two sides (see :func:`sequences` for what a side may be)."""
    return match(a, b, name, mask_a, mask_b)[1]


def match(
    a: Any, b: Any, name: str = "tokens", mask_a: Any = None, mask_b: Any = None
) -> tuple[list[Pair], Verdict]:
    """The matched requests, and the verdict on the matching.

    FAIL: another token at the same position. INVALID: a request or a position that one side lacks or has twice.
    """
    left, right = sequences(a, mask_a), sequences(b, mask_b)
    out = [_out_of(side, mask) for side, mask in ((a, mask_a), (b, mask_b))]
    faults: list[tuple[Status, Place, str, list[Cause]]] = []
    index: list[dict[str, Tokens]] = [{}, {}]
    for side, rows in enumerate((left, right)):
        for row in rows:
            if row.request in index[side]:
                faults.append((Status.INVALID, Place(request=row.request),
                               f"request {row.request} is recorded twice on side {'ab'[side]}", [_DUPLICATE]))  # fmt: skip
            index[side].setdefault(row.request, row)
    names = list(index[0]) + [n for n in index[1] if n not in index[0]]
    pairs, compared, expected = [], 0, 0
    for request in names:
        ra, rb = index[0].get(request), index[1].get(request)
        if ra is None or rb is None:
            present = ra or rb
            assert present is not None
            expected += len(present.tokens)
            faults.append((Status.INVALID, Place(request=request),
                           f"request {request} is missing on side {'a' if ra is None else 'b'}", []))  # fmt: skip
            continue
        both, union, fault, pair = _one(ra, rb)
        compared, expected = compared + both, expected + union
        if fault is None:
            pairs.append(pair)
        else:
            status, place, text, causes = fault
            faults.append((status, place, text, _swapped(ra, index[1]) or causes))
    status = worst(f[0] for f in faults) if faults else Status.PASS if compared else Status.NOT_RUN
    lead = faults[0] if faults else None
    return pairs, Verdict(
        name, status, reason=lead[2] if lead else "" if compared else "no token to compare",
        coverage={"tokens": Coverage(compared, expected), "requests": Coverage(len(pairs), len(names))},
        first_bad=None if lead is None else lead[1], causes=[] if lead is None else lead[3],
        downstream=[f[1] for f in faults[1:]], stats={"faults": len(faults)}, info=masks.left_out(*out),
    )  # fmt: skip


def _out_of(side: Any, mask: Any) -> str:
    if isinstance(side, Packed):
        return side.left_out()
    if mask is None:
        return ""
    keep = as_tensor(mask, "mask").bool()
    return masks.masked_out(keep.numel() - int(keep.sum()), keep.numel())


_DUPLICATE = Cause("duplicate", "two records have one key: a shard or a retry overwrote or repeated another")


def _one(a: Tokens, b: Tokens) -> tuple[int, int, tuple[Status, Place, str, list[Cause]] | None, Pair]:
    """(positions on both sides, positions on either, the fault or None, the pair)."""
    pair = Pair(a, b)
    if a.prompt is not None and b.prompt is not None and a.prompt != b.prompt:
        p = next((i for i, (x, y) in enumerate(zip(a.prompt, b.prompt, strict=False)) if x != y), min(a.start, b.start))
        place = Place(request=a.request, position=p, token=a.prompt[p] if p < a.start else None, index=(p,))
        text = f"the prompts of request {a.request} differ at index {p}, lengths {a.start} vs {b.start}"
        return 0, len(a.tokens), (Status.FAIL, place, text, explain(a.prompt, b.prompt)), pair
    for row, side in ((a, "a"), (b, "b")):
        if row.positions is not None:
            if len(row.positions) != len(row.tokens):
                raise InputError(f"request {row.request} on side {side}: {len(row.positions)} positions for "
                                 f"{len(row.tokens)} tokens", "one position a token")
            seen: set[int] = set()
            for p in row.positions:
                if p in seen:
                    return 0, len(row.tokens), (Status.INVALID, Place(request=row.request, position=p),
                        f"position {p} of request {row.request} is recorded twice on side {side}", [_DUPLICATE]), pair  # fmt: skip
                seen.add(p)
    at_a = {a.position(i): i for i in range(len(a.tokens))}
    at_b = {b.position(i): i for i in range(len(b.tokens))}
    common = [p for p in sorted(at_a) if p in at_b]
    union = len(at_a) + len(at_b) - len(common)
    counted = a.positions is None and b.positions is None  # explicit positions say themselves what is missing
    where = f"request {a.request}: lengths {len(a.tokens)} vs {len(b.tokens)}"
    for p in common:
        ta, tb = a.tokens[at_a[p]], b.tokens[at_b[p]]
        if ta != tb:
            i = at_a[p]
            place = Place(request=a.request, position=p, token=ta, index=(i,))
            text = f"token {ta} vs {tb} at index {i}, {where}"
            return len(common), union, (Status.FAIL, place, text, explain(a.tokens, b.tokens) if counted else []), pair
    if union != len(common):
        p = min(set(at_a) ^ set(at_b))
        side, row, at = ("b", a, at_a) if p in at_a else ("a", b, at_b)
        place = Place(request=a.request, position=p, token=row.tokens[at[p]], index=(at[p],))
        text = f"position {p} is missing on side {side}, {where}"
        return len(common), union, (Status.INVALID, place, text, explain(a.tokens, b.tokens) if counted else []), pair
    order = tuple(at_b[a.position(i)] for i in range(len(a.tokens)))
    if order != tuple(range(len(order))):
        pair = Pair(a, b, order)
    return len(common), union, None, pair


def _swapped(a: Tokens, others: Mapping[str, Tokens]) -> list[Cause]:
    twins = [n for n, t in others.items() if n != a.request and t.tokens == a.tokens and len(a.tokens) > 1]
    if not twins:
        return []
    text = f"the tokens of request {a.request} are those of request {twins[0]} on the other side: matched by order of arrival"
    return [Cause("request_swap", text, 0.0, {"request": a.request, "is": twins[0]})]


def requests_of(verdict: Verdict) -> Iterable[str]:
    """The requests that did not match, first one first."""
    places = [verdict.first_bad, *verdict.downstream] if verdict.first_bad else []
    return [p.request for p in places if p is not None and p.request is not None]
