"""Puts what the two sides hold before :mod:`alignment`, which alone decides. Only re-keying happens here."""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from alignment.verdict import Coverage, Place, Status, Verdict, combine
from vime.errors import VimeError
from vime.rl.batch import Trajectory
from vime.rl.sync import Update


class RecordingError(VimeError):
    """A layer record lacks rows that it must have."""


def logprobs(batch: Sequence[Trajectory], trainer_logprobs: Sequence[np.ndarray], temperature: float, step: int) -> Verdict:
    """The engine's log-probabilities of the sampled tokens (side a) against the trainer's (side b)."""
    from alignment.logprobs import judge

    def records(values: Sequence[np.ndarray]) -> dict[str, dict[str, Any]]:
        return {t.request_id: {"token_ids": t.response_ids, "prompt_token_ids": t.token_ids[:t.prompt_len], "logprobs": v}
                for t, v in zip(batch, values, strict=True)}

    verdict = judge(records([t.rollout_logprobs for t in batch]), records(trainer_logprobs), name=f"logprobs after update {step}",
                    temperature=temperature, top_p=1.0, top_k=-1)
    inner = verdict.children[-1].coverage
    verdict.coverage["tokens"] = inner.get("tokens", verdict.coverage["tokens"])  # not counted twice, as identity and as number
    if verdict.first_bad is not None:
        verdict.first_bad = dataclasses.replace(verdict.first_bad, step=step)
    return verdict


def metrics(batch: Sequence[Trajectory], trainer_logprobs: Sequence[np.ndarray]) -> dict[str, float]:
    """``train_rollout_logprob_abs_diff`` (the mean of each sample's mean, as the field prints it), and what is judged."""
    differences = [np.abs(t.rollout_logprobs.astype(np.float64) - v) for t, v in zip(batch, trainer_logprobs, strict=True)]
    flat = np.concatenate(differences)
    return {
        "train_rollout_logprob_abs_diff": float(np.mean([d.mean() for d in differences])),
        "train_rollout_logprob_abs_diff_max": float(flat.max()),
        "train_rollout_logprob_abs_diff_p99": float(np.quantile(flat, 0.99)),
        "tokens": int(flat.size),
    }


def weights(update: Update) -> Verdict:
    """Every tensor of the trainer against what the engine holds after the update; an update that changed nothing is NOT_RUN."""
    from alignment.digest import judge

    def keyed(digests: Mapping[str, str]) -> dict[str, str]:
        return {name: f"xxh3:{digest}" for name, digest in digests.items()}

    if not update.engine:
        return Verdict(f"weights after update {update.version}", Status.NOT_RUN,
                       "the engine keeps its weights packed, so they cannot be read back")
    verdict = judge(keyed(update.trainer), keyed(update.engine), name=f"weights after update {update.version}")
    if update.changed == 0 and verdict.status is Status.PASS:
        verdict = dataclasses.replace(verdict, status=Status.NOT_RUN, reason="the update changed no weight: nothing was shown")
    verdict.stats["tensors_changed"] = update.changed
    return verdict


def replay(ratio_off: int, tokens: int, step: int) -> Verdict:
    """The training forward gave the bits of the no-grad pass, so that every ratio of the loss was exactly 1."""
    return Verdict(f"training forward of step {step}", Status.FAIL if ratio_off else Status.PASS,
                   f"{ratio_off} of {tokens} tokens have another log-probability with gradient than without" if ratio_off else "",
                   coverage={"tokens": Coverage(tokens, tokens)}, first_bad=Place(step=step) if ratio_off else None)


def layers(batch: Sequence[Trajectory], engine: Any, trainer: Sequence[Any], num_layers: int, step: int) -> Verdict:
    """Every layer's output of every token that the engine fed: hidden state plus residual.

    ``engine`` are :class:`vime.vllm.records.EngineRecords`, ``trainer`` the ranks'
    :class:`vime.megatron.forward.Recording` in batch order. A position that came from the prefix cache has its row in
    the request that filled the cache: the row of an equal prefix of tokens.
    """
    from alignment.layers import judge

    names = [*(f"layers.{i}" for i in range(num_layers)), "final_norm"]
    sequences = {t.request_id: t.token_ids for t in batch}
    by_prefix: dict[tuple[int, ...], int] = {}
    row_of: dict[tuple[str, int], int] = {}
    for row, (request, position, token) in enumerate(engine.rows):
        ids = sequences.get(request)
        if ids is None or position >= len(ids) or ids[position] != token:
            raise RecordingError(f"the engine recorded request {request}, position {position}, token {token}, which was not sampled")
        row_of[request, position] = row
        by_prefix.setdefault(tuple(ids[:position + 1]), row)
    rows: list[int] = []
    keys: list[tuple[str, int, int]] = []
    keep: list[int] = []
    offset = 0
    for t in batch:
        for position in range(len(t.token_ids) - 1):  # the last token was sampled, never fed
            found = row_of.get((t.request_id, position))
            found = by_prefix.get(tuple(t.token_ids[:position + 1])) if found is None else found
            if found is None:
                raise RecordingError(f"no layer record of request {t.request_id}, position {position}: it came from a prefix cache "
                                     "that was filled before recording began; reset the prefix cache first")
            rows.append(found)
            keys.append((t.request_id, position, t.token_ids[position]))
            keep.append(offset + position)
        offset += len(t.token_ids)
    left = {name: engine.tensors[name][rows] for name in names}
    right = {name: torch.cat([r.outputs[name].cpu() for r in trainer])[keep] for name in names}
    verdict = judge(left, right, name=f"layers after update {step}", order=names, tokens=[k[2] for k in keys],
                    positions=[k[1] for k in keys])
    if verdict.first_bad is not None:
        at = verdict.first_bad.row
        verdict.first_bad = dataclasses.replace(verdict.first_bad, step=step, request=None if at is None else keys[at][0])
    verdict.stats["rows"] = len(rows)
    verdict.stats["rows_from_prefix_cache"] = sum((k[0], k[1]) not in row_of for k in keys)
    return verdict


def run(name: str, verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict for a whole run, in the order in which things happened."""
    return combine(name, verdicts)
