"""Causes that move numbers without changing them: permutations, transposes, shifts, paddings. Exact or not given."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from alignment import bits
from alignment.diagnose.blocks import moved_blocks
from alignment.diagnose.numbers import same_bits, varied
from alignment.digest import digest
from alignment.sources import Source, as_source, as_tensor
from alignment.verdict import Cause


def lag(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    """b[i + k] == a[i] along the last axis (1-D and 2-D) or along the rows."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return None
    for axis in dict.fromkeys((a.ndim - 1, 0)):
        n = a.shape[axis] if a.ndim else 0
        for k in range(1, min(n // 2, 64) + 1):
            for sign, x, y in ((1, a, b), (-1, b, a)):
                head, tail = x.narrow(axis, 0, n - k), y.narrow(axis, k, n - k)
                if n - k >= 3 and varied(head) and same_bits(head, tail):
                    text = f"side b is side a shifted by {sign * k} along axis {axis}: off by {k} position(s)"
                    return Cause("lag", text, 0.0, {"lag": sign * k, "axis": axis})
    return None


def lag_of_rows(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], what: str) -> list[Cause]:
    """The values of each request [T] that differs are shifted by one same number of positions; requests are short, so the
    evidence is that of all together."""
    differing = [(x, y) for x, y in pairs if x.shape == y.shape and x.dtype == y.dtype and not torch.equal(x, y)]
    if not differing or any(x.ndim != 1 for x, _ in differing):
        return []
    for k in range(1, 9):
        for sign in (1, -1):
            moved_pairs = [(x, y) if sign == 1 else (y, x) for x, y in differing if x.numel() > k]
            ends = [(u[:-k], v[k:]) for u, v in moved_pairs]
            seen = torch.cat([u for u, _ in ends]) if ends else torch.empty(0)
            if len(ends) == len(differing) and seen.numel() >= 4 and seen.unique().numel() >= 3 and all(same_bits(u, v) for u, v in ends):
                text = f"side b is side a shifted by {sign * k} within each of {len(ends)} {what}(s) that differ: off by {k} position(s)"
                return [Cause("lag", text, 0.0, {"lag": sign * k, "axis": 0})]
    return []


def moved(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    """Transpose, swapped halves, interleaved against halves, QKV order, or another permutation of the rows."""
    if a.dtype != b.dtype or a.numel() != b.numel() or not varied(a):
        return None
    if a.ndim >= 2 and same_bits(a.transpose(-1, -2).contiguous(), b):
        square = "the shapes cannot tell: the matrix is square" if a.shape == b.shape else "shapes are transposed too"
        return Cause("transposed", f"matches after transpose ({square})", 0.0, {"square": a.shape == b.shape})
    if a.shape != b.shape:
        return None
    for axis in dict.fromkeys((a.ndim - 1, 0)):
        n = a.shape[axis]
        if n % 2 or n < 4:
            continue
        first, second = a.narrow(axis, 0, n // 2), a.narrow(axis, n // 2, n // 2)
        if same_bits(torch.cat([second, first], axis), b):
            text = f"the two halves along axis {axis} are swapped (gate/up, or query/gate order)"
            return Cause("swapped_halves", text, 0.0, {"axis": axis})
        split = torch.stack([first, second], axis + 1).flatten(axis, axis + 1)
        for x, y, name in ((split, b, "interleaved"), (a, torch.stack(
                [b.narrow(axis, 0, n // 2), b.narrow(axis, n // 2, n // 2)], axis + 1).flatten(axis, axis + 1), "in halves")):
            if same_bits(x, y):
                text = f"axis {axis} is {name} on side b and not on side a (rotary or gate/up layout)"
                return Cause("interleaved", text, 0.0, {"axis": axis, "b": name})
    return qkv(a, b) or moved_blocks(a, b) or _permuted(a, b)


def row_map(a: Any, b: Any) -> list[int | None]:
    """For each row of b the row of a with the same bits (None: no such row). Equal rows of a: the nearest place."""
    ta, tb = as_tensor(a, "a"), as_tensor(b, "b")
    at: dict[str, list[int]] = {}
    for i in range(ta.shape[0]):
        at.setdefault(digest(ta[i]), []).append(i)
    return [min(at.get(digest(tb[j]), []), key=lambda i, j=j: abs(i - j), default=None) for j in range(tb.shape[0])]


def _rows_of(a: torch.Tensor, b: torch.Tensor) -> list[int] | None:
    """The permutation of rows from a to b, if it is one and rows are distinct."""
    if a.ndim < 1 or a.shape != b.shape or not 2 <= a.shape[0] <= 65536:
        return None
    found = row_map(a, b)
    if any(i is None for i in found) or len(set(found)) != len(found) or found == list(range(len(found))):
        return None
    return [int(i) for i in found if i is not None]


def _permuted(a: torch.Tensor, b: torch.Tensor) -> Cause | None:
    order = _rows_of(a, b) if a.ndim >= 2 else None
    if order is None:
        return None
    n = len(order)
    if n > 3 and order == [(i + order[0]) % n for i in range(n)]:
        k = -order[0] if 2 * order[0] <= n else n - order[0]
        return Cause("lag", f"the rows of side b are those of side a, shifted by {k} and wrapped around", 0.0, {"lag": k, "axis": 0, "cyclic": True})
    for d in (d for d in range(4, min(n // 2, 512) + 1, 2) if n % d == 0):
        halves = [g * d + i * (d // 2) + j for g in range(n // d) for j in range(d // 2) for i in range(2)]
        for rows, how in ((halves, "interleaved on side b and in halves on side a"), (_inverse(halves), "in halves on side b and interleaved on side a")):
            if order == rows:
                text = f"the {d} rows of each of {n // d} heads are {how}: the rotary layout of a query or key projection"
                return Cause("rotary_layout", text, 0.0, {"heads": n // d, "rows": d})
    wrong = [(i, j) for i, j in enumerate(order) if i != j]
    shown = ", ".join(f"{i}←{j}" for i, j in wrong[:8])
    text = f"the rows are permuted ({len(wrong)} of {len(order)} moved: {shown}{' ...' if len(wrong) > 8 else ''})"
    return Cause("permutation", text, 0.0, {"rows": order[:256], "moved": len(wrong)})


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def qkv_order(heads: int, kv_heads: int) -> list[str]:
    """Slot names of a fused QKV grouped by KV head: [q.. of group 0, k0, v0, q.. of group 1, k1, v1 ...]."""
    per = heads // kv_heads
    return [s for g in range(kv_heads) for s in [*(f"q{g * per + i}" for i in range(per)), f"k{g}", f"v{g}"]]


def qkv(a: Any, b: Any, heads: int | None = None, kv_heads: int | None = None) -> Cause | None:
    """One side is fused head-major [q.. k.. v..], the other grouped per KV head. Rows first."""
    ta, tb = as_tensor(a, "a"), as_tensor(b, "b")
    order = _rows_of(ta, tb)
    if order is None:
        return None
    n = len(order)
    shapes = [(heads, kv_heads)] if heads and kv_heads else [
        (g * r, g) for g in range(2, 129) for r in range(1, 33) if n % (g * (r + 2)) == 0]  # fmt: skip
    for h, g in shapes:
        slots = h + 2 * g
        d = n // slots
        flat = [*(f"q{i}" for i in range(h)), *(f"k{i}" for i in range(g)), *(f"v{i}" for i in range(g))]
        grouped = [flat.index(s) for s in qkv_order(h, g)]
        to_grouped = [s * d + i for s in grouped for i in range(d)]
        inverse = _inverse(to_grouped)
        for rows, text in ((to_grouped, "side a is head-major, side b grouped per KV head"),
                           (inverse, "side a is grouped per KV head, side b head-major")):  # fmt: skip
            if order == rows:
                return Cause("qkv_layout", f"QKV layout: {text} ({h} query heads, {g} KV heads, {d} rows a head)", 0.0,
                             {"heads": h, "kv_heads": g, "rows": d})
    return None


def padded(a: Any, b: Any, tp: int | None = None) -> Cause | None:
    """One side has more rows: the other's, and then padding. Reads a piece at a time."""
    sa, sb = as_source(a), as_source(b)
    if not sa.shape or not sb.shape or sa.shape[1:] != sb.shape[1:] or sa.dtype != sb.dtype or sa.shape == sb.shape:
        return None
    (short, long), side = ((sa, sb), "b") if sa.shape[0] < sb.shape[0] else ((sb, sa), "a")
    n, total = short.shape[0], long.shape[0]
    per_row = long.words // max(total, 1)
    if n == 0:
        return None
    if not bits.is_equal(short, long.rows(0, n)):
        return _padded_inside(short, long, side, tp)
    rest = (long.read(i * per_row, (i + 1) * per_row) for i in range(n, total))
    zero = all(not row.any() for row in rest)
    if side == "a" and not zero:  # what is expected has content there: side b lost it
        return _lost_rows(n, total)
    what = "all zero" if zero else "with content of their own"
    text = (f"stage export (un-pad): side {side} keeps {total - n} padding row(s) {n} to {total - 1} ({what}); the first "
            f"{n} rows are equal")  # fmt: skip
    evidence: dict[str, Any] = {"side": side, "rows": n, "padding": total - n, "zero": zero, "at": list(range(n, total))}
    if tp and total % tp == 0:
        ranks = list(range(n // (total // tp), tp))
        evidence["tp_ranks"] = ranks
        text += f"; the padding is on tp rank {', '.join(map(str, ranks))}"
    return Cause("padded_vocabulary", text, 0.0, evidence)


def _lost_rows(n: int, total: int) -> Cause:
    if total % n == 0:
        text = f"side b holds the first of {total // n} equal parts of the rows of side a: the shard of one rank, not gathered"
        return Cause("shard", text, 0.0, {"side": "b", "axis": 0, "part": 0, "parts": total // n})
    text = f"side b lacks the rows {n} to {total - 1} of {total}, which have content on side a: truncated"
    return Cause("truncated", text, 0.0, {"side": "b", "axis": 0, "lost": [n, total - 1]})


def _padded_inside(short: Source, long: Source, side: str, tp: int | None) -> Cause | None:
    """Zero rows between the rows of the other side: every rank padded its own shard, or one in the middle did."""
    n, total = short.shape[0], long.shape[0]
    at, i = [], 0
    step = long.words // total
    for j in range(total):
        row = long.read(j * step, (j + 1) * step)
        if i < n and (row == short.read(i * step, (i + 1) * step)).all():
            i += 1
        elif not row.any() and len(at) < total - n:
            at.append(j)
        else:
            return None
    if i != n:
        return None
    runs = [[at[0], at[0]]]
    for j in at[1:]:
        runs[-1][1:] = [j] if j == runs[-1][1] + 1 else runs[-1][1:]
        if runs[-1][1] != j:
            runs.append([j, j])
    shown = ", ".join(f"{x} to {y}" for x, y in runs[:4])
    text = f"stage export (un-pad): side {side} keeps {len(at)} padding row(s) {shown} (all zero); the other rows are equal"
    evidence: dict[str, Any] = {"side": side, "rows": n, "padding": len(at), "zero": True, "at": at}
    if tp and total % tp == 0:
        evidence["tp_ranks"] = sorted({j // (total // tp) for j in at})
        text += f"; the padding is on tp rank {', '.join(map(str, evidence['tp_ranks']))}"
    return Cause("padded_vocabulary", text, 0.0, evidence)


def experts(a: Mapping[int, Any], b: Mapping[int, Any]) -> Cause | None:
    """What became of the experts: ``{expert id: tensor or list of tensors}`` of both sides, as a permutation or as
    duplicates and losses. Experts that are equal to each other on side a already are not duplicates."""
    def prints(side: Mapping[int, Any]) -> dict[int, str]:
        out = {}
        for e, value in side.items():
            parts = value if isinstance(value, list | tuple) and not isinstance(value[0], int | float) else [value]
            out[int(e)] = "+".join(x if isinstance(x, str) else digest(x) for x in parts)
        return out

    pa, pb = prints(a), prints(b)
    if pa == pb or len(pa) < 2:
        return None
    where: dict[str, list[int]] = {}
    for e, d in pa.items():
        where.setdefault(d, []).append(e)
    source = {e: where.get(d, []) for e, d in sorted(pb.items())}
    wrong = {e: s for e, s in source.items() if e not in s}
    if not wrong or any(not s for s in wrong.values()):
        return None  # some content is new: no permutation and no copy explains it
    shown = ", ".join(f"{e}←{s[0]}" for e, s in list(wrong.items())[:8])
    if sorted(pa.values()) == sorted(pb.values()):
        text = f"expert permutation: {shown}{' ...' if len(wrong) > 8 else ''} ({len(wrong)} of {len(pb)} moved)"
        return Cause("expert_permutation", text, 0.0, {"source": {e: s[0] for e, s in wrong.items()}})
    groups: dict[str, list[int]] = {}
    for e, d in pb.items():
        groups.setdefault(d, []).append(e)
    twins = [sorted(g) for d, g in groups.items() if len(g) > len(where[d])]
    lost = sorted(e for d, owners in where.items() for e in owners if d not in groups)
    if not twins:  # content that is there under another number, and no copy of it
        text = f"side b has {len(pb)} of {len(pa)} experts, under other numbers: {shown} (local numbers of one rank)"
        return Cause("expert_permutation", text, 0.0, {"source": {e: s[0] for e, s in wrong.items()}, "lost": lost})
    text = (f"experts duplicated {_sets(twins)}, content lost {{{','.join(map(str, lost))}}}: {shown} "
            "(a broadcast or gather from the wrong owner)")  # fmt: skip
    return Cause("expert_duplicates", text, 0.0,
                 {"duplicates": twins, "lost": lost, "source": {e: s[0] for e, s in wrong.items()}})


def _sets(groups: list[list[int]]) -> str:
    return " ".join("{" + ",".join(map(str, g)) + "}" for g in groups)
