"""Writes the ledger of a run (:mod:`alignment.runlog` says what is in it, and reads it).

Every line is one ``write`` to a file opened for appending and is on disk before the loop goes on. The digests of
weights are those that the update takes anyway; what the ledger costs besides is measured and written into it.
"""
from __future__ import annotations

import contextlib
import json
import math
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from alignment import runlog
from alignment.digest import combined, digest
from alignment.verdict import Verdict
from vime.errors import BadInput
from vime.rl.batch import Trajectory

#: Hex digits kept of the digest of one part; the digest of the whole quantity is over all of them in full length.
_SHORT = 16


class LedgerExists(BadInput):
    """The folder holds the ledger of another run, which would be lost or mixed up."""


def bits(value: float) -> str:
    """The 16 hex digits of a float64."""
    return struct.pack(">d", value).hex()


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def short(verdict: Verdict) -> dict[str, Any]:
    """A verdict as a step's line has it: plain JSON of what :meth:`Verdict.from_dict` needs for one that counts the same. Children,
    numbers and places further on are left out: there may be one for every tensor."""
    said = verdict.to_dict()
    out = {field: said[field] for field in ("name", "verdict", "reason", "tier", "coverage", "first_bad")}
    out["causes"] = [{"kind": c.kind, "text": c.text} for c in verdict.causes]
    plain: dict[str, Any] = json.loads(json.dumps(out, default=lambda x: x.item() if isinstance(x, np.generic) else str(x)))
    return plain


class RunLog:
    """The ledger of one run; ``folder`` empty means none, and every method does nothing.

    Args:
        folder: where ``ledger.jsonl`` goes.
        resumed: True where the run goes on from a checkpoint: an existing ledger is continued.

    Raises:
        LedgerExists: a ledger is there and the run does not go on from a checkpoint.
    """

    def __init__(self, folder: str, resumed: bool = False) -> None:
        self.path = Path(folder) / runlog.FILE if folder else None
        self._fd = -1
        self._seconds = 0.0
        self._began = time.perf_counter()
        self._digests: dict[str, str] = {}
        self._parts: dict[str, dict[str, str]] = {}
        self._numbers: dict[str, Any] = {}
        self._sent: list[str] = []
        self._in_flight = 0
        self.cost = (0.0, 0.0)  # seconds in the ledger, seconds in all steps
        self.continued = False  # an earlier part of this run is in the file
        self.before: runlog.Ledger | None = None  # and what it says, once this part has begun
        if self.path is None:
            return
        if self.path.exists() and self.path.stat().st_size and not resumed:
            raise LedgerExists(f"{self.path} is the ledger of another run; choose another --output-dir, or go on with it (--load)")
        self.continued = self.path.exists() and self.path.stat().st_size > 0

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # closes a line that was cut when the run was killed

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def on(self) -> bool:
        """Whether there is a ledger at all."""
        return self.path is not None

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """What happens inside counts as cost of the ledger."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - started

    def _write(self, body: Mapping[str, Any]) -> None:
        with self.measured():
            data = runlog.line(dict(body))
            while data:
                data = data[os.write(self._fd, data):]
            os.fsync(self._fd)

    def start(self, facts: Mapping[str, Any]) -> None:
        """The first line of a run, or of the part after a restart.

        Raises:
            LedgerExists: the ledger that is there is of another recipe or topology.
        """
        if self.path is not None:
            if self.continued:
                self.before = runlog.read(self.path)
                before = self.before.start
                odd = [f for f in ("topology", "recipe") if before and before.get(f) != json.loads(json.dumps(facts.get(f), default=str))]
                if odd:
                    raise LedgerExists(f"{self.path} is the ledger of a run of another {odd[0]}; choose another --output-dir")
            self._open(self.path)
            self._write({"kind": "start", "schema": runlog.SCHEMA, **facts})

    def begin_step(self) -> None:
        """Forget the quantities of the step before, and start its clock."""
        self._began, self._seconds = time.perf_counter(), 0.0
        self._digests, self._parts, self._numbers = {}, {}, {}
        self._sent, self._in_flight = [], 0

    def sending(self, wave: Sequence[Any]) -> None:
        """These requests go to the engine now and together. How they went is no quantity: it must not matter, and is there to show
        that it was another one."""
        self._sent += [request.request_id for request in wave]
        self._in_flight = max(self._in_flight, len(wave))

    def quantity(self, name: str, parts: Mapping[str, str], keep: bool = True) -> None:
        """Digests of the parts of one quantity. ``keep`` False leaves the parts out of the line."""
        self._digests[name] = combined(parts)
        if keep:
            self._parts[name] = {n: d.rpartition(":")[2][:_SHORT] for n, d in parts.items()}

    def number(self, name: str, value: float) -> None:
        """A number, by its bits; the number itself is there to be read."""
        self._digests[name] = f"f64:{bits(value)}"
        self._numbers[name] = _number(value)

    def rollout(self, prompts: Sequence[tuple[str, Any]], batch: Sequence[Trajectory]) -> None:
        """What was asked and what came back. ``prompts`` are in the order in which the data gave them."""
        if not self.on:
            return
        with self.measured():
            by_prompt = {t.prompt_id: digest(np.array(t.token_ids[:t.prompt_len], dtype=np.int64)) for t in batch}
            self.quantity("prompts", {f"{place}:{name}": by_prompt.get(name, "none") for place, (name, _) in enumerate(prompts)})
            self.quantity("seeds", {t.request_id: f"u64:{t.seed:016x}" for t in batch})
            self.quantity("sampled_tokens", {t.request_id: digest(np.array(t.response_ids, dtype=np.int64)) for t in batch})
            self.quantity("rollout_logprobs", {t.request_id: digest(t.rollout_logprobs) for t in batch})

    def scored(self, batch: Sequence[Trajectory], trainer_logprobs: Sequence[np.ndarray]) -> None:
        """The trainer's log-probabilities, rewards and advantages."""
        if not self.on:
            return
        with self.measured():
            self.quantity("train_logprobs", {t.request_id: digest(v) for t, v in zip(batch, trainer_logprobs, strict=True)})
            self.quantity("rewards", {t.request_id: f"f64:{bits(t.reward)}" for t in batch})
            self.quantity("advantages", {t.request_id: f"f64:{bits(t.advantage)}" for t in batch})

    def trained(self, stats: Sequence[Any], update: Any, states: Sequence[Mapping[str, Mapping[str, str]]]) -> None:
        """Loss, gradients, optimizer and weights after a step; ``states`` are the ranks' ``state_digests``."""
        if not self.on:
            return
        with self.measured():
            self._seconds += max(s.digest_s for s in stats)
            order = {f"rank {r}, microbatch {m}": _text(names)
                     for r, s in enumerate(stats) for m, names in enumerate(s.composition)}
            self.quantity("batch_composition", order)
            self.number("loss", sum(s.loss for s in stats))
            self.quantity("gradients", _by_rank([s.gradients for s in stats]))
            self._digests["grad_norm"] = f"f64:{stats[0].grad_norm_bits}"
            self._numbers["grad_norm"] = _number(stats[0].grad_norm)
            self.quantity("optimizer", _by_rank([s["optimizer"] for s in states]))
            weights = {n: f"xxh3:{d}" for n, d in update.trainer.items()}
            engine = {n: f"xxh3:{d}" for n, d in update.engine.items()}
            self.quantity("weights", weights)
            self.quantity("engine_weights", engine, keep=engine != weights)
            self.quantity("rng", _by_rank([s["rng"] for s in states]))

    def end_step(self, step: int, trained: bool, metrics: Mapping[str, Any], kernels: Mapping[str, Any], version: int,
                 verdicts: Sequence[Verdict] = ()) -> None:
        """Append the line of a step. ``verdicts`` are for a part of the run that goes on from here; two runs are not compared by them."""
        if not self.on:
            return
        elapsed = time.perf_counter() - self._began
        self._write({
            "kind": "step", "step": step, "trained": trained, "digests": self._digests, "parts": self._parts, "numbers": self._numbers,
            "kernels": kernels, "weight_version": version, "verdicts": [short(v) for v in verdicts],
            "metrics": {k: _number(v) if isinstance(v, float) else v for k, v in metrics.items() if isinstance(v, int | float)},
            "cost": {"ledger_s": round(self._seconds, 6), "step_s": round(elapsed, 6)},
            "sent": {"in_flight": self._in_flight, "order": _text(self._sent)} if self._sent else {}})
        self.cost = (self.cost[0] + self._seconds, self.cost[1] + time.perf_counter() - self._began)

    def end(self, steps: int, verdict: str, reason: str) -> None:
        """The run ended by itself."""
        if self.on:
            ledger_s, step_s = self.cost
            self._write({"kind": "end", "steps": steps, "verdict": verdict, "reason": reason,
                         "cost": {"ledger_s": round(ledger_s, 6), "step_s": round(step_s, 6),
                                  "share": round(ledger_s / step_s, 6) if step_s else None}})


def _text(names: Sequence[str]) -> str:
    """Digest of a list of names in their order."""
    return "xxh3:" + xxhash.xxh3_128_hexdigest("\x1f".join(names).encode())


def _by_rank(digests: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """One mapping of several ranks'; a rank beyond the first is named."""
    return {(name if rank == 0 else f"rank {rank}: {name}") or "settings": d for rank, part in enumerate(digests) for name, d in part.items()}
