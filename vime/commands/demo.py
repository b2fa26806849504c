"""``vime demo``: the main job on a pretrained model, with vime off and then on, in both dtypes.

Off: stock Megatron and stock vLLM on the same prompts, where log-probabilities differ; a run in which they did not
would show nothing, so that is not green either. On: several weight updates, zero differing log-probabilities before
and after each, zero differing layer outputs. Last, unpatched ``transformers`` as a third party, since two sides that
share an operation can share its mistake.
"""
from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from alignment.files import write_text
from alignment.verdict import Coverage, Status, Verdict, combine
from vime.commands.demo_table import show
from vime.commands.memory_watch import MemoryWatch
from vime.commands.output import require_file
from vime.commands.progress import TerminalProgress
from vime.commands.train import train
from vime.rl.batch import Trajectory
from vime.rl.config import TrainConfig
from vime.rl.loop import StepResult

#: Sizes that two cores finish in minutes: 8 sequences of about 80 tokens a step.
SIZES: dict[str, Any] = {"rollout_batch_size": 2, "n_samples_per_prompt": 4, "rollout_max_response_len": 20, "max_tokens_per_gpu": 512,
                         "max_num_batched_tokens": 128, "max_model_len": 512, "kv_cache_gib": 0.25, "lr": 2e-5, "reward": "gate"}


@dataclasses.dataclass
class Part:
    """The run of one dtype: one turn with vime off, then the loop with vime on."""

    dtype: str
    off: StepResult
    on: list[StepResult]
    seconds: dict[str, float]
    third_party: list[Verdict] = dataclasses.field(default_factory=list)

    def verdict(self) -> Verdict:
        checks = [self._control(), *(v for s in self.on for v in s.verdicts), *self.third_party]
        return combine(f"demo {self.dtype}", checks)

    def _control(self) -> Verdict:
        """The stock stacks were seen to differ on this input, so that zero is worth something."""
        differing, tokens = self.off.metrics["differing"], self.off.metrics["tokens"]
        status = Status.PASS if differing else Status.NOT_RUN
        return Verdict("vime off differs", status, reason="" if differing else "the stock stacks agreed on this input: nothing was shown",
                       coverage={"control tokens": Coverage(tokens, tokens)}, stats={"differing": differing})

    def to_dict(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "off": self.off.to_dict(), "on": [s.to_dict() for s in self.on], "seconds": self.seconds}


def run(hf_checkpoint: Path | None, dtypes: Sequence[str], updates: int, report: Path | None, as_json: bool) -> int:
    """Run everything, print the table (or JSON), return the exit code.

    Raises:
        vime.commands.output.OutputUnusable: ``report`` is a folder or cannot be written; before anything is started.
    """
    from alignment.report import to_json

    if report is not None:
        require_file(report, "--report")
    console = Console(stderr=as_json)
    started = time.monotonic()
    with MemoryWatch() as memory, TerminalProgress(Console(stderr=True)) as progress:
        folder = _checkpoint(hf_checkpoint, progress)
        parts = [_part(folder, dtype, updates, progress) for dtype in dict.fromkeys(dtypes)]
        _third_party(folder, parts, progress)
    verdict = combine("demo", [part.verdict() for part in parts])
    verdict.stats = {"seconds": round(time.monotonic() - started, 1), "peak_memory_gib": round(memory.peak / 2**30, 2)}
    show(console, verdict, parts)
    text = to_json(verdict, model=str(folder), parts=[part.to_dict() for part in parts], versions=_versions())
    if report is not None:
        write_text(report, text + "\n")
    if as_json:
        sys.stdout.write(text + "\n")
    return verdict.exit_code


def _checkpoint(given: Path | None, progress: TerminalProgress) -> Path:
    if given is not None:
        return given
    from vime import smollm2

    progress.phase("SmolLM2-135M-Instruct as a plain checkpoint (written once)")
    return smollm2.ensure()


def _part(folder: Path, dtype: str, updates: int, progress: TerminalProgress) -> Part:
    config = TrainConfig(str(folder), dtype=dtype, num_rollout=updates, **SIZES)
    seconds: dict[str, float] = {}

    def timed(name: str, settings: TrainConfig, layers: tuple[int, ...]) -> list[StepResult]:
        begin = time.monotonic()
        out = train(settings, progress, layers)
        seconds[name] = round(time.monotonic() - begin, 1)
        return out

    (off,) = timed("off", config.replace(ops=(), num_rollout=0), ())
    on = timed("on", config, (0, updates))
    return Part(dtype, off, on, seconds)


def _third_party(folder: Path, parts: Sequence[Part], progress: TerminalProgress) -> None:
    """Both sides' log-probabilities under the checkpoint's weights against transformers in fp32, in this process."""
    progress.phase("third party: unpatched transformers in fp32")
    from vime.commands.third_party import judge

    for part in parts:
        first: list[Trajectory] = part.on[0].batch
        part.third_party = judge(folder, part.dtype, first)


def _versions() -> dict[str, Any]:
    from alignment import machine

    return {"versions": machine.versions(), "hardware": machine.hardware()}
