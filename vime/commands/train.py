"""``vime train``: the loop on a checkpoint, with its metrics and verdicts written as it goes."""
from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.markup import escape

from alignment.files import write_text
from alignment.report import strict
from alignment.verdict import Verdict
from vime.commands.output import require_folder
from vime.commands.progress import TerminalProgress
from vime.megatron.experts import check_spread
from vime.rl import checkpoint, earlier, judge, recipe
from vime.rl.config import ConfigError, TrainConfig, prepare_kernels, read_hf_config, require_fit
from vime.rl.curves import Curves
from vime.rl.data import Problem
from vime.rl.loop import Loop, StepResult, load_problems
from vime.rl.progress import Progress
from vime.rl.rollout import require_room
from vime.rl.runlog import RunLog
from vime.rl.session import Session
from vime.rl.text import Text


def run(config: TrainConfig) -> tuple[Verdict, dict[str, Any]]:
    """Train, and return the verdict on the whole run with the JSON fields of its report."""
    with TerminalProgress() as progress:
        steps, log = _train(config, progress)
    verdict = _whole(steps)
    extra = {"config": dataclasses.asdict(config.replace(engine_token="")), "steps": [s.to_dict() for s in steps]}
    if config.output_dir:
        from alignment.report import to_json

        if log.cost[1]:
            extra["ledger_cost"] = {"ledger_s": log.cost[0], "step_s": log.cost[1], "share": log.cost[0] / log.cost[1]}
        write_text(Path(config.output_dir) / "report.json", to_json(verdict, **extra))
    return verdict, extra


def _whole(steps: list[StepResult]) -> Verdict:
    """The verdict on a run. One that goes on in another folder than it began in has the steps before in the other one, and says so."""
    verdict = judge.run("train", [v for s in steps for v in s.verdicts])
    first = min((s.step for s in steps), default=0)
    if first:
        verdict.reason = f"from step {first} on: {verdict.reason or 'the steps before are in the ledger of the run that did them'}"
    return verdict


def train(config: TrainConfig, progress: Progress, record_layers_at: tuple[int, ...] = ()) -> list[StepResult]:
    """The loop of one configuration, with everything started before and ended after it."""
    return _train(config, progress, record_layers_at)[0]


def _train(config: TrainConfig, progress: Progress, record_layers_at: tuple[int, ...] = ()) -> tuple[list[StepResult], RunLog]:
    problems = load_problems(config)
    # what cannot be used is said before anything is compiled or started
    for flag, folder in (("--output-dir", config.output_dir), ("--save", config.save)):
        if folder:
            require_folder(Path(folder), flag)
    hf_config = read_hf_config(config.hf_checkpoint)
    require_room(config, Text(config.hf_checkpoint), problems, hf_config.get("max_position_embeddings"))
    check_spread(hf_config, config.expert_model_parallel_size)
    require_fit(config, hf_config)
    if config.num_rollout and config.n_samples_per_prompt == 1:  # the loop would say so after its first rollout
        raise ConfigError("--n-samples-per-prompt is 1; expected at least 2 where there is a step to train: a sample's advantage is over the "
                          "others of its prompt, so that one alone teaches nothing")
    for note in recipe.require(config):
        progress.note(note)
    checkpoint.require_some(config.load, config.save)
    checkpoint.require_free(config.load, config.save)
    curves = Curves(config)
    log = RunLog(config.output_dir, resumed=bool(config.load))
    try:
        steps = _run(config, progress, record_layers_at, problems, curves, log)
        if log.on:
            verdict = _whole(steps)
            log.end(config.num_rollout, verdict.status.value, verdict.reason)
    finally:
        log.close()
    return steps, log


def _run(config: TrainConfig, progress: Progress, record_layers_at: tuple[int, ...], problems: list[Problem], curves: Curves,
         log: RunLog) -> list[StepResult]:
    with tempfile.TemporaryDirectory(prefix="vime-logs-") as scratch:
        logs = Path(config.output_dir) / "logs" if config.output_dir else Path(scratch)
        if config.device == "cpu" and config.aligned:  # said first: to look for the kernels is to import, and so to compile them
            progress.phase("loading the CPU kernels (compiled once on a machine, a minute or two)")
            prepare_kernels(config)
        progress.phase(f"starting Megatron and vLLM in {config.dtype}, vime {'on' if config.aligned else 'off'}")
        with Session(config, logs) as session, curves:
            if session.fingerprint:
                progress.note(f"both sides hold contract {session.fingerprint}")
            if session.left_out:
                progress.note(session.left_out)
            loop = Loop(config, session, problems, progress, record_layers_at, log)
            steps = earlier.steps(log, loop.first_step)
            for verdict in [v for s in steps for v in s.verdicts if not v.green][:1]:
                progress.note(escape(f"before the restart: {verdict.status}, {verdict.name}: {verdict.reason}"))
            for result in loop.run():
                steps.append(result)
                progress.note(escape(describe(result)))
                if config.output_dir:
                    curves.step(result.step, result.metrics)
                    lines = [json.dumps(strict({"step": s.step, **s.metrics}), default=str) for s in steps if s.metrics]
                    write_text(Path(config.output_dir) / earlier.METRICS, "\n".join(lines) + "\n")
    return steps


def describe(result: StepResult) -> str:
    """One line for a person."""
    m = result.metrics
    text = (f"step {result.step}: {m['differing']} of {m['tokens']} log-probs differ "
            f"(train_rollout_logprob_abs_diff {m['train_rollout_logprob_abs_diff']:.3g}, max {m['train_rollout_logprob_abs_diff_max']:.3g}), "
            f"reward {m['reward']:.3f}, cached prompt tokens {m['cached_prompt_tokens']}")
    if result.trained:
        text += f", loss {m['loss']:.3g}, gradient {m['grad_norm']:.3g}, {m['tensors_changed']} of {m['tensors']} tensors changed"
    return text
