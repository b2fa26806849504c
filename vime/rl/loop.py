"""Rollout, comparison, training step, weight update, and again.

After every rollout the trainer evaluates the very tokens that the engine sampled, with the weights the engine had;
the two are compared before anything is learned from them.
"""
from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from alignment.verdict import Verdict
from vime.errors import VimeError
from vime.rl import checkpoint, judge, recipe
from vime.rl.advantage import varied_groups
from vime.rl.batch import Trajectory
from vime.rl.config import TrainConfig
from vime.rl.data import Problem, generate, load
from vime.rl.progress import Progress, Silent
from vime.rl.rollout import problems_of_step, rollout
from vime.rl.runlog import RunLog
from vime.rl.session import Session
from vime.rl.sync import update_weights
from vime.rl.text import Text

#: Generated problems of a run without data; more than any run on a laptop reads.
_GENERATED = 4096


class NothingToLearn(VimeError):
    """All rewards of a step are equal within every group."""


@dataclasses.dataclass
class StepResult:
    """One turn of the loop. ``trained`` is False for a last turn that only checks the last update."""

    step: int
    trained: bool
    metrics: dict[str, Any]
    verdicts: list[Verdict]
    batch: list[Trajectory] = dataclasses.field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        return {"step": self.step, "trained": self.trained, "metrics": self.metrics,
                "verdicts": [v.to_dict() for v in self.verdicts]}


def load_problems(config: TrainConfig) -> list[Problem]:
    """The run's data: a file or folder in GSM8K's layout, or generated."""
    return load(config.data) if config.data else generate(_GENERATED, config.seed)


class Loop:
    """Drives one session. ``record_layers_at`` names the steps whose layer outputs are compared as well, ``log`` is the
    ledger of the run.

    With ``config.load`` it goes on from the newest whole checkpoint there.

    Raises (on construction):
        CheckpointRefused, NoCheckpoint: see :mod:`vime.rl.checkpoint`.
    """

    def __init__(self, config: TrainConfig, session: Session, problems: list[Problem], progress: Progress | None = None,
                 record_layers_at: tuple[int, ...] = (), log: RunLog | None = None) -> None:
        self.config, self.session, self.problems = config, session, problems
        self.progress = progress or Silent()
        self.record_layers_at = record_layers_at
        self.log = log or RunLog("")
        self.text = Text(config.hf_checkpoint)
        self.version = self.first_step = 0
        self.digests = session.pool.named_weights_digest()
        if config.save or config.load or self.log.on:
            self.identity = {"topology": recipe.topology(config), "recipe": recipe.recipe(config, self.digests, problems),
                             "versions": recipe.versions(session.fingerprint)}
        found = self._find_checkpoint() if config.load else None
        if found is not None:
            self._go_on(found)
        elif config.engine_url:
            self._meet_running_engine()
        if self.log.on:
            self.log.start(self._facts())

    def run(self) -> Iterator[StepResult]:
        """``config.num_rollout`` turns; with ``config.check_last_update`` one more that only compares."""
        for step in range(self.first_step, self.config.num_rollout):
            result = self.turn(step, train=True)
            self._checkpoint(step + 1)
            yield result
        if self.config.check_last_update:
            yield self.turn(self.config.num_rollout, train=False)

    def _find_checkpoint(self) -> checkpoint.Found | None:
        config = self.config
        found = checkpoint.find(config.load)
        if found is None:
            checkpoint.require_some(config.load, config.save)
            self.progress.note(f"no checkpoint in {config.load} yet: starting at step 0")
            return None
        for note in found.notes + checkpoint.require(found, self.identity, config.num_rollout):
            self.progress.note(note)
        self.progress.note(f"continuing after {found.steps} steps from {found.folder.name}")
        return found

    def _go_on(self, found: checkpoint.Found) -> None:
        """Trainer and engine become what they were after that step, with the version of the weights counted on."""
        session, state = self.session, found.state
        self.progress.phase(f"restoring the state after {found.steps} steps")
        session.pool.ranks.call("load_state", str(found.folder), state["digests"])
        self.first_step = found.steps
        version = int(state["weight_version"])
        if self.config.engine_url:  # it counts its own versions
            version = max(version, int(session.client.health()["weight_version"]) + 1)
        update = update_weights(self.config, session.pool, session.client, session.engine_address, version, {})
        session.pool.ranks.call("restore_rng", state["rng"])  # last: sending weights draws random numbers, too
        self.version, self.digests = update.version, update.trainer

    def _facts(self) -> dict[str, Any]:
        """What the first line of the ledger says of this run."""
        info = self.session.client.info()
        continued = bool(self.config.load) and (self.first_step > 0 or self.log.continued)
        return {
            "fingerprint": recipe.fingerprint(self.identity["recipe"]), **self.identity, "hardware": recipe.hardware(),
            "conditions": recipe.conditions(self.config), "resumed_from": self.first_step if continued else None,
            "environment": {"trainer": self.session.pool.ranks.call("facts"),
                            "engine": {k: info[k] for k in ("versions", "threads", "cache", "ops") if k in info}},
        }

    def _checkpoint(self, steps: int) -> None:
        config = self.config
        if config.save and (steps % config.save_interval == 0 or steps == config.num_rollout):
            self.progress.phase(f"checkpoint after {steps} steps")
            checkpoint.save(config.save, steps, self.session.pool, self.identity, self.version)

    def _phase(self, step: int, text: str, total: int | None = None) -> None:
        count = self.config.num_rollout
        which = f"{step + 1} of {count}" if step < count else "last check" if count else "comparison only"
        self.progress.phase(f"step {step} ({which}) · {text}", total)

    def _meet_running_engine(self) -> None:
        """An engine that was running before may hold any weights: start from its version, with the trainer's weights."""
        client = self.session.client
        self.version = int(client.health()["weight_version"])
        theirs = {t["name"]: t["digest"] for t in client.weights_digest()["tensors"]}
        if theirs != self.digests:
            self.progress.phase("the running engine holds other weights: trainer to engine")
            self.version = update_weights(self.config, self.session.pool, client, self.session.engine_address, self.version + 1,
                                          theirs).version

    def turn(self, step: int, train: bool) -> StepResult:
        """One rollout and its comparison; with ``train`` also the optimizer step and the weight update."""
        config, pool = self.config, self.session.pool
        times: dict[str, float] = {}
        recording = step in self.record_layers_at
        self.log.begin_step()
        batch = self._timed(times, "rollout", self._rollout, step, recording)
        self._phase(step, "trainer: log-probabilities of the same tokens")
        trainer_logprobs = self._timed(times, "logprobs", pool.logprobs, batch)
        self.log.scored(batch, trainer_logprobs)
        verdicts = [judge.logprobs(batch, trainer_logprobs, config.rollout_temperature, step)]
        metrics: dict[str, Any] = {**judge.metrics(batch, trainer_logprobs), **_rollout_metrics(batch)}
        metrics["differing"] = verdicts[0].stats.get("differing")
        if recording:
            self._phase(step, "both sides: outputs of every layer")
            verdicts.append(self._timed(times, "layers", self._layers, batch, step))
        if train:
            for t, values in zip(batch, trainer_logprobs, strict=True):
                t.old_logprobs = values
            verdicts += self._train(batch, step, metrics, times)
        self._record(step, train, metrics, verdicts)
        metrics["seconds"] = times
        return StepResult(step, train, metrics, verdicts, batch)

    def _rollout(self, step: int, recording: bool) -> list[Trajectory]:
        config, client = self.config, self.session.client
        prompts = problems_of_step(self.problems, step, config.rollout_batch_size)
        self._phase(step, f"engine: {config.rollout_batch_size} prompts x {config.n_samples_per_prompt} samples "
                          f"(weights {self.version})", len(prompts) * config.n_samples_per_prompt)
        if recording:
            client.reset_prefix_cache()
            client.record(enabled=True, embedding=False)
        batch = rollout(config, self.text, prompts, step, client, self.version, on_result=lambda _: self.progress.advance(),
                        on_wave=self.log.sending)
        self.log.rollout(prompts, batch)
        return batch

    def _record(self, step: int, trained: bool, metrics: dict[str, Any], verdicts: list[Verdict]) -> None:
        if not self.log.on:
            return
        with self.log.measured():
            kernels = {"trainer": sorted(self.session.pool.counters()), "engine": sorted(self.session.client.stats()["kernels"])}
        self.log.end_step(step, trained, metrics, kernels, self.version, verdicts)

    def _layers(self, batch: list[Trajectory], step: int) -> Verdict:
        records = self.session.client.fetch_records()
        self.session.client.record(enabled=False)
        recordings = self.session.pool.record_layers(batch)
        return judge.layers(batch, records, recordings, self.session.num_layers, step)

    def _train(self, batch: list[Trajectory], step: int, metrics: dict[str, Any], times: dict[str, float]) -> list[Verdict]:
        config, session = self.config, self.session
        if metrics["groups_varied"] == 0:
            raise NothingToLearn(f"step {step}: all rewards are equal within each of the {config.rollout_batch_size} groups, so there is "
                                 "no gradient; take more samples (--n-samples-per-prompt), longer ones, or --reward gate")
        self._phase(step, "trainer: loss, backward, optimizer step")
        with session.trainer_alone():
            stats = self._timed(times, "train", session.pool.train_step, batch)
        metrics |= {"loss": sum(s.loss for s in stats), "grad_norm": stats[0].grad_norm, "grad_norm_bits": stats[0].grad_norm_bits,
                    "trained_tokens": sum(s.tokens for s in stats), "microbatches": sum(s.microbatches for s in stats),
                    "parameters_without_gradient": stats[0].without_gradient}
        if stats[0].updates is not None:
            metrics |= {"updates": sum(s.updates or 0 for s in stats), "updates_lost": sum(s.lost_updates or 0 for s in stats)}
        self._phase(step, f"weights {self.version + 1}: trainer to engine")
        update = self._timed(times, "update", update_weights, config, session.pool, session.client, session.engine_address,
                             self.version + 1, self.digests)
        self.version, self.digests = update.version, update.trainer
        if self.log.on:
            with self.log.measured():
                states = session.pool.ranks.call("state_digests")
            self.log.trained(stats, update, states)
        metrics |= {"tensors": len(update.trainer), "tensors_changed": update.changed, "update_elements": update.report.get("elements"),
                    "weight_version": self.version}
        return [judge.replay(sum(s.ratio_off for s in stats), metrics["trained_tokens"], step), judge.weights(update)]

    @staticmethod
    def _timed(times: dict[str, float], name: str, function: Any, *args: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args)
        finally:
            times[name] = round(time.perf_counter() - started, 3)


def _rollout_metrics(batch: list[Trajectory]) -> dict[str, Any]:
    groups: dict[str, list[float]] = {}
    for t in batch:
        groups.setdefault(t.prompt_id, []).append(t.reward)
    return {
        "reward": sum(t.reward for t in batch) / len(batch),
        "groups": len(groups),
        "groups_varied": varied_groups(list(groups.values())),
        "response_tokens": sum(t.response_len for t in batch),
        "prompt_tokens": sum(t.prompt_len for t in batch),
        "cached_prompt_tokens": sum(t.num_cached_tokens for t in batch),
        "truncated": sum(t.finish_reason == "length" for t in batch),
    }
