"""Imports the frameworks once and forks the ranks of a :class:`vime.rl.ranks.Ranks`.

Run as ``python -m vime.rl.launcher PLAN`` by the pool. It stays as the parent of the ranks, tells the pool how each
ended, and ends with them. Nothing here touches a device: a fork after a device context exists would be broken.
"""
from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from vime.errors import is_for_people, plain
from vime.rl import pipes


def main() -> None:
    """Import what the plan names, fork its ranks, and stay until all of them have ended."""
    plan = json.loads(sys.argv[1])
    try:
        for module in plan["preload"]:
            importlib.import_module(module)
        module, _, name = plan["worker"].partition(":")
        make_worker = getattr(importlib.import_module(module), name)
    except Exception as error:
        told = plain(error)
        if told is error:
            raise
        _refuse(plan["fds"], told)
        return
    status = Connection(plan["status_fd"])
    pids: dict[int, int] = {}
    for rank in range(plan["world_size"]):
        pid = os.fork()
        if pid == 0:
            _run_rank(rank, plan, make_worker)
        pids[pid] = rank
    for fd in plan["fds"]:  # so that the end of a rank is an end of file for the controller
        os.close(fd)
    while pids:
        pid, code = os.waitpid(-1, 0)
        with contextlib.suppress(OSError):
            pipes.send(status, (pids.pop(pid), _how(code)))


def _refuse(fds: list[int], error: BaseException) -> None:
    """Answer for all ranks that none can be, and wait until the pool has heard it."""
    connections = [Connection(fd) for fd in fds]
    with contextlib.suppress(EOFError, OSError):
        for connection in connections:
            pipes.send(connection, ("error", type(error).__name__, str(error), True, ""))
        while True:
            pipes.receive(connections[0])


def _how(code: int) -> str:
    if os.WIFSIGNALED(code):
        return f"was ended by {signal.Signals(os.WTERMSIG(code)).name}"
    return f"exited with code {os.WEXITSTATUS(code)}"


def _run_rank(rank: int, plan: dict[str, Any], make_worker: Any) -> None:
    """Never returns: a fork must not run on into the launcher's code."""
    code = 1
    try:
        log = os.open(os.path.join(plan["log_dir"], f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        for other, fd in enumerate(plan["fds"]):
            if other != rank:
                os.close(fd)
        os.close(plan["status_fd"])
        _serve(Connection(plan["fds"][rank]), rank, plan["world_size"], make_worker)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(connection: Connection, rank: int, world_size: int, make_worker: Any) -> None:
    """Answer commands until told to stop or the controller is gone."""
    inbox: list[Any] = []
    arrived = threading.Condition()

    def listen() -> None:  # a thread of its own notices the controller's end while a command still runs
        while True:
            try:
                message = pipes.receive(connection)
            except (EOFError, OSError):
                os._exit(3)
            with arrived:
                inbox.append(message)
                arrived.notify()

    threading.Thread(target=listen, daemon=True).start()
    worker: Any = None
    while True:
        with arrived:
            arrived.wait_for(lambda: inbox)
            message = inbox.pop(0)
        if message[0] == "stop":
            return
        try:
            if message[0] == "start":
                pipes.send(connection, ("pid", os.getpid()))
                worker = make_worker(rank, world_size, message[1])
                gc.freeze()  # modules and model live as long as the process: no full collection walks them within a step
                result = None
            else:
                _, method, args, kwargs = message
                result = getattr(worker, method)(*args, **kwargs)
        except Exception as raised:
            error, trace = plain(raised), traceback.format_exc()
            print(trace, file=sys.stderr, flush=True)
            pipes.send(connection, ("error", type(error).__name__, str(error), is_for_people(error), trace))
            continue
        pipes.send(connection, ("result", result))


if __name__ == "__main__":
    main()
