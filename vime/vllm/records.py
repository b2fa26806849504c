"""What the recorder of an engine wrote down, as the controller reads it."""
from __future__ import annotations

import dataclasses
import json

import safetensors
import safetensors.torch
import torch

Key = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class EngineRecords:
    """Layer outputs of an engine.

    ``tensors``: ``embedding``, ``layers.<i>`` (hidden plus residual), ``final_norm`` as ``[rows, H]``, ``logits`` as
    ``[logit rows, V]``, in the model dtype; on request ``layers.<i>.routing`` and ``layers.<i>.index``, integers ``[rows, top k]``.
    ``rows[i]`` = (request, position, token) of row i; ``logit_rows[i]`` the row whose next-token logits they are. A position served
    from the prefix cache was not computed and is in no row.
    """

    tensors: dict[str, torch.Tensor]
    rows: list[Key]
    logit_rows: list[Key]

    @classmethod
    def from_bytes(cls, data: bytes) -> EngineRecords:
        """The inverse of :meth:`vime.vllm.recorder.Recorder.dump`."""
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8:8 + length]).get("__metadata__", {})
        rows = [tuple(row) for row in json.loads(metadata.get("rows", "[]"))]
        logit_rows = [tuple(row) for row in json.loads(metadata.get("logit_rows", "[]"))]
        return cls(safetensors.torch.load(data), rows, logit_rows)
