"""Two recordings on disk, compared: what stands behind ``vime compare RUN_A RUN_B``.

A recording is a directory of records (:mod:`alignment.records`), or any file of tensors (:mod:`alignment.dumps`).
Whatever is wrong with a recording itself, the answer is a verdict that says so, never a traceback and never green.
"""
from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from alignment import (
    bits,
    compare_records,
    diagnose,
    dumps,
    layers,
    logprobs,
    mapping,
    match,
    records,
    requests,
    weights,
)
from alignment.errors import InputError, KeyCollision
from alignment.sources import as_pair, as_source, as_tensor
from alignment.verdict import Cause, Coverage, Status, Verdict

KINDS = ("auto", "layers", "weights", "logprobs")
_LOGPROBS = tuple(n for n in requests.LOGPROBS if n != "values")
_TOKENS = ("token_ids", "tokens", "input_ids", "response_ids", "responses")
_LOGITS = ("logits", "lm_head.logits", "lm_head.output", "output_layer.output", "raw_logits")
_REAL = ("float64", "float32", "float16", "bfloat16")
_BOUNDS = ("cu_seqlens", "cu_seqlens_q", "cu_seq_lens")
_MASKS = ("mask", "loss_mask", "response_mask", "attention_mask")


def compare_runs(
    path_a: str | os.PathLike[str],
    path_b: str | os.PathLike[str],
    tier: str | float = "exact",
    *,
    kind: str = "auto",
    rules_a: Mapping[str, Any] | None = None,
    rules_b: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Verdict:
    """Compare two recordings.

    ``kind`` says what plain files hold; "auto" decides by the names in them. ``rules_*`` are mapping files
    (:func:`alignment.dumps.rename`) for foreign dumps. Raises FileNotFoundError if a path does not exist and
    InputError for an unknown tier or kind (wrong usage); everything else is a Verdict.
    """
    if kind not in KINDS:
        raise InputError(f"kind {kind!r}", "one of " + ", ".join(KINDS))
    bits.bound_of(tier)
    a, b = Path(path_a), Path(path_b)
    for path in (a, b):
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
    name = name or f"{a.name} vs {b.name}"
    try:
        recorded = [records.is_records(p) for p in (a, b)]
        if all(recorded):
            _unmapped(rules_a, rules_b, "records, which have our names")
            with records.RecordReader(a) as left, records.RecordReader(b) as right:
                return _alone(compare_records.judge(left, right, name=name, tier=tier), a, b)
        if any(recorded):
            raise InputError(f"{(a if recorded[0] else b).name} holds records and the other does not", "two of one kind",
                             "compare records with records, files with files")  # fmt: skip
        one, other = (requests.read(p) for p in (a, b))
        if one is not None and other is not None and kind in ("auto", "logprobs"):
            _unmapped(rules_a, rules_b, "requests, which are matched by the names of their fields")
            return never_itself(requests.judge(one, other, name=name, tier=tier), a, b)
        if (one is None) != (other is None) and kind in ("auto", "logprobs"):
            raise InputError(f"{(a if one is not None else b).name} holds records of requests and {(b if one is not None else a).name} does not",
                             "two of one kind", "write both as records of requests, or both as tensors")
        with dumps.open_dump(a) as left, dumps.open_dump(b) as right:
            same = rules_a == rules_b  # one file for both: it need not fit each of them
            x, y = dumps.rename(left, rules_a, right if same else ()), dumps.rename(right, rules_b, left if same else ())
            if list(x) == [a.stem] and list(y) == [b.stem]:  # bare arrays: the name of a file is no name of a tensor
                y = {a.stem: y[b.stem]}
            return _alone(judge_dumps(x, y, name=name, tier=tier, kind=kind), a, b, left.skipped, right.skipped)
    except KeyCollision as e:
        cause = Cause("duplicate", "two records have one key: a shard or a retry overwrote or repeated another")
        return Verdict(name, Status.INVALID, str(e), tier=str(tier), causes=[cause], first_bad=e.place)
    except (InputError, OSError, UnicodeError) as e:
        return Verdict(name, Status.INVALID, str(e), tier=str(tier))


def _unmapped(rules_a: Any, rules_b: Any, what: str) -> None:
    """A mapping that nothing would ask is refused: it was meant to do something."""
    if rules_a is not None or rules_b is not None:
        raise InputError(f"a mapping was given for {what}", "files of tensors where there is one")


def _alone(verdict: Verdict, a: Path, b: Path, skipped_a: Mapping[str, Any] | None = None, skipped_b: Mapping[str, Any] | None = None) -> Verdict:
    """A recording always agrees with itself; and entries of a file that are no numbers are named."""
    x, y = skipped_a or {}, skipped_b or {}
    beside = sorted({*x, *y})
    verdict = never_itself(verdict, a, b)
    if beside:
        verdict.info["not_compared"] = beside
        differing = [n for n in beside if n not in x or n not in y or x[n] != y[n]]
        if differing:
            verdict.info["differ_too"] = differing
        if verdict.green:
            verdict.reason = "; ".join(filter(None, (verdict.reason, f"numbers only; not compared: {', '.join(beside[:8])}"
                                                     + (f" (not the same on both sides: {', '.join(differing[:8])})" if differing else ""))))
    return verdict


def never_itself(verdict: Verdict, a: Path, b: Path) -> Verdict:
    """What is green because a path was compared with itself (also by a link, symbolic or hard, of the path or of every file in it) is NOT_RUN."""
    if not verdict.green or not _same_files(a, b):
        return verdict
    return Verdict(verdict.name, Status.NOT_RUN, "both are one and the same recording: nothing was compared", verdict.tier,
                   {unit: Coverage(0, c.expected) for unit, c in verdict.coverage.items()})


def _same_files(a: Path, b: Path) -> bool:
    if os.path.samefile(a, b):
        return True
    if not (a.is_dir() and b.is_dir()):
        return False
    sides = [{p.name: p for p in side.iterdir() if p.suffix == ".safetensors"} for side in (a, b)]
    return bool(sides[0]) and sides[0].keys() == sides[1].keys() and all(
        os.path.samefile(p, sides[1][n]) for n, p in sides[0].items())


def judge_dumps(a: Mapping[str, Any], b: Mapping[str, Any], *, name: str, tier: str | float, kind: str = "auto") -> Verdict:
    """Two sets of named tensors of unknown kind."""
    keys = [_keys(d) for d in (a, b)]
    if kind == "logprobs" or (kind == "auto" and all(lp and ids for lp, ids, _ in keys)):
        verdict = _logprobs(a, b, keys, name, tier)
        more = [n for n in _LOGPROBS if keys[0][0] == keys[1][0] != n and n in a and n in b and _alike(a[n], a[keys[0][0]])]
        if more:  # of the same tokens, under the same mask
            rest = [_logprobs(a, b, [(n, *ks[1:]) for ks in keys], f"{name}.{n}", tier) for n in more]
            verdict = _with(verdict, rest, name)
            keys = [(*ks, *more) for ks in keys]
        used = [n for n in (*_BOUNDS, *(f"{n}_padded" for n in _BOUNDS)) if any(k in d for k in _BOUNDS for d in (a, b))]
        for d in (a, b):
            _agree(d, _BOUNDS)
            _agree(d, tuple(f"{n}_padded" for n in _BOUNDS))
        others = [{n: d[n] for n in d if n not in ks and n not in used} for d, ks in zip((a, b), keys, strict=True)]
        if kind == "logprobs" or not any(others):
            return verdict
        beside = judge_dumps(*others, name=f"{name}.tensors", tier=tier)  # what lies beside them is compared as well
        return _with(verdict, [beside], name)
    if kind == "weights" or (kind == "auto" and _looks_like_weights([*a, *b])):
        return weights.judge(a, b, name=name, tier=tier)
    return layers.judge(a, b, name=name, tier=tier)


def _with(first: Verdict, rest: list[Verdict], name: str) -> Verdict:
    """The verdict on log-probs and on what lies beside them; what the first says of itself stays."""
    out = mapping.in_order(name, [first, *rest], tier=first.tier, stats=first.stats, info=first.info)
    out.reason = first.reason if out.green else out.reason
    return out


def _looks_like_weights(names: list[str]) -> bool:
    leaves = [n.rpartition(".")[2] for n in names]
    return bool(leaves) and 2 * sum("weight" in x or "bias" in x for x in leaves) > len(leaves)


def _find(dump: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((n for n in names if n in dump), None)


def _keys(dump: Mapping[str, Any]) -> tuple[Any, ...]:
    """Names of log-probs, token ids and mask; of several those of the shape of the log-probs, where there are such."""
    values = _find(dump, _LOGPROBS)
    fits = [] if values is None else [n for n in (*_TOKENS, *_MASKS) if n in dump and _alike(dump[n], dump[values])]
    return values, *(next((n for n in names if n in fits), None) or _find(dump, names) for names in (_TOKENS, _MASKS))


def _alike(x: Any, y: Any) -> bool:
    return as_source(x).shape == as_source(y).shape


def _logprobs(a: Any, b: Any, keys: list[tuple[Any, ...]], name: str, tier: Any) -> Verdict:
    keys = [ks[:3] for ks in keys]
    if any(ks[0] is None for ks in keys):
        return Verdict(name, Status.NOT_RUN, "no log-probs: no tensor is named " + ", ".join(_LOGPROBS), tier=str(tier))
    loaded = [{k: None if n is None else as_tensor(as_source(d[n], n), n) for k, n in zip("vtm", ks, strict=True)}
              for d, ks in zip((a, b), keys, strict=True)]  # fmt: skip
    pair = as_pair(a[keys[0][0]], b[keys[1][0]], keys[0][0])  # a list of numbers takes the dtype of the other side
    for x, source in zip(loaded, pair, strict=True):
        x["v"] = source.tensor()
    if all(isinstance(d[ks[0]], list) for d, ks in zip((a, b), keys, strict=True)):  # plain numbers, all of them written without a point
        for x in loaded:
            x["v"] = x["v"].double() if x["v"].dtype is torch.int64 else x["v"]
    for x, ks in zip(loaded, keys, strict=True):
        if x["v"].ndim == 0 and x["t"] is not None:
            raise InputError(f"{ks[0]} is a single number beside {x['t'].numel()} token ids", "a log-prob for each token")
    known = _drawn_with(a, b)
    bounds = [_find(d, _BOUNDS) for d in (a, b)]
    if any(bounds) and all(x["t"] is not None for x in loaded):
        packed = [_unpacked(d, n, x) for d, n, x in zip((a, b), bounds, loaded, strict=True)]
        return logprobs.judge(*packed, name=name, tier=tier)
    masks = [x["m"] for x in loaded]
    padded = all(x["t"] is not None and x["m"] is not None and x["t"].shape == x["v"].shape for x in loaded)
    if padded and not _same(masks[0], masks[1]):  # in different ways; under one mask a place is one of the array
        x, y = loaded
        return logprobs.judge(x["v"], y["v"], name=name, tier=tier, tokens_a=x["t"], tokens_b=y["t"], mask_a=x["m"], mask_b=y["m"])
    if (masks[0] is None) != (masks[1] is None) or (masks[0] is not None and not _same(masks[0], masks[1])):
        gate = mapping.compare({"mask": _or_empty(masks[0])}, {"mask": _or_empty(masks[1])}, f"{name}.mask")
        return logprobs.blocked(gate, name)
    x, y = loaded
    if x["t"] is None or y["t"] is None:
        return logprobs.judge(x["v"], y["v"], name=name, tier=tier, mask=masks[0], **known)
    if x["t"].shape != x["v"].shape or y["t"].shape != y["v"].shape or x["v"].ndim > 2:
        flat = [m.flatten() if m is not None and m.shape == side["t"].shape else None for m, side in zip(masks, loaded, strict=True)]
        gate = match.judge(x["t"].flatten(), y["t"].flatten(), f"{name}.tokens", *flat)
        if gate.status is not Status.PASS:
            return logprobs.blocked(gate, name)
        out = logprobs.judge(x["v"], y["v"], name=name, tier=tier, mask=_of_values(masks[0], x["v"]))
        rows = x["v"].numel() if x["v"].ndim <= 2 else x["v"].shape[:-1].numel()
        if out.green and rows != x["t"].numel():  # of a response, or one is missing at an end: told, never silent
            text = f"{rows} log-probs for {x['t'].numel()} token ids"
            out.info["log_probs_of"] = text
            out.reason = "; ".join(filter(None, (out.reason, text)))
        return out
    gate = match.judge(x["t"], y["t"], f"{name}.tokens", masks[0], masks[1])
    if gate.status is not Status.PASS:
        return logprobs.blocked(gate, name)
    inner = logprobs.judge(x["v"], y["v"], name=name, tier=tier, mask=masks[0], tokens=x["t"], **known)
    return logprobs.behind(gate, inner, name)


def _drawn_with(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """What the tokens were drawn from and with, where it was recorded beside the log-probs: for a diagnosis only."""
    out: dict[str, Any] = {}
    n = _find(a, _LOGITS)
    if n is not None and n in b and as_source(a[n], n).size <= diagnose.LARGEST and as_source(a[n], n).dtype in _REAL and bits.is_equal(a[n], b[n]):
        out["logits"] = as_tensor(as_source(a[n], n), n)
    for key in ("temperature", "top_p", "top_k"):
        if key in a and key in b and as_source(a[key], key).size == 1 and bits.is_equal(a[key], b[key]):
            value = as_source(a[key], key).tensor().item()
            if isinstance(value, complex):
                raise InputError(f"{key} is {value}", "a real number")
            out[key] = int(value) if key == "top_k" else float(value)
    return out


def _unpacked(dump: Mapping[str, Any], bounds: str | None, side: dict[str, Any]) -> Any:
    """Sequences that lie one after another, by their bounds; or one a row."""
    if bounds is None:
        return match.sequences(side["t"], side["m"], side["v"])
    padded = _find(dump, tuple(f"{n}_padded" for n in _BOUNDS))
    parts = [as_tensor(as_source(dump[n], n), n).flatten() for n in (bounds, padded) if n]
    return match.Packed(side["t"].flatten(), *parts, mask=side["m"], values=side["v"].flatten() if side["v"].numel() == side["t"].numel() else side["v"])


def _agree(dump: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Bounds that one side holds under several names are one and the same: only the first are read."""
    held = [n for n in names if n in dump]
    for n in held[1:]:
        if as_tensor(as_source(dump[n], n)).flatten().tolist() != as_tensor(as_source(dump[held[0]], held[0])).flatten().tolist():
            raise InputError(f"{held[0]} and {n} of one side do not bound the same sequences", "equal bounds, or one of the two")


def _of_values(mask: Any, values: Any) -> Any:
    """A mask of tokens as one of log-probabilities over the vocabulary, ``[..., V]``; any other shape is judged as it is, and refused."""
    if mask is not None and values.shape[:-1] == mask.shape:
        return mask.bool()[..., None].expand(values.shape)
    return mask


def _or_empty(mask: Any) -> Any:
    return as_tensor([], "mask") if mask is None else mask


def _same(x: Any, y: Any) -> bool:
    return x.shape == y.shape and bool((x.bool() == y.bool()).all())
