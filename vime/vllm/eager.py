"""Which models an engine runs without CUDA graphs, and why."""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from vime.latent import experts, latent


def reason(model: str, ops: Sequence[str]) -> str | None:
    """Why whole steps of the checkpoint ``model`` cannot be captured with ``ops`` aligned; None if they can.

    The aligned layers read on the host: latent attention the lengths of sequences, to loop over them, the router whether a score is
    NaN. A captured step would repeat those of the capture, or cannot be captured.
    """
    config = json.loads((Path(model) / "config.json").read_text())
    layers = []
    if "attention" in ops and latent(config) is not None:
        layers.append("latent attention loops over sequences")
    if "moe" in ops and experts(config) is not None:
        layers.append("the router looks for NaN")
    return f"aligned {' and '.join(layers)} on the host, which a CUDA graph would not repeat; the engine runs eager" if layers else None
