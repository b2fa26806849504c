"""Proofs of invariance on disk: one JSON file an environment, in vime's cache folder, loaded when the first one is asked for.

    proofs/cuda-<digest of the environment>.json
    {"schema": 1, "environment": {...}, "entries": {"linear fwd 960x576 bfloat16": {...}}, "checksum": "..."}

A proof is used for the very environment (:mod:`vime.ops.cuda.environment`) that it was made in and for no other: where a
library, the driver, a switch or our kernels changed, what is needed is proven anew, and what changed is said. So is what
happens to a file that can't be read. Files are written aside and renamed, with other processes' entries merged in.

``VIME_PROOFS``: ``require`` refuses what is not on disk instead of proving it (a fleet that was proven once), ``off`` keeps
nothing.
"""
from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vime.ops.cpu.build import cache_dir
from vime.ops.cuda import environment as environments

SCHEMA = 1
MODES = ("", "require", "off")


class ProofRefused(RuntimeError):
    """A proof that is needed is not on disk, and none may be made here (``VIME_PROOFS=require``). Says what was found instead."""


class ProofUnusable(ValueError):
    """A file of proofs that can't be believed. The message says why."""


def mode() -> str:
    """``VIME_PROOFS``, checked."""
    value = os.environ.get("VIME_PROOFS", "")
    if value not in MODES:
        raise ProofRefused(f"VIME_PROOFS is {value!r}; expected require, off, or nothing (prove what is missing and keep it)")
    return value


def checksum(entries: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(entries, sort_keys=True).encode(), digest_size=8).hexdigest()


def read(path: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Entries of a file that was written for ``environment``.

    Raises:
        ProofUnusable: not JSON, another form, made in another environment than its name says, or changed after it was written.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ProofUnusable(f"it can't be read ({error})") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("entries"), dict):
        raise ProofUnusable(f"it has another form than schema {SCHEMA}")
    if data.get("environment") != environment:
        then = data["environment"] if isinstance(data.get("environment"), dict) else {}
        raise ProofUnusable(f"it was made elsewhere ({'; '.join(environments.changes(then, environment)) or 'no environment'})")
    if data.get("checksum") != checksum(data["entries"]):
        raise ProofUnusable("its entries are not those that were written (the checksum differs)")
    return data["entries"]


class Store:
    """Proofs of one environment.

    Args:
        environment: of :func:`vime.ops.cuda.environment.current`.
        folder: default: ``proofs`` in vime's cache folder.
        say: gets a line where something on disk is not used, or can't be kept.
    """

    def __init__(self, environment: dict[str, str], folder: Path | None = None, say: Callable[[str], None] | None = None) -> None:
        self.environment = environment
        self.mode = mode()
        self.folder = folder if folder is not None else cache_dir() / "proofs"
        self.path = self.folder / f"cuda-{environments.digest(environment)}.json"
        self._say = say or (lambda line: print(f"vime: {line}", file=sys.stderr, flush=True))
        self.unused = ""
        self.entries = {} if self.mode == "off" else self._load()

    def _load(self) -> dict[str, Any]:
        if self.path.exists():
            try:
                return read(self.path, self.environment)
            except ProofUnusable as error:
                aside = self.path.with_suffix(".unusable")
                try:
                    os.replace(self.path, aside)
                except OSError:
                    aside = self.path
                self.unused = f"the file of proofs {self.path} is not used: {error}; it lies at {aside} now"
        else:
            self.unused = self._made_elsewhere()
        if self.unused:
            self._say(f"{self.unused}. What is needed is {'refused' if self.mode == 'require' else 'proven anew'}.")
        return {}

    def _made_elsewhere(self) -> str:
        """What changed since the newest proofs of another environment, or nothing."""
        for path in sorted(self.folder.glob("cuda-*.json"), key=lambda p: p.stat().st_mtime, reverse=True):
            try:
                then = json.loads(path.read_text())["environment"]
                return f"the proofs in {path} are not used: {'; '.join(environments.changes(then, self.environment))}"
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
        return ""

    def get(self, key: str) -> dict[str, Any] | None:
        """The proof of ``key``, or None where there is none yet.

        Raises:
            ProofRefused: there is none, and none may be made.
        """
        found = self.entries.get(key)
        if found is None and self.mode == "require":
            raise ProofRefused(f"{key} is not proven on this machine, and VIME_PROOFS=require allows no proof now"
                               f"{f' ({self.unused})' if self.unused else f' ({len(self.entries)} other proof(s) in {self.path})'}. Run "
                               "`vime prove --device cuda` on it once, or unset VIME_PROOFS")
        return found if isinstance(found, dict) else None

    def put(self, key: str, entry: dict[str, Any]) -> None:
        """Keep a proof. A folder that can't be written costs the proof again next time, and a line now."""
        self.entries[key] = entry
        if self.mode == "off":
            return
        try:
            self._write()
        except OSError as error:
            self._say(f"proofs can't be kept in {self.folder} ({error}); set VIME_CACHE_DIR to a folder that can be written")

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                others = read(self.path, self.environment) if self.path.exists() else {}
            except ProofUnusable:
                others = {}
            self.entries = others | self.entries
            data = {"schema": SCHEMA, "environment": self.environment, "entries": self.entries, "checksum": checksum(self.entries)}
            handle, aside = tempfile.mkstemp(dir=self.folder, prefix=".proofs-")
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump(data, file, indent=1, sort_keys=True)
                os.replace(aside, self.path)
            except BaseException:
                Path(aside).unlink(missing_ok=True)
                raise


_stores: dict[str, Store] = {}
_lock = threading.Lock()


def store(device: int = 0) -> Store:
    """The proofs for a CUDA device in what this process has loaded now. What changes in the process itself changes the key."""
    environment = environments.current(device)
    key = environments.digest(environment)
    with _lock:
        if key not in _stores:
            _stores[key] = Store(environment)
        return _stores[key]
