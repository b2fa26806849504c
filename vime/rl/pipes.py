"""Python objects over a socket between a controller and the processes it started itself.

``Connection.send`` would hand tensors over as shared memory through a helper thread and a key that only processes
made by :mod:`multiprocessing` share; plain pickles copy and need neither.
"""
from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import Any


def send(connection: Connection, message: Any) -> None:
    """Raises OSError if the other end is gone."""
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """Raises EOFError or OSError if the other end is gone."""
    return pickle.loads(connection.recv_bytes())
