"""One weight update: the trainer's weights into the running engine, under a new version.

The engine takes them in two phases (receive all, verify, load, read back) and drops its prefix cache; if anything
fails it refuses to generate until a full update succeeds. Here only the two ends are brought together, and what both
say they hold afterwards is put side by side.
"""
from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from vime.rl.config import TrainConfig, weight_transport
from vime.rl.pool import TrainerPool


@dataclasses.dataclass(frozen=True)
class Update:
    """What one update did.

    ``report`` is the engine's own; ``trainer`` and ``engine`` map HF names to digests; ``changed`` counts tensors that
    differ from those of the previous version.
    """

    version: int
    seconds: float
    report: dict[str, Any]
    trainer: dict[str, str]
    engine: dict[str, str]
    changed: int


def endpoint_of(config: TrainConfig, url: str, token: str | None) -> Any:
    """Where and how the trainer's rank 0 sends."""
    from vime.weights.transports import Endpoint

    kind, backend = weight_transport(config)
    return Endpoint(url=url, token=token, transport=kind, backend=backend, host=config.trainer_host,
                    disk_dir=config.update_weight_disk_dir or None, keep_files=config.update_weight_disk_keep_files,
                    check_equal=config.check_weight_update_equal, timeout_s=config.timeout_s)


def endpoints_of(config: TrainConfig, client: Any, address: tuple[str, str | None]) -> list[Any]:
    """One for every rank of the engine: each takes the whole update."""
    return [endpoint_of(config, *one) for one in getattr(client, "addresses", [address])]


def update_weights(config: TrainConfig, pool: TrainerPool, client: Any, address: tuple[str, str | None], version: int,
                   previous: Mapping[str, str]) -> Update:
    """Send, and read both sides' digests. ``previous`` are the trainer's digests of the version before.

    Raises:
        vime.rl.ranks.TrainerFailed: the update failed; the message is the engine's or the transport's.
    """
    started = time.perf_counter()
    report = pool.send_weights(endpoints_of(config, client, address), version)
    seconds = time.perf_counter() - started
    mine = pool.named_weights_digest()
    theirs = _held(client, config.check_weight_update_equal)
    changed = sum(previous.get(name) != digest for name, digest in mine.items())
    return Update(version, seconds, report, mine, theirs, changed)


def fill(config: TrainConfig, pool: TrainerPool, client: Any, address: tuple[str, str | None]) -> bool:
    """Give an engine that started without weights (:mod:`vime.weights.counted`) those of the trainer, as version 0, by the
    online update. False, and nothing done, where it holds some.

    Raises:
        vime.rl.ranks.TrainerFailed: as :func:`update_weights`.
    """
    if client.health()["state"] != "empty":
        return False
    pool.send_weights(endpoints_of(config, client, address), 0)
    return True


def _held(client: Any, needed: bool) -> dict[str, str]:
    """HF name -> digest of what the engine holds; nothing where a stock engine has packed its weights away and no check
    was asked for."""
    from vime.vllm.protocol import EngineError, EnginePoisoned

    try:
        return {t["name"]: t["digest"] for t in client.weights_digest()["tensors"]}
    except EnginePoisoned:
        raise
    except EngineError:
        if needed:
            raise
        return {}
