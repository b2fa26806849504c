"""Prompts to sampled trajectories.

Requests of a step go to the engine together and come back in any order; everything is matched by request id. A
sample's seed depends on the run seed, its prompt and its place in the group, nothing else.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vime.errors import VimeError
from vime.rl.advantage import grpo_advantages
from vime.rl.batch import Trajectory
from vime.rl.config import TrainConfig
from vime.rl.data import DataError, Problem
from vime.rl.reward import reward
from vime.rl.seeds import kept_hash, sample_seed
from vime.rl.text import Text


class RolloutError(VimeError):
    """The engine's answer does not fit what was asked."""


def problems_of_step(problems: Sequence[Problem], step: int, count: int) -> list[tuple[str, Problem]]:
    """``count`` prompts of a step with their unique ids; the data is read in order, again from the start at its end."""
    out = []
    for i in range(step * count, (step + 1) * count):
        epoch, line = divmod(i, len(problems))
        out.append((f"e{epoch}-{problems[line].prompt_id}", problems[line]))
    return out


def require_room(config: TrainConfig, text: Text, problems: Sequence[Problem], positions: int | None) -> None:
    """Raise for the first line of the data whose prompt and longest response exceed what a sequence may have.

    Args:
        positions: the model's ``max_position_embeddings``, None where its config does not say.

    Raises:
        DataError: naming the line, its tokens and the flag.
    """
    limits = [("--max-tokens-per-gpu", config.max_tokens_per_gpu)]
    if not config.engine_url:  # another engine has a limit of its own
        limits.append(("--max-model-len", config.max_model_len))
        if positions is not None:
            limits.append(("the model's max_position_embeddings", positions))
    name, room = min(limits, key=lambda limit: limit[1])
    around = len(text.encode_question(""))
    for problem in problems[:(config.num_rollout + config.check_last_update) * config.rollout_batch_size]:
        if around + len(problem.question.encode()) + config.rollout_max_response_len <= room:
            continue  # a token has one byte at least, so most need not be tokenized
        tokens = len(text.encode_question(problem.question))
        if tokens + config.rollout_max_response_len > room:
            raise DataError(f"{problem.prompt_id}: its prompt has {tokens} tokens, which with --rollout-max-response-len "
                            f"{config.rollout_max_response_len} is more than {name} allows ({room}); raise it, ask for shorter responses, or take "
                            "the line out")


def requests_of_step(config: TrainConfig, text: Text, prompts: Sequence[tuple[str, Problem]], step: int) -> list[Any]:
    """One engine request per sample, in prompt order, then sample order."""
    from vime.vllm.protocol import Request

    return [
        Request(
            request_id=f"s{step}/{prompt_id}/{sample}", prompt_token_ids=text.encode_question(problem.question),
            max_tokens=config.rollout_max_response_len, temperature=config.rollout_temperature, top_p=config.rollout_top_p,
            top_k=config.rollout_top_k, seed=sample_seed(config.seed, prompt_id, sample), stop_token_ids=text.eos_token_ids,
        )
        for prompt_id, problem in prompts
        for sample in range(config.n_samples_per_prompt)
    ]


def waves(config: TrainConfig, requests: Sequence[Any], step: int) -> list[list[Any]]:
    """The requests in the order and the portions in which they are sent; neither may change a bit of the answers."""
    order = list(requests)
    if config.rollout_arrival == "reversed":
        order.reverse()
    elif config.rollout_arrival == "shuffled":
        order.sort(key=lambda r: kept_hash("arrival", step, r.request_id))
        if order == list(requests):  # few requests may fall into the order that they had
            order.reverse()
    size = config.rollout_concurrency or len(order)
    return [order[i:i + size] for i in range(0, len(order), size)]


def rollout(config: TrainConfig, text: Text, prompts: Sequence[tuple[str, Problem]], step: int, client: Any, version: int,
            on_result: Callable[[Any], None] | None = None, on_wave: Callable[[Sequence[Any]], None] | None = None) -> list[Trajectory]:
    """Sample, reward and give advantages. Trajectories come in request order. ``on_wave`` is told what goes to the engine together.

    Raises:
        RolloutError: a request without an answer, an answer nobody asked for, a sample of other weights than
            ``version``, a log-probability that is not finite.
        vime.vllm.protocol.EngineError: see there.
    """
    requests = requests_of_step(config, text, prompts, step)
    samples: dict[str, Any] = {}
    for wave in waves(config, requests, step):
        if on_wave is not None:
            on_wave(wave)
        samples |= {s.request_id: s for s in client.generate(wave, on_result=on_result)}
    if samples.keys() != {r.request_id for r in requests}:
        missing = sorted({r.request_id for r in requests} - samples.keys())
        raise RolloutError(f"the engine answered {len(samples)} of {len(requests)} requests; first without an answer: "
                           f"{(missing or ['none, but some were never asked for'])[0]}")
    batch, place = [], 0
    for prompt_id, problem in prompts:
        for index in range(config.n_samples_per_prompt):
            request = requests[place]
            sample = samples[request.request_id]
            place += 1
            _check(request, sample, version)
            response = text.decode(sample.token_ids)
            batch.append(Trajectory(
                request.request_id, prompt_id, index, request.prompt_token_ids + sample.token_ids, len(request.prompt_token_ids),
                np.array(sample.logprobs, dtype=np.float32), sample.weight_version, sample.finish_reason,
                sample.num_cached_tokens, request.seed, response, reward(config.reward, problem, response, index)))
    groups = [batch[i:i + config.n_samples_per_prompt] for i in range(0, len(batch), config.n_samples_per_prompt)]
    for group, values in zip(groups, grpo_advantages([[t.reward for t in g] for g in groups]), strict=True):
        for trajectory, advantage in zip(group, values, strict=True):
            trajectory.advantage = advantage
    return batch


def _check(request: Any, sample: Any, version: int) -> None:
    name = request.request_id
    if sample.prompt_token_ids != request.prompt_token_ids:
        raise RolloutError(f"{name}: the engine answered another prompt than was sent")
    if not sample.token_ids or len(sample.token_ids) != len(sample.logprobs):
        raise RolloutError(f"{name}: {len(sample.token_ids)} tokens came with {len(sample.logprobs)} log-probabilities")
    if sample.weight_version != version:
        raise RolloutError(f"{name}: sampled with weights of version {sample.weight_version}, expected {version}")
    if not np.isfinite(sample.logprobs).all():
        at = int(np.flatnonzero(~np.isfinite(sample.logprobs))[0])
        raise RolloutError(f"{name}: the log-probability of response token {at} is {sample.logprobs[at]}; likely NaN in the weights")
