"""Start an engine process and own it: it is ready when the call returns, and gone when its owner is."""
from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vime.vllm import plugin
from vime.vllm.client import EngineClient
from vime.vllm.protocol import EngineError, EngineStartError

#: Lines of an engine's log that an error shows.
LOG_LINES = 15


class EngineProcess:
    """A running engine. Context manager; ``client`` talks to it, ``url`` and ``token`` let others do so."""

    def __init__(self, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.process, self.log_path = process, log_path
        self.url = ""
        self.token: str | None = None
        self.client: EngineClient

    @property
    def pid(self) -> int:
        return self.process.pid

    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    def explain(self) -> str:
        """What is known of the process: exit code and the end of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=2)  # a broken connection is noticed before the process is
        code = self.process.poll()
        ended = "still runs but does not answer" if code is None else f"was killed by signal {-code}" if code < 0 \
            else f"ended with exit code {code}"
        return f"Its process {self.pid} {ended}. End of {self.log_path}:\n{log_tail(self.log_path)}"

    def close(self, timeout: float = 10.0) -> None:
        """Ask it to end, then make it. Never raises for an engine that is gone already."""
        if self.alive() and self.url:
            with contextlib.suppress(EngineError):
                self.client.shutdown()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout)
        if self.alive():
            self.process.kill()
        self.process.wait()
        if self.url:
            self.client.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def log_tail(path: Path, lines: int = LOG_LINES) -> str:
    """The last lines of a log that are not empty, indented; or that there are none."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return "  (no log)"
    kept = [line for line in text.splitlines() if line.strip()][-lines:]
    return "\n".join("  " + line[:300] for line in kept) or "  (empty log)"


def _environment(ops: Iterable[str], fp8: str, token: str | None, further: Mapping[str, str] | None) -> dict[str, str]:
    """Variables of an engine process: the caller's own, what asks the plugin for ``ops``, and what vLLM reads before it is imported."""
    environment = {**os.environ, **(further or {})}
    environment.pop(plugin.ENV, None)
    if wanted := list(ops):
        environment[plugin.ENV] = plugin.settings(wanted, fp8)
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    environment.setdefault("TORCHDYNAMO_DISABLE", "1")  # eager engine: compiling helper functions costs seconds
    if token is not None:
        environment["VIME_ENGINE_TOKEN"] = token
    return environment


def launch_engine(
    model_dir: str | os.PathLike[str], *, device: str = "cpu", dtype: str = "float32",
    ops: Iterable[str] | None = plugin.ROUTED, fp8: str = "", host: str = "127.0.0.1", port: int = 0,
    log_path: str | os.PathLike[str] | None = None, env: Mapping[str, str] | None = None, with_token: bool = True,
    start_timeout: float = 600.0, client_timeout: float = 600.0, **options: Any,
) -> Any:
    """Start an engine and wait until it can generate.

    Args:
        model_dir: Hugging Face checkpoint folder.
        device, dtype: ``cpu`` or ``cuda``; ``float32`` or ``bfloat16``.
        ops: operations to align; empty or None is stock vLLM, with the plugin unset.
        fp8: ``"blockwise"`` runs linear layers in block FP8 (:mod:`vime.fp8`).
        host, port: where it listens; port 0 takes a free one.
        log_path: its output; a temporary file unless given.
        env: further environment variables (``OMP_NUM_THREADS``, ``CUDA_VISIBLE_DEVICES`` ...).
        with_token: protect it with a fresh random bearer token.
        start_timeout: seconds until it must be ready.
        client_timeout: longest wait of a call.
        options: further options of :class:`vime.vllm.config.EngineConfig`, e.g. ``max_num_batched_tokens``; with
            ``data_parallel_size`` > 1 one process a rank is started, and what is returned stands for all of them.

    Raises:
        EngineStartError: it could not start; the message is the engine's own, or the end of its log.
        PluginError: an operation that does not exist or cannot be aligned.
    """
    size = int(options.pop("data_parallel_size", 1))
    if size > 1 and "data_parallel_rank" not in options:
        from vime.vllm.ranks import launch_ranks

        again = functools.partial(launch_engine, model_dir, device=device, dtype=dtype, ops=ops, fp8=fp8, host=host, env=env,
                                  with_token=with_token, start_timeout=start_timeout, client_timeout=client_timeout)
        return launch_ranks(again, size, Path(log_path) if log_path is not None else None, {**options, **({"port": port} if port else {})})
    options["data_parallel_size"] = size
    token = secrets.token_urlsafe(24) if with_token else None
    environment = _environment(ops or (), fp8, token, env)
    path = Path(log_path) if log_path is not None else Path(tempfile.mkdtemp(prefix="vime-engine-")) / "engine.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", "vime.vllm.server", "--model", str(model_dir), "--device", device, "--dtype", dtype,
               "--host", host, "--port", str(port), "--ready-fd", str(write_fd), "--parent", str(os.getpid()), *_flags(options)]
    with open(path, "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                   pass_fds=(write_fd,), start_new_session=True)
    os.close(write_fd)
    engine = EngineProcess(process, path)
    try:
        ready = _wait_ready(engine, read_fd, start_timeout)
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        os.close(read_fd)
    engine.url, engine.token = ready["url"], token
    engine.client = EngineClient(engine.url, token=token, timeout=client_timeout, explain=engine.explain)
    return engine


def _flags(options: Mapping[str, Any]) -> list[str]:
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags += [f"--{flag}", str(value)]
    return flags


def _wait_ready(engine: EngineProcess, read_fd: int, timeout: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout
    data = b""
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            raise EngineStartError(f"the engine was not ready after {timeout:.0f} s. End of {engine.log_path}:\n"
                                   f"{log_tail(engine.log_path)}")
        if not select.select([read_fd], [], [], min(left, 1.0))[0]:
            continue
        chunk = os.read(read_fd, 65536)
        if not chunk:
            raise EngineStartError(f"the engine ended before it was ready. {engine.explain()}")
        data += chunk
    message = json.loads(data)
    if "error" in message:
        where = f" (its log is {engine.log_path})" if message.get("unforeseen") else ""  # first: what follows may have many lines
        raise EngineStartError(f"the engine could not start{where}: {message['error']}")
    return message
