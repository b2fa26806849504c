"""Stands for an engine's control plane where a test needs a receiver and no engine."""
from __future__ import annotations

import threading

import torch

from vime.vllm.protocol import UpdateFailed
from vime.weights.transports import open_receiver


class Engine:
    """Receives in a thread, as the engine does. ``received`` is what arrived whole; a failed update leaves it as it was."""

    def __init__(self) -> None:
        self.received: dict[str, torch.Tensor] = {}
        self.error: UpdateFailed | None = None
        self.begun = 0

    def begin_update(self, version, transport, check_equal) -> None:
        self.begun += 1
        self._thread = threading.Thread(target=self._run, args=(transport,))
        self._thread.start()

    def _run(self, transport) -> None:
        self.error = None
        try:
            self.received, self.manifest = open_receiver(transport, torch.device("cpu")).receive()
        except UpdateFailed as error:
            self.error = error

    def finish_update(self, version) -> dict:
        self._thread.join(20)
        if self.error is not None:
            raise self.error
        return {"version": version}

    def health(self) -> dict:
        return {"state": "updating" if self._thread.is_alive() else "poisoned"}

    def close(self) -> None: ...
