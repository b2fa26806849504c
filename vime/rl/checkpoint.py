"""Checkpoints of a run from which it goes on as if it had never stopped: weights, optimizer, random states, versions.

``DIR/step-000003`` is the state after three steps. It is written under another name and renamed when every byte of it
is on disk, so a folder of that name is complete; what a killed run left behind is named and passed over. Everything
else of a run needs no state: the data is read in order by the number of the step, and every sample's seed is derived
from the run's seed, its prompt and its place.
"""
from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignment import fingerprints
from vime.errors import BadInput, VimeError
from vime.rl.ranks import TrainerFailed

SCHEMA = 1
STATE = "state.json"
_NAME = re.compile(r"step-(\d{6,})$")


class CheckpointRefused(BadInput):
    """There is a checkpoint, and this run cannot go on from it. Names what differs."""


class CheckpointExists(BadInput):
    """``--save`` names a folder with checkpoints of another run, which would be lost or mixed up."""


class NoCheckpoint(BadInput):
    """``--load`` names a folder without a checkpoint, and not the one that ``--save`` will fill."""


class CheckpointNotWritten(VimeError):
    """A checkpoint could not be written; the one before is untouched."""


@dataclasses.dataclass
class Found:
    """The newest complete checkpoint, and what was passed over to get to it."""

    folder: Path
    state: dict[str, Any]
    notes: list[str]

    @property
    def steps(self) -> int:
        return int(self.state["steps"])


def path_of(root: Path, steps: int) -> Path:
    return root / f"step-{steps:06d}"


def save(root: str | Path, steps: int, pool: Any, identity: Mapping[str, Any], version: int) -> Path:
    """Write the state after ``steps`` steps; returns its folder.

    ``identity`` is what a run that goes on from it must share (recipe, topology) and what it is told about (versions).
    A folder of that name is replaced only where it is damaged, so that :func:`find` passed it over.

    Raises:
        CheckpointNotWritten: the disk is full, the folder cannot be written, or a whole checkpoint is there already.
        vime.rl.ranks.TrainerFailed: a rank could not write its part.
    """
    root = Path(root)
    aside, folder = root / f".step-{steps:06d}.part", path_of(root, steps)
    if folder.exists() and _read(folder)[0] is None:
        raise CheckpointNotWritten(f"no checkpoint of step {steps} in {root}: {folder.name} is there and whole, so another run wrote it. "
                                   "It is untouched; give each run a --save of its own.")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        parts = pool.ranks.call("save_state", str(aside))
        body = {"schema": SCHEMA, "steps": steps, "weight_version": version, **identity,
                "rng": [p["rng"] for p in parts], "digests": [p["digests"] for p in parts]}
        text = json.dumps(body)
        with open(aside / STATE, "w", encoding="utf-8") as out:
            out.write(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest()}) + "\n" + text + "\n")
            out.flush()
            os.fsync(out.fileno())
        _sync_folder(aside)
        old = root / f".step-{steps:06d}.old"
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():  # damaged, as was seen above
            os.rename(folder, old)
        os.rename(aside, folder)
        _sync_folder(root)
        shutil.rmtree(old, ignore_errors=True)
    except TrainerFailed:  # a rank that raised has said why
        shutil.rmtree(aside, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointNotWritten(f"no checkpoint of step {steps} in {root}: {error.strerror or error}. The one before is untouched.") from error
    return folder


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def find(root: str | Path) -> Found | None:
    """The newest checkpoint that is whole, or None where there is none at all.

    Raises:
        CheckpointRefused: there are checkpoints and none of them is whole.
    """
    root = Path(root)
    if not root.is_dir():
        return None
    notes = [f"{p.name} was not finished (the run was killed while writing it)" for p in sorted(root.glob(".step-*.part"))]
    damaged: list[str] = []
    for folder in sorted((p for p in root.iterdir() if _NAME.match(p.name)), key=_steps_in_name, reverse=True):
        problem, state = _read(folder)
        if problem is None:
            return Found(folder, state, notes + damaged)
        damaged.append(f"{folder.name} is not whole: {problem}")
    if damaged:
        raise CheckpointRefused(f"no checkpoint in {root} is whole: " + "; ".join(damaged) +
                                ". Restore one, or start without --load and with another --save.")
    return None


def _read(folder: Path) -> tuple[str | None, dict[str, Any]]:
    """What is wrong with a checkpoint, and its state."""
    from vime.rl.keeping import OPTIMIZER, text_digest
    from vime.rl.state import tensor_digest
    from vime.weights.checkpoint import HfCheckpoint
    from vime.weights.folders import CheckpointError

    try:
        first, text = (folder / STATE).read_text(encoding="utf-8").split("\n")[:2]
        expected = json.loads(first)["sha256"]
        if hashlib.sha256(text.encode()).hexdigest() != expected:
            return f"{STATE} was changed or cut", {}
        state = json.loads(text)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{STATE} cannot be read ({type(error).__name__})", {}
    if not isinstance(state, dict):
        return f"{STATE} holds a {type(state).__name__}", {}
    if state.get("schema") != SCHEMA:
        return f"its schema is {state.get('schema')!r}; this version reads {SCHEMA}", {}
    fault = _fault(folder, state)
    if fault is not None:
        return fault, {}
    for rank, digests in enumerate(state["digests"]):
        if not digests:
            continue
        if OPTIMIZER not in digests:
            return f"it has no digest of {OPTIMIZER} of rank {rank}, since an earlier version wrote it; this one does not go on from it", {}
        part = folder / f"rank-{rank:05d}"
        try:
            if text_digest((part / OPTIMIZER).read_bytes()) != digests[OPTIMIZER]:
                return f"{OPTIMIZER} of rank {rank} was changed or cut", {}
        except OSError as error:
            return f"{OPTIMIZER} of rank {rank} cannot be read ({type(error).__name__})", {}
        try:
            saved = HfCheckpoint(part)
            tensors = {n: d for n, d in digests.items() if n != OPTIMIZER}
            if set(saved) != set(tensors):
                return f"rank {rank} holds other tensors than were written", {}
            for name, digest in tensors.items():
                if tensor_digest(saved[name]) != digest:
                    return f"{name} of rank {rank} has other bits than were written", {}
        except CheckpointError as error:
            return str(error), {}
    return None, state


def _steps_in_name(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _fault(folder: Path, state: Mapping[str, Any]) -> str | None:
    """What is wrong with the form of a state; a checksum says only that nobody changed it by accident."""
    for field in ("steps", "weight_version"):
        value = state.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            return f"{STATE} has {field} {value!r}; expected a whole number from 0"
    if state["steps"] != _steps_in_name(folder):  # renamed or copied: another one may be newer
        return f"it holds the state after {state['steps']} steps, under the name of another"
    for field in ("recipe", "topology", "versions"):
        if not isinstance(state.get(field, {}), dict):
            return f"{STATE} has {field} {state[field]!r}; expected names and values"
    rng, digests = state.get("rng"), state.get("digests")
    if not isinstance(rng, list) or not isinstance(digests, list) or not rng or len(rng) != len(digests):
        return f"{STATE} does not hold the random states and digests of every rank"
    if not all(isinstance(d, dict) for d in digests):
        return f"{STATE} holds no digests of what was written"
    return None


def _same_folder(a: str, b: str) -> bool:
    return bool(a and b) and os.path.realpath(a) == os.path.realpath(b)


def require_free(load: str, save: str) -> None:
    """Raise CheckpointExists where ``--save`` holds checkpoints and the run does not go on from them (``--load`` names the same folder)."""
    there = sorted((p for p in Path(save).glob("step-*") if _NAME.match(p.name)), key=_steps_in_name) if save else []
    if there and not _same_folder(load, save):
        raise CheckpointExists(f"--save {save} holds checkpoints of another run (the newest is {there[-1].name}); choose another --save, or "
                               f"go on with it (--load {save})")


def require_some(load: str, save: str) -> None:
    """Raise NoCheckpoint where there is nothing to go on from: a wrong path must not start the run over in silence.

    With ``--save`` of the same name an empty folder is the first start of a run that is always started by the same command.
    """
    if load and not _same_folder(load, save) and not any(_NAME.match(p.name) for p in Path(load).glob("step-*")):
        raise NoCheckpoint(f"--load {load} holds no checkpoint; expected folders step-NNNNNN that --save has written. "
                           "Start without --load.")


def require(found: Found, identity: Mapping[str, Any], num_rollout: int) -> list[str]:
    """Refuse a checkpoint of another run; returns what is worth saying.

    Raises:
        CheckpointRefused: another topology, recipe, model or data, or a run that is over.
    """
    todo = {"topology": "go on with the topology that wrote it", "recipe": "go on with the flags, model and data that wrote it"}
    for what, hint in todo.items():
        mine, theirs = fingerprints.flat(identity[what]), fingerprints.flat(found.state.get(what) or {})
        odd = [n for n in dict.fromkeys([*theirs, *mine]) if mine.get(n) != theirs.get(n)]
        if odd:
            text = "; ".join(f"{n} is {theirs.get(n)!r} there, {mine.get(n)!r} here" for n in odd[:4])
            more = f" and {len(odd) - 4} more" if odd[4:] else ""
            raise CheckpointRefused(f"{found.folder} is of another {what}: {text}{more}; {hint}, or start without --load.")
    if found.steps > num_rollout:
        raise CheckpointRefused(f"{found.folder} is after {found.steps} steps, and --num-rollout is {num_rollout} in all; raise it.")
    mine, theirs = identity["versions"], found.state.get("versions") or {}
    odd = [n for n in dict.fromkeys([*theirs, *mine]) if mine.get(n) != theirs.get(n)]
    if odd:
        text = "; ".join(f"{n} {theirs.get(n)} there, {mine.get(n)} here" for n in odd)
        return [f"continuing across versions ({text}): the bits may differ from a run that did not stop"]
    return []
