"""What one side of a run writes down, so that it can be compared with the other side, or with itself, later.

A run is a directory. Each rank writes one safetensors file and one JSON index; the index appears last, so that a run
that was killed leaves no record rather than half of one. Every entry is keyed by kind, name, step, request **and**
the full parallel rank: two shards can never overwrite each other, and a key that is there already is refused.
"""
from __future__ import annotations

import dataclasses
import json
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from alignment import files
from alignment.dumps import check_name, open_dump, read_json
from alignment.errors import InputError, KeyCollision
from alignment.sources import as_tensor

SCHEMA = 1
AXES = ("dp", "pp", "tp", "ep", "cp")
KINDS = ("logprobs", "layer", "routing", "weight", "buffer", "logits", "other")
_INDEX = ".index.json"
_KIND = "alignment-records"
_FIELDS = {"kind", "name", "request", "step", "tensor"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One recorded tensor. ``tokens`` and ``positions`` say what its rows are; None where rows are not tokens."""

    kind: str
    name: str
    value: Any
    request: str | None = None
    step: int | None = None
    tokens: tuple[int, ...] | None = None
    positions: tuple[int, ...] | None = None
    rank: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything that tells this entry from another one."""
        rank = tuple(self.rank.get(a, 0) for a in AXES)
        return (self.kind, self.name, self.step, self.request, rank)


def full_rank(rank: Mapping[str, int] | None) -> dict[str, int]:
    """All five axes; an axis that is not named is 0. Raises InputError for an unknown axis."""
    rank = dict(rank or {})
    if set(rank) - set(AXES) or not all(type(v) is int and v >= 0 for v in rank.values()):
        raise InputError(f"a rank {rank}", "non-negative integers for " + ", ".join(AXES))
    return {a: rank.get(a, 0) for a in AXES}


def rank_name(rank: Mapping[str, int]) -> str:
    return "-".join(f"{a}{rank[a]}" for a in AXES)


class RecordWriter:
    """Collects the records of one rank and writes them at :meth:`close` (or at the end of ``with``).

    Args:
        path: the directory of the run; made if it is not there.
        rank: {"dp": .., "pp": .., "tp": .., "ep": .., "cp": ..}; axes left out are 0.
        world: how many ranks write to this run: fewer records than that are INVALID when read.
        contract: fingerprint of the contract in effect. kernels: op -> implementation that ran.
        fingerprints: facts that must be equal on both sides (a hash seed, an autotune choice).
        environment: facts that are only printed.
    An exception inside ``with`` writes nothing.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, rank: Mapping[str, int] | None = None, world: int = 1, side: str = "",
        contract: str = "", kernels: Mapping[str, Any] | None = None, fingerprints: Mapping[str, Any] | None = None,
        environment: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.path, self.rank = Path(path), full_rank(rank)
        self.head = {"schema": SCHEMA, "kind": _KIND, "side": side, "rank": self.rank, "world": world,
                     "contract": contract, "kernels": dict(kernels or {}), "fingerprints": dict(fingerprints or {}),
                     "environment": dict(environment or {})}  # fmt: skip
        self._entries: dict[tuple[Any, ...], Entry] = {}
        if self.index_path.exists():
            raise KeyCollision(f"{self.index_path} is there already", "a run directory without records of this rank",
                               "record into a new directory, or give this process its own parallel rank")  # fmt: skip

    @property
    def index_path(self) -> Path:
        return self.path / (rank_name(self.rank) + _INDEX)

    def add(
        self, kind: str, name: str, value: Any, *, request: str | None = None, step: int | None = None,
        tokens: Sequence[int] | torch.Tensor | None = None, positions: Sequence[int] | torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Record a copy of ``value``. Rows are tokens where ``tokens`` are given (one id and one position a row;
        positions count from 0 by default). Raises KeyCollision if this key was recorded before."""
        if kind not in KINDS:
            raise InputError(f"kind {kind!r}", "one of " + ", ".join(KINDS))
        if not isinstance(request, str | None):
            raise InputError(f"{name}: request {request!r} of type {type(request).__name__}", "text, or None")
        step = None if step is None else _whole(step, name)
        tensor = as_tensor(value, name).detach().to("cpu", copy=True).contiguous()
        ids = None if tokens is None else tuple(int(t) for t in tokens)
        at = None if ids is None else tuple(range(len(ids))) if positions is None else tuple(int(p) for p in positions)
        if ids is not None and (tensor.ndim == 0 or len(ids) != tensor.shape[0] or len(ids) != len(at or ())):
            raise InputError(f"{name}: {len(ids)} tokens and {len(at or ())} positions for shape {list(tensor.shape)}", "one a row")
        entry = Entry(kind, check_name(name, "the caller"), tensor, request, step, ids, at, self.rank)
        if entry.key in self._entries:
            raise KeyCollision(f"{kind} {name} (request {request}, step {step}) is recorded twice by one rank",
                               "one record a key", "add the request or the step to the key")  # fmt: skip
        self._entries[entry.key] = entry

    def close(self) -> Path:
        """Write the data, then the index. Returns the path of the index."""
        self.path.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, torch.Tensor] = {}
        rows = []
        for i, entry in enumerate(self._entries.values()):
            row = {"kind": entry.kind, "name": entry.name, "request": entry.request, "step": entry.step, "tensor": f"{i:06d}"}
            tensors[f"{i:06d}"] = entry.value
            for field in ("tokens", "positions"):
                values = getattr(entry, field)
                if values is not None:
                    tensors[f"{i:06d}.{field}"] = torch.tensor(values, dtype=torch.int64)
            rows.append(row)
        data = self.path / (rank_name(self.rank) + ".safetensors")
        files.replace(data, lambda aside: save_file(tensors, aside))
        index = {**self.head, "data": data.name, "bytes": data.stat().st_size, "entries": rows}
        text = json.dumps(index, indent=1, sort_keys=True, default=str)
        files.write_text(self.index_path, text)
        return self.index_path

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self.close()


def _whole(step: Any, name: str) -> int:
    """A step as Python's integer: numpy's and torch's would be text in JSON, which no reader takes for a step."""
    try:
        if not isinstance(step, bool):
            return operator.index(step)
    except TypeError:
        pass
    raise InputError(f"{name}: step {step!r} of type {type(step).__name__}", "a whole number, or None")


def is_records(path: str | os.PathLike[str]) -> bool:
    """Whether a directory holds at least one index of records."""
    return Path(path).is_dir() and bool(_indexes(Path(path)))


def _indexes(path: Path) -> list[Path]:
    """Indexes of records. A checkpoint in shards has an index too, named after its format."""
    found = (p for p in path.glob("*" + _INDEX) if not p.name.endswith((".safetensors" + _INDEX, ".bin" + _INDEX)))
    return sorted(found, key=lambda p: [(int(x), "") if x.isdigit() else (-1, x) for x in re.split(r"(\d+)", p.name)])  # pp2 before pp10


class RecordReader:
    """All records of one run, every rank. Raises InputError for an index or data that is not what it says.

    ``heads`` are the heads of the indexes by rank name; ``world`` how many ranks should be there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.heads: dict[str, dict[str, Any]] = {}
        self._rows: list[tuple[dict[str, Any], dict[str, Any], Any]] = []
        self._dumps = []
        indexes = _indexes(self.path) if self.path.is_dir() else []
        if not indexes:
            raise InputError(f"{self.path} holds no records", f"files named <rank>{_INDEX}")
        try:
            for index in indexes:
                self._open(index)
        except BaseException:
            self.close()
            raise
        self.world = max(h["world"] for h in self.heads.values())

    def _open(self, index: Path) -> None:
        head = read_json(index)
        shapes = {"schema": int, "rank": dict, "world": int, "data": str, "bytes": int, "entries": list}
        wrong = [k for k, t in shapes.items() if not isinstance(head, dict) or not isinstance(head.get(k), t)]
        if wrong:
            raise InputError(f"{index.name} has no usable {wrong[0]!r}", "an index of records", "record the run again")
        if head["schema"] != SCHEMA:
            raise InputError(f"{index.name} has schema {head['schema']}", f"schema {SCHEMA}", "read it with the version that wrote it")
        known = {*shapes, "kind", "side", "contract", "kernels", "fingerprints", "environment"}
        if set(head) - known or head.get("kind", _KIND) != _KIND:
            odd = sorted(set(head) - known) or ["kind"]
            raise InputError(f"{index.name} has {odd[0][:80]!r}: {str(head[odd[0]])[:80]}", "the fields of an index of records",
                             "it was changed after it was written: record the run again")  # fmt: skip
        rank = full_rank(head["rank"])
        if rank_name(rank) + _INDEX != index.name:
            raise InputError(f"{index.name} says that it is rank {rank_name(rank)}", "the rank of its name")
        if not re.fullmatch(r"[A-Za-z0-9._-]+", head["data"]) or head["data"].startswith("."):
            raise InputError(f"{index.name} points to {head['data'][:80]!r}", "a file beside it")
        data = self.path / head["data"]
        if not data.is_file() or data.stat().st_size != head["bytes"]:
            found = data.stat().st_size if data.is_file() else "no file"
            raise InputError(f"{head['data']}: {found}", f"{head['bytes']} bytes", "the run was cut off while writing, or the file changed")
        dump = open_dump(data)
        self._dumps.append(dump)
        seen: set[tuple[Any, ...]] = set()
        for row in head["entries"]:
            if not isinstance(row, dict) or row.get("kind") not in KINDS or not isinstance(row.get("tensor"), str) \
                    or row["tensor"] not in dump or set(row) - _FIELDS:  # fmt: skip
                raise InputError(f"{index.name} has an entry {str(row)[:120]}", "kind, name and a tensor of the data file")
            if not isinstance(row.get("request"), str | None) or not (row.get("step") is None or type(row["step"]) is int):
                raise InputError(f"{index.name} has an entry {str(row)[:120]}", "a request that is text or null, and a step that is a number or null")
            check_name(row.get("name"), index.name)
            key = (row["kind"], row["name"], row.get("step"), row.get("request"))
            if key in seen:
                raise KeyCollision(f"{index.name} has {row['kind']} {row['name']} (request {row.get('request')}, step {row.get('step')}) twice",
                                   "one record a key")  # fmt: skip
            seen.add(key)
            self._rows.append((row, rank, dump))
        used = [row["tensor"] for row in head["entries"]]
        spare = sorted(set(dump) - {n for t in used for n in (t, f"{t}.tokens", f"{t}.positions")})
        if spare or len(set(used)) < len(used):
            raise InputError(f"{head['data']} holds {len(spare)} tensor(s) that {index.name} does not name, and {len(used) - len(set(used))} "
                             "of its entries share one", "one entry for each tensor", "an entry was lost: record the run again")  # fmt: skip
        self.heads[rank_name(rank)] = head

    def __iter__(self) -> Iterator[Entry]:
        for row, rank, dump in self._rows:
            def ints(field: str, row: dict = row, dump: Any = dump) -> tuple[int, ...] | None:
                name = f"{row['tensor']}.{field}"
                return tuple(dump[name].tensor().tolist()) if name in dump else None
            yield Entry(row["kind"], row["name"], dump[row["tensor"]], row.get("request"), row.get("step"),
                        ints("tokens"), ints("positions"), rank)  # fmt: skip

    def __len__(self) -> int:
        return len(self._rows)

    def close(self) -> None:
        for dump in self._dumps:
            dump.close()

    def __enter__(self) -> RecordReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
