"""Records of requests in a file, as trainers, engines and rollout workers write them: one object a request.

Names of fields differ from one framework to the next. What each is called here is written down once, below; a field with another
name is not compared, and the verdict says so, and whether it differs. Requests are matched by their names, never by their order,
where both sides name them.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from alignment import dumps, logprobs, mapping, match
from alignment.errors import InputError
from alignment.verdict import Coverage, Place, Status, Verdict

LOGPROBS = ("logprobs", "log_probs", "logprob", "old_log_probs", "rollout_log_probs", "token_logprobs", "old_logprobs", "rollout_logprobs",
            "ref_log_probs", "ref_log_prob", "response_logprobs", "output_logprobs", "values")
TOKENS = ("token_ids", "tokens", "response_ids", "response_token_ids", "output_token_ids", "completion_ids", "output_ids", "input_ids")
MASKS = ("loss_mask", "response_mask", "mask")
#: Token ids of the prompt, where every record of both sides has them under one of these names.
_PROMPTS = ("prompt_token_ids", "prompt_ids", "prompt_tokens", "input_ids")
_IDS = ("request_id", "request")
#: Taken for the name of a request only where every record of both sides has one and those of one side are all different.
_MAYBE_IDS = ("rid", "id", "uid", "sample_id", "index")
#: Keys under which a file keeps its records beside facts of the whole.
_LISTS = ("samples", "records", "requests", "rollouts")

class Rows(list[dict[str, Any]]):
    """The records of one file; ``beside`` are facts of the whole file, which lie beside their list."""

    beside: Mapping[str, Any] = {}


def read(path: Path) -> Rows | None:
    """The records of a .json, .jsonl or .pt file, each with ``request_id`` where it had a name; None where the file holds something else.

    Raises InputError where some entries are records and others are not, and for a .jsonl file without one."""
    suffix = path.suffix.lower()
    if suffix not in (".json", ".jsonl", ".pt", ".pth") or path.is_dir():
        return None
    beside: dict[str, Any] = {}
    if suffix == ".jsonl":
        lines = path.read_bytes().splitlines()
        content: Any = [dumps.parse_json(line, f"{path.name} line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    else:
        content = dumps.read_json(path) if suffix == ".json" else dumps.read_torch(path)
    if isinstance(content, Mapping):
        listed = [k for k in _LISTS if isinstance(content.get(k), list) and any(map(_is_record, content[k]))]
        if len(listed) > 1:
            raise InputError(f"{path.name} holds requests under {' and '.join(listed)}", "one list of requests", "compare each list in files of its own")
        beside = {str(k): v for k, v in content.items() if k not in listed} if listed else {}
        content = content[listed[0]] if listed else {str(k): v for k, v in content.items()}
    rows = list(content.values()) if isinstance(content, Mapping) else content if isinstance(content, list) else []
    found = [_is_record(r) for r in rows]
    lost = [i for i, (r, is_one) in enumerate(zip(rows, found, strict=True))
            if not is_one and (isinstance(content, list) or (isinstance(r, Mapping) and "logprobs" in r))]
    if any(found) and lost:  # compared as plain numbers, its log-probs would belong to no token
        raise InputError(f"{path.name}: entry {lost[0]} of {len(rows)} has no token ids and others have", "token_ids and logprobs in each")
    if not all(found) or not rows:
        if suffix == ".jsonl":
            raise InputError(f"{path.name} holds no records", "one object with token_ids and logprobs a line")
        return None
    if isinstance(content, Mapping):
        return Rows({"request_id": n, **{k: v for k, v in r.items() if k not in _IDS or v is not None}} for n, r in content.items())
    out = Rows(dict(r) for r in rows)
    out.beside = beside
    return out


def _is_record(row: Any) -> bool:
    if not isinstance(row, Mapping):
        return False
    return any(_is_list(row.get(k)) for k in TOKENS) or any(k in row and not isinstance(row[k], torch.Tensor) for k in TOKENS[:2])


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, torch.Tensor) and value.ndim == 1)


def judge(a: Rows, b: Rows, *, name: str, tier: str | float) -> Verdict:
    """The verdict on two files of records; ``info["not_compared"]`` names the fields that nothing compared, ``info["differ_too"]``
    those of them that are not the same in all records."""
    ids = next((k for k in _MAYBE_IDS if _names_all(a, b, k)), None)
    shared = next((k for k in LOGPROBS if all(any(r.get(k) is not None for r in side) for side in (a, b))), None)
    mask = next((k for k in MASKS if all(_fits(r, r.get(k)) for r in (*a, *b))), None)
    prompt = next((k for k in _PROMPTS if all(_whole(r.get(k)) and any(r.get(t) is not None for t in TOKENS if t != k) for r in (*a, *b))), None)
    sides, used = [], set[str]()
    for side in (a, b):
        values = shared or next((k for k in LOGPROBS if any(r.get(k) is not None for r in side)), None)
        rows = [_row(r, str(i), ids, values, mask, prompt, used) for i, r in enumerate(side)]
        sides.append(rows)
    verdict = logprobs.judge(*sides, name=name, tier=tier)
    more = [k for k in LOGPROBS if shared is not None and k not in used and all(_numbers(r.get(k)) and _length(r[k]) == _length(r.get(shared)) for r in (*a, *b))]
    if more and verdict.status in (Status.PASS, Status.FAIL):  # further log-probs of the same tokens
        rest = [logprobs.judge(*([_row(r, str(i), ids, k, mask, prompt, used) for i, r in enumerate(side)] for side in (a, b)), name=f"{name}.{k}", tier=tier)
                for k in more]  # fmt: skip
        verdict = _with(verdict, rest, name)
    masks = [v for k in MASKS if k not in used and (v := _mask(a, b, sides, k, name)) is not None]
    if masks:
        verdict = _with(verdict, masks, name)
    whole = {k for side in (a, b) for k in getattr(side, "beside", {})}
    beside = sorted({*({f for r in (*a, *b) for f in r} - used), *whole})
    if beside:
        verdict.info["not_compared"] = beside
        unlike = {k for k in whole if not _same(a.beside.get(k), b.beside.get(k))}
        differing = sorted({*_differing(a, b, sides, beside), *unlike})
        if differing:
            verdict.info["differ_too"] = differing
        if verdict.green:
            notes = [verdict.reason] if verdict.reason else []
            notes.append(f"token ids and log-probs only; not compared: {', '.join(beside[:8])}")
            verdict.reason = "; ".join(notes) + (f" (not the same on both sides: {', '.join(differing[:8])})" if differing else "")
    return verdict


def _with(first: Verdict, rest: list[Verdict], name: str) -> Verdict:
    out = mapping.in_order(name, [first, *rest], tier=first.tier, stats=first.stats, info=first.info)
    out.reason = first.reason if out.green else out.reason
    return out


def _mask(a: Rows, b: Rows, sides: list[list[match.Tokens]], field: str, name: str) -> Verdict | None:
    """The verdict on a mask of both sides that chose no token here (of other places, or the second of two), where it differs."""
    rows = [{t.request: r for t, r in zip(tokens, side, strict=True)} for tokens, side in zip(sides, (a, b), strict=True)]
    for request in rows[0]:
        x, y = (r.get(request, {}).get(field) for r in rows)
        if not (_numbers(x) and _numbers(y)):
            continue
        x, y = ([bool(v) for v in side or ()] for side in (x, y))
        if x != y:
            i = next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))
            return Verdict(f"{name}.{field}", Status.FAIL if len(x) == len(y) else Status.INVALID,
                           f"{field} of request {request} differs at index {i}, lengths {len(x)} vs {len(y)}",
                           coverage={"masks": Coverage(1, 1)}, first_bad=Place(request=request, tensor=field, index=(i,)))  # fmt: skip
    return None


def _numbers(value: Any) -> bool:
    return _length(value) >= 0 and (isinstance(value, torch.Tensor) or all(isinstance(v, int | float) for v in value))


def _whole(value: Any) -> bool:
    return _numbers(value) and (not value.is_floating_point() if isinstance(value, torch.Tensor) else all(type(v) is int for v in value))


def _names_all(a: Rows, b: Rows, key: str) -> bool:
    names = [[next((r[k] for k in (*_IDS, key) if r.get(k) is not None), None) for r in side] for side in (a, b)]
    return all(isinstance(n, str | int) for side in names for n in side) and any(len(set(map(str, side))) == len(side) for side in names)


def _length(value: Any) -> int:
    return len(value) if _is_list(value) else -1


def _fits(row: Mapping[str, Any], mask: Any) -> bool:
    return _is_list(mask) and _length(mask) in {_length(row.get(k)) for k in LOGPROBS}


def _row(row: Mapping[str, Any], fallback: str, ids: str | None, values: str | None, mask: str | None, prompts: str | None,
         used: set[str]) -> match.Tokens:  # fmt: skip
    """One record under our names; ``used`` collects the names of the fields that are compared."""
    def first(names: tuple[str, ...], good: Callable[[Any], bool] = lambda x: x is not None) -> str | None:
        return next((k for k in names if good(row.get(k))), None)

    found = None if values is None else row.get(values)
    tokens = first(TOKENS, lambda x: _length(x) == _length(found) >= 0) or first(TOKENS)
    prompts = "prompt_token_ids" if prompts is None or prompts == tokens else prompts
    request = first(_IDS) or ids
    used.update(k for k in (tokens, values, request, mask, prompts, "positions") if k is not None)
    token_ids: Any = None if tokens is None else row[tokens]
    prompt = row.get(prompts)
    if prompts == "input_ids" and prompt is not None and 0 < _length(token_ids) <= len(prompt) and list(prompt[-len(token_ids) :]) == list(token_ids):
        prompt = prompt[: -len(token_ids)]  # prompt and response in one list, and the response again
    count, length = _length(found), row.get("response_length")
    if count > 0 and length == count < _length(token_ids):  # prompt and response in one list, log-probs of the response
        if prompt is None:
            prompt = token_ids[:-count]
        token_ids = token_ids[-count:]
        used.add("response_length")
    fields = {"request_id": None if request is None else row[request], "token_ids": token_ids, "logprobs": found, "positions": row.get("positions"),
              "prompt_token_ids": prompt, "mask": None if mask is None else row[mask]}  # fmt: skip
    return match.sequences({fallback: fields})[0]


def _differing(a: Rows, b: Rows, sides: list[list[match.Tokens]], fields: list[str]) -> list[str]:
    rows = [{t.request: r for t, r in zip(tokens, side, strict=True)} for tokens, side in zip(sides, (a, b), strict=True)]
    both = [(rows[0][n], rows[1][n]) for n in rows[0] if n in rows[1]]
    return [f for f in fields if any(not _same(x.get(f), y.get(f)) for x, y in both)]


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
        return isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and x.dtype == y.dtype and torch.equal(x, y)
    try:
        return bool(x == y)
    except (ValueError, RuntimeError, TypeError):  # lists of tensors say neither yes nor no
        return False
