"""Does each rank hold the right rows, and is each head in its slot.

Concatenating wrong shards gives back the right tensor, and reading a wrong layout back the wrong way gives back the
right weights. So shards and slots are compared one by one with content computed here, from the full tensor.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from alignment import bits, diagnose, mapping
from alignment.digest import digest
from alignment.errors import InputError
from alignment.places import place_of, rank_dict
from alignment.sources import as_tensor
from alignment.verdict import Cause, Coverage, Place, Status, Verdict


def split_components(full: Any, tp: int, components: Mapping[str, int] | None = None, dim: int = 0) -> dict[int, torch.Tensor]:
    """The right shard of each rank: every component ([Q | K | V ...], sizes along ``dim``) is split on its own."""
    tensor = as_tensor(full, "full tensor")
    sizes = dict(components or {"all": tensor.shape[dim]})
    if sum(sizes.values()) != tensor.shape[dim]:
        raise InputError(f"components {sizes} add up to {sum(sizes.values())}", f"{tensor.shape[dim]}, the size of axis {dim}")
    if any(n % tp for n in sizes.values()):
        raise InputError(f"components {sizes} at tp {tp}", "sizes that divide by tp")
    parts = torch.split(tensor, list(sizes.values()), dim)
    return {r: torch.cat([p.chunk(tp, dim)[r] for p in parts], dim) for r in range(tp)}


def judge_shards(
    full: Any,
    shards: Mapping[Any, Any] | Sequence[Any],
    *,
    components: Mapping[str, int] | None = None,
    dim: int = 0,
    expected: Mapping[Any, Any] | Sequence[Any] | None = None,
    name: str = "weight",
    stage: str = "TP split",
    axis: str = "tp",
) -> Verdict:
    """Each rank's shard against an independently computed one.

    Args:
        full: the whole tensor. shards: rank -> shard, or a list in rank order.
        components: sizes of the packed components along ``dim``, in order, e.g. {"Q": 4, "K": 4, "V": 8}.
        expected: rank -> right shard, where the split is none of even components.
    The reason names the first wrong row and which row of the full tensor it holds instead.
    """
    held = {_number(r, axis): x for r, x in (shards.items() if isinstance(shards, Mapping) else enumerate(shards))}
    tensor = as_tensor(full, name)
    if not held:
        return Verdict(f"{name}.shards", Status.NOT_RUN, "no rank holds a shard", coverage={"shards": Coverage(0, 1)})
    if dim >= tensor.ndim:
        raise InputError(f"dim {dim} of a tensor of shape {list(tensor.shape)}", "an axis it has")
    labels = _labels(tensor, components, dim)
    if len(held) > 1 and dim < tensor.ndim and all(bits.is_equal(tensor, x) for x in held.values()):
        cause = Cause("not_split", f"every {axis} rank holds the full tensor: it was replicated, not split", 0.0)
        return Verdict(f"{name}.shards", Status.INVALID, cause.text, coverage={"shards": Coverage(0, len(held))},
                       first_bad=Place(stage=stage, tensor=name, rank={axis: int(min(held))}), causes=[cause])  # fmt: skip
    surplus = _padding(tensor, held, dim, name, axis) if expected is None and components is None else None
    if surplus is not None:
        return surplus
    want = split_components(tensor, len(held), components, dim) if expected is None else (
        {_number(r, axis): x for r, x in (expected.items() if isinstance(expected, Mapping) else enumerate(expected))})  # fmt: skip
    children = []
    for rank in [*want, *(r for r in held if r not in want)]:
        place = Place(stage=stage, tensor=name, rank={axis: int(rank)})
        child = f"{name}[{axis}{rank}]"
        if rank not in held or rank not in want:
            text = f"rank {rank} {'holds nothing' if rank not in held else 'is not expected'}"
            children.append(Verdict(child, Status.INVALID, text, coverage={"shards": Coverage(0, 1)}, first_bad=place))
            continue
        verdict = bits.judge(want[rank], held[rank], child, place=place)
        verdict.coverage["shards"] = Coverage(1, 1)
        if verdict.status is Status.FAIL and verdict.first_bad and verdict.first_bad.index and not verdict.stats.get("problem"):
            _wrong_row(verdict, as_tensor(want[rank]), as_tensor(held[rank]), tensor, labels, dim)
            twin = next((r for r in want if r != rank and bits.is_equal(want[r], held[rank])), None)
            if twin is not None:
                text = f"{axis} rank {rank} holds the shard of {axis} rank {twin}" + (
                    ", as that rank does" if twin in held and bits.is_equal(held[twin], held[rank]) else ": the ranks are swapped")  # fmt: skip
                verdict.causes = [Cause("wrong_shard", text, 0.0, {"rank": rank, "holds": twin})]
        elif verdict.status is Status.INVALID and not components and (piece := _slice(tensor, held[rank], dim, want, rank, axis)):
            verdict.causes = [Cause("wrong_shard", piece, 0.0, {"rank": rank})]
        children.append(verdict)
    out = mapping.in_order(f"{name}.shards", children)
    try:
        joined = torch.cat([as_tensor(held[r]) for r in sorted(held)], dim)
        out.info["round_trip_equal"] = bits.is_equal(tensor, joined)
    except (RuntimeError, TypeError):
        out.info["round_trip_equal"] = False
    if out.status is Status.FAIL and out.info["round_trip_equal"]:
        out.info["round_trip"] = "concatenating the ranks gives back the full tensor: a round trip does not see this fault"
    return out


def _number(rank: Any, axis: str) -> int:
    """``1``, ``"1"``, ``"tp1"`` and ``{"tp": 1}`` are rank 1."""
    found = {axis: int(rank)} if str(rank).isdigit() else rank_dict(rank)
    if axis not in found:
        raise InputError(f"rank {rank!r}", f"a number, or one with {axis} in it")
    return found[axis]


def _slice(full: torch.Tensor, held: Any, dim: int, want: Mapping[Any, Any], rank: int, axis: str) -> str | None:
    """What a shard of another size holds, where that is one piece of the full tensor."""
    part = as_tensor(held)
    n = part.shape[dim] if part.ndim == full.ndim and part.dtype == full.dtype else 0
    first = next((i for i in range(full.shape[dim] - n + 1) if bits.is_equal(full.narrow(dim, i, n), part)), None) if n else None
    if first is None:
        return None
    size = as_tensor(want[rank]).shape[dim]
    beyond = "; others hold some of them as well" if n > size else ""
    return f"{axis} rank {rank} holds rows {first} to {first + n - 1} of the full tensor, and {size} from {rank * size} on are its own{beyond}"


def _padding(tensor: torch.Tensor, held: Mapping[Any, Any], dim: int, name: str, axis: str) -> Verdict | None:
    """The verdict where the shards together are the full tensor and then padding rows (dim 0 only)."""
    if dim != 0 or not held:
        return None
    ranks, rows = sorted(held), 0
    cause = diagnose.padded(tensor, torch.cat([as_tensor(held[r]) for r in ranks])) if _stackable(tensor, held) else None
    if cause is None or cause.kind != "padded_vocabulary" or cause.evidence["side"] != "b":
        return None
    bad = []
    for r in ranks:
        rows += as_tensor(held[r]).shape[0]
        if any(rows - as_tensor(held[r]).shape[0] <= i < rows for i in cause.evidence["at"]):
            bad.append(Place(stage="export (un-pad)", tensor=name, rank={axis: int(r)}))
    text = f"shape {[rows, *tensor.shape[1:]]} of all shards vs {list(tensor.shape)}: {cause.text}; on {axis} rank {bad[0].rank[axis]}"  # type: ignore[index]
    return Verdict(f"{name}.shards", Status.INVALID, text, coverage={"shards": Coverage(len(ranks) - len(bad), len(ranks))},
                   first_bad=bad[0], downstream=bad[1:], causes=[cause])  # fmt: skip


def _stackable(tensor: torch.Tensor, held: Mapping[Any, Any]) -> bool:
    parts = [as_tensor(x) for x in held.values()]
    return all(p.dtype == tensor.dtype and p.ndim == tensor.ndim and p.shape[1:] == tensor.shape[1:] for p in parts)


def _labels(tensor: torch.Tensor, components: Mapping[str, int] | None, dim: int) -> list[str]:
    if not components:
        return [f"row {i}" for i in range(tensor.shape[dim])]
    return [f"{c} row {i}" for c, n in components.items() for i in range(n)]


def _wrong_row(verdict: Verdict, want: torch.Tensor, held: torch.Tensor, full: torch.Tensor, labels: list[str], dim: int) -> None:
    w, h, f = (t.movedim(dim, 0) for t in (want, held, full))
    wrong = next(i for i in range(w.shape[0]) if not bits.is_equal(w[i], h[i]))
    found = [diagnose.row_map(f, x[wrong : wrong + 1])[0] for x in (h, w)]
    verdict.first_bad = dataclasses.replace(verdict.first_bad or Place(), row=wrong)
    has = labels[found[0]] if found[0] is not None else "content that is nowhere in the full tensor"
    packed = not labels[0].startswith("row ")
    wants = labels[found[1]] if found[1] is not None else f"row {wrong}"
    verdict.reason = f"first wrong row {wrong}: has {has}, wants {wants}; {verdict.reason}"
    if found[0] is not None and found[1] is not None:
        # Which components lie where is known only if there are some.
        told, evidence = f"row {wrong} has {has}, wants {wants}", {"row": wrong, "has": has, "wants": wants}
        verdict.causes = [Cause("uneven_split", f"packed components were not split one by one: {told}", 0.0, evidence) if packed else
                          Cause("moved_rows", f"rows were cut or put elsewhere: {told}", 0.0, evidence)]


def judge_slots(
    expected: Mapping[str, Any] | Sequence[str], actual: Mapping[str, Any] | Sequence[str], *, name: str = "slots",
    place: Place | None = None,
) -> Verdict:
    """Each slot (head, expert, component) against its content; ``info["slots"]`` is the table slot -> what it holds.

    Either {slot: tensor} on both sides, or two lists of labels: what each place should hold and what it does hold.
    """
    if not isinstance(expected, Mapping) and not isinstance(actual, Mapping):
        want, have = [str(x) for x in expected], [str(x) for x in actual]
        pairs = [(w, h, w == h) for w, h in zip(want, have, strict=False)]
        missing = abs(len(want) - len(have))
    elif isinstance(expected, Mapping) and isinstance(actual, Mapping):
        by_digest: dict[str, str] = {}
        for slot, tensor in expected.items():
            by_digest.setdefault(digest(tensor), str(slot))
        pairs = []
        for slot, tensor in expected.items():
            if slot in actual:
                same = bits.is_equal(tensor, actual[slot])
                holds = str(slot) if same else by_digest.get(digest(actual[slot]), "other content")
                pairs.append((str(slot), holds, same))
        missing = len(set(expected) ^ set(actual))
    else:
        raise InputError("a mapping on one side and a list on the other", "two mappings or two lists of labels")
    wrong = [(w, h) for w, h, same in pairs if not same]
    shown = ", ".join(f"{w}←{h}" for w, h in wrong[:16])
    total = len(pairs) + missing
    status = Status.FAIL if wrong else Status.INVALID if missing else Status.PASS if pairs else Status.NOT_RUN
    reason = f"{len(wrong)} of {total} slots wrong: {shown}" if wrong else f"{missing} slot(s) on one side only" if missing else ""
    moved = bool(wrong) and all(h != "other content" for _, h in wrong)
    return Verdict(
        name, status, reason, coverage={"slots": Coverage(len(pairs), total)},
        first_bad=mapping.merged(place or Place(), place_of(wrong[0][0])) if wrong else place if missing else None,
        causes=[Cause("slot_order", f"every wrong slot holds the content of another one: {shown}", 0.0, {"slots": dict(wrong)})] if moved else [],
        downstream=[place_of(w) for w, _ in wrong[1:]],
        info={"slots": {w: h for w, h, _ in pairs}},
    )  # fmt: skip


def split_qkv(fused: Any, heads: int, kv_heads: int, layout: str = "grouped") -> dict[str, torch.Tensor]:
    """A fused QKV weight [(heads + 2 kv_heads) * D, ...] as {q0: [D, ...], .., k0, .., v0, ..}.

    ``layout``: "grouped" per KV head (as Megatron reads it) or "head-major" (q.. k.. v.., as Hugging Face files are
    concatenated).
    """
    tensor = as_tensor(fused, "fused QKV")
    slots = heads + 2 * kv_heads
    if heads < 1 or kv_heads < 1 or heads % kv_heads or tensor.shape[0] % slots:
        raise InputError(f"{tensor.shape[0]} rows for {heads} heads and {kv_heads} KV heads", f"a multiple of {slots}")
    order = diagnose.qkv_order(heads, kv_heads)
    if layout == "head-major":
        order = [*(f"q{i}" for i in range(heads)), *(f"k{i}" for i in range(kv_heads)), *(f"v{i}" for i in range(kv_heads))]
    elif layout != "grouped":
        raise InputError(f"layout {layout!r}", "'grouped' or 'head-major'")
    return dict(zip(order, tensor.chunk(slots, 0), strict=True))


def judge_qkv(
    q: Any, k: Any, v: Any, fused: Any, *, heads: int, kv_heads: int, layout: str = "grouped", name: str = "linear_qkv"
) -> Verdict:
    """Every head of ``q`` [heads * D, ...], ``k``, ``v`` [kv_heads * D, ...] in its slot of ``fused`` as ``layout``
    reads it. Some heads are right by accident in a wrong layout, so every one is compared."""
    parts = {"q": (as_tensor(q, "q"), heads), "k": (as_tensor(k, "k"), kv_heads), "v": (as_tensor(v, "v"), kv_heads)}
    have = split_qkv(fused, heads, kv_heads, layout)
    want = {f"{n}{i}": piece for n, (t, count) in parts.items() for i, piece in enumerate(t.chunk(count, 0))}
    out = judge_slots({s: want[s] for s in have}, have, name=name, place=Place(module=name))
    whole = torch.cat([parts[n][0] for n in "qkv"], 0)
    if out.status is Status.FAIL and bits.is_equal(whole, fused):
        out.causes.insert(0, Cause("qkv_layout", f"fused head-major [q.. k.. v..], read {layout} per KV head", 0.0))
        out.info["round_trip"] = "cutting it head-major gives back q, k and v: a round trip does not see this fault"
    return out
