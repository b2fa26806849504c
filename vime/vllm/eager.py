"""Which models an engine runs without CUDA graphs, and why; and which of its steps a graph repeats where it has some."""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vime.latent import experts, latent


def reason(model: str, ops: Sequence[str], ranks: int = 1) -> str | None:
    """Why whole steps of the checkpoint ``model`` cannot be captured with ``ops`` aligned over so many ``ranks``; None if they can.

    Experts that are spread over ranks are: how many tokens the others have is read on the host.
    """
    if "moe" in ops and ranks > 1 and experts(_config(model)) is not None:
        return f"experts over {ranks} ranks count the tokens of each on the host, which a CUDA graph would not repeat; the engine runs eager"
    return None


def graph_mode(model: str, ops: Sequence[str]) -> str:
    """vLLM's name for the steps that are captured: with our attention all of them, prompts included. With latent attention those in
    which every request decodes: each token chooses among all positions there may be, which for a chunk of a prompt is too many."""
    if "attention" not in ops or latent(_config(model)) is not None:
        return "FULL_DECODE_ONLY"
    return "FULL"


def _config(model: str) -> Mapping[str, Any]:
    return json.loads((Path(model) / "config.json").read_text())
