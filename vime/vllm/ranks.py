"""An engine of several ranks: one process each, data parallel over requests, experts spread over all of them.

Every rank is a server of its own and steps together with the others (:mod:`vime.vllm.lockstep`). Here they
are started, and one client stands for all: requests go round, commands go to each, weights are read back from whoever holds
them. The samples are those of one rank, to the bit.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from vime.vllm.client import EngineClient
from vime.vllm.protocol import EngineDied, EngineError, Request, Sample
from vime.vllm.records import EngineRecords
from vime.weights.manifest import Manifest, TensorInfo

#: Ranks that compute nothing for this long while requests run hang; nothing is this share of a processor, all together.
STALL_S, IDLE_SHARE = 45.0, 0.1
#: Calls that go to every rank and answer nothing.
_TO_EACH = ("record", "reset_prefix_cache", "set_chunk", "sleep", "wake", "shutdown", "close")


class RankedClient:
    """Stands for the clients of all ranks; the methods are those of :class:`vime.vllm.client.EngineClient`.

    ``addresses`` are the ``(url, token)`` of every rank: a weight update has to be sent to each.
    """

    stall_s = STALL_S

    def __init__(self, engines: list[Any]) -> None:
        self.engines, self.clients = engines, [e.client for e in engines]
        self.addresses = [(e.url, e.token) for e in engines]
        self.url = self.addresses[0][0]

    def __getattr__(self, name: str) -> Any:
        if name not in _TO_EACH:
            raise AttributeError(f"{type(self).__name__} has no {name}; ask one rank: clients[0].{name}")

        def to_each(*args: Any, **kwargs: Any) -> None:
            self._all(lambda client: getattr(client, name)(*args, **kwargs))

        return to_each

    def _all(self, call: Callable[[EngineClient], Any]) -> list[Any]:
        """``call`` on every rank at once; the first error is raised when all have answered."""
        with concurrent.futures.ThreadPoolExecutor(len(self.clients)) as pool:
            return [future.result() for future in [pool.submit(call, client) for client in self.clients]]

    def generate(self, requests: list[Request], on_result: Callable[[Sample], None] | None = None) -> list[Sample]:
        """Samples in the order of ``requests``, which go round the ranks."""
        if len({r.request_id for r in requests}) != len(requests):
            raise EngineError("two requests have the same request_id; samples are matched by it")
        shares = {client.url: requests[i::len(self.clients)] for i, client in enumerate(self.clients)}
        with _Watch(self.engines, self.stall_s) as watch:
            try:
                samples = self._all(lambda client: client.generate(shares[client.url], on_result))
            except EngineError as error:
                raise EngineDied(watch.found) if watch.found else error from None
        by_name = {s.request_id: s for share in samples for s in share}
        return [by_name[r.request_id] for r in requests]

    def health(self) -> dict[str, Any]:
        """Of the first rank that is not ready, else of rank 0; ``ranks`` has all."""
        every = self._all(lambda client: client.health())
        return {**next((h for h in every if h["state"] != "ready"), every[0]), "ranks": every}

    def info(self) -> dict[str, Any]:
        return {**self.clients[0].info(), "ranks": len(self.clients)}

    def stats(self) -> dict[str, Any]:
        """Counts added over the ranks; version and state of rank 0."""
        every = self._all(lambda client: client.stats())
        kernels = {name: sum(s["kernels"].get(name, 0) for s in every) for s in every for name in s["kernels"]}
        counts = {k: sum(s[k] for s in every) for k in every[0] if k not in ("kernels", "weight_version", "state")}
        return {**every[0], **counts, "kernels": kernels}

    def contract(self) -> Any:
        """The contract of all ranks. Raises ContractMismatch where they do not share one."""
        every = self._all(lambda client: client.contract())
        for number, other in enumerate(every[1:], 1):
            every[0].require_equal(other, "rank 0", f"rank {number}")
        return every[0]

    def handshake(self, contract: Any) -> str:
        theirs = self.contract()
        contract.require_equal(theirs)
        return theirs.fingerprint()

    def fetch_records(self) -> EngineRecords:
        """The records of all ranks, one after the other."""
        every = [r for r in self._all(lambda client: client.fetch_records()) if r.tensors]
        names = {name: None for r in every for name in r.tensors}
        return EngineRecords({name: torch.cat([r.tensors[name] for r in every if name in r.tensors]) for name in names},
                             [row for r in every for row in r.rows], [row for r in every for row in r.logit_rows])

    def weights_digest(self) -> dict[str, Any]:
        """Every tensor, from a rank that holds it. Raises EngineError where two hold different ones, or different versions."""
        every = self._all(lambda client: client.weights_digest())
        versions = [d["version"] for d in every]
        if len(set(versions)) != 1:
            raise EngineError(f"the ranks of the engine hold weight versions {versions}; send the same update to each")
        found: dict[str, dict[str, Any]] = {}
        for number, digest in enumerate(every):
            for tensor in digest["tensors"]:
                other = found.setdefault(tensor["name"], tensor)
                if other != tensor:
                    raise EngineError(f"{tensor['name']}: rank {number} holds {tensor['digest']}, an earlier rank {other['digest']}")
        infos = [TensorInfo(**{**t, "shape": tuple(t["shape"])}) for t in found.values()]
        return {"version": versions[0], "digest": Manifest(version=versions[0], tensors=infos).digest(), "tensors": list(found.values())}


class _Watch:
    """Ends all ranks when together they compute nothing for a while: a rank that hangs leaves the others waiting in a
    collective, where nothing of their own would notice. ``found`` then says which one it was, as far as can be told."""

    def __init__(self, engines: list[Any], stall_s: float) -> None:
        self.engines, self.stall_s, self.found = engines, stall_s, ""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="rank-watch")

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        import psutil

        def seconds() -> float:
            return sum(sum(psutil.Process(e.pid).cpu_times()[:2]) for e in self.engines)

        with contextlib.suppress(psutil.NoSuchProcess):  # a rank that is gone is noticed by its socket
            since, before = time.monotonic(), seconds()
            while not self._done.wait(min(1.0, self.stall_s / 4)):
                now = seconds()
                if now - before > IDLE_SHARE * (time.monotonic() - since):
                    since, before = time.monotonic(), now
                elif time.monotonic() - since > self.stall_s:
                    stopped = [r for r, e in enumerate(self.engines) if psutil.Process(e.pid).status() == psutil.STATUS_STOPPED]
                    which = f"rank {stopped[0]} is stopped" if stopped else "none of them is stopped"
                    self.found = (f"the {len(self.engines)} ranks of the engine computed nothing for {self.stall_s:.0f} s while requests "
                                  f"were running ({which}); all were ended. See {self.engines[(stopped or [0])[0]].log_path}")
                    for engine in self.engines:
                        engine.process.kill()
                    return


@dataclasses.dataclass
class EngineRanks:
    """Running ranks. Context manager; ``client`` stands for all of them."""

    engines: list[Any]

    def __post_init__(self) -> None:
        self.client = RankedClient(self.engines)
        self.url, self.token = self.client.addresses[0]
        self.log_path = self.engines[0].log_path

    @property
    def pid(self) -> int:
        return self.engines[0].pid

    def alive(self) -> bool:
        return all(engine.alive() for engine in self.engines)

    def explain(self) -> str:
        return "\n".join(engine.explain() for engine in self.engines)

    def close(self) -> None:
        """End all; a rank that waits for the others is ended with them."""
        close_all(self.engines)

    def __enter__(self) -> EngineRanks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def close_all(engines: Iterable[Any]) -> None:
    engines = list(engines)
    if engines:
        with concurrent.futures.ThreadPoolExecutor(len(engines)) as pool:
            list(pool.map(lambda engine: engine.close(), engines))


def launch_ranks(launch: Callable[..., Any], size: int, log_path: Path | None, options: dict[str, Any]) -> EngineRanks:
    """Start ``size`` ranks at once with ``launch``; all, or none if one fails (its error is raised)."""
    if options.get("port"):
        raise EngineError("an engine of several ranks takes free ports; leave port out")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        meeting = listener.getsockname()[1]

    def one(rank: int) -> Any:
        path = None if log_path is None else log_path if rank == 0 else log_path.with_name(f"{log_path.stem}.rank{rank}{log_path.suffix}")
        return launch(log_path=path, data_parallel_size=size, data_parallel_rank=rank, data_parallel_port=meeting, **options)

    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(functools.partial(one, rank)) for rank in range(size)]
        concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
        failed = [f for f in futures if f.done() and f.exception() is not None]
        if failed:
            close_all(f.result() for f in futures if f.exception() is None)
            error = failed[0].exception()
            assert error is not None
            raise error
    return EngineRanks([f.result() for f in futures])
