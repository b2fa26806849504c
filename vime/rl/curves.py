"""The usual curves of a run for TensorBoard and Weights & Biases, where they are asked for and installed.

Neither is needed by anything else; the ledger and ``metrics.jsonl`` hold the same numbers. What is asked for and not
installed is said before anything is started. W&B writes to the output folder without a network unless told otherwise.
"""
from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vime.errors import BadInput
from vime.rl.config import TrainConfig

#: Metric of a step -> name of its curve.
CURVES = {
    "train_rollout_logprob_abs_diff": "train/train_rollout_logprob_abs_diff", "train_rollout_logprob_abs_diff_max":
    "train/train_rollout_logprob_abs_diff_max", "loss": "train/loss", "grad_norm": "train/grad_norm", "reward": "rollout/reward",
    "response_tokens": "rollout/response_tokens", "truncated": "rollout/truncated", "differing": "train/differing_logprobs"}


class CurvesUnavailable(BadInput):
    """A writer of curves is asked for and cannot be used; says what to install."""


class Curves:
    """A context manager. Writers are opened on entering; without any asked for it does nothing.

    Raises (on construction):
        CurvesUnavailable: the package is not installed.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self._board: Any = None
        self._wandb: Any = None
        self._summary_writer = _load("torch.utils.tensorboard", "tensorboard").SummaryWriter if config.use_tensorboard else None
        self._package = _load("wandb", "wandb") if config.use_wandb else None

    def __enter__(self) -> Curves:
        folder = Path(self.config.output_dir)
        if self._summary_writer is not None:
            self._board = self._summary_writer(log_dir=str(folder / "tensorboard"))
        if self._package is not None:
            os.environ.setdefault("WANDB_SILENT", "true")
            (folder / "wandb").mkdir(parents=True, exist_ok=True)
            self._wandb = self._package.init(project=self.config.wandb_project, mode=self.config.wandb_mode, dir=str(folder))
        return self

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The curves of one step; a metric that the step has not is left out."""
        values = {curve: float(metrics[name]) for name, curve in CURVES.items() if isinstance(metrics.get(name), int | float)}
        if self._board is not None:
            for curve, value in values.items():
                self._board.add_scalar(curve, value, step)
            self._board.flush()
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def __exit__(self, *error: Any) -> None:
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def _load(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CurvesUnavailable(f"--use-{package} needs the package {package}, which is not installed ({error}); do: "
                                f"pip install 'vime[{package}]', or leave the flag out: ledger.jsonl and metrics.jsonl hold the "
                                "same numbers") from None
