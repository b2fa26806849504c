"""Memory of every GPU of a gate, from the config of its profile alone: what lies there in each phase, and the largest phase.

The trainer's ranks have a GPU each. An engine of one rank lies on the first of them, whole; one of several spreads its experts
as the trainer does. With ``offload_rollout`` it sleeps while the trainer steps; gradients exist from then until the next forward,
so it wakes beside them. An update waits on the host where the GPU lacks the room (:func:`vime.vllm.receiver.place`), so it counts
as buckets. Activations are those of full recompute: every layer's input and the widest layer at work.
"""
from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from gates.profiles import Profile

GIB = 2**30
#: CUDA context, libraries and the allocator's slack of one process.
CONTEXT_GIB = 3.0


@dataclasses.dataclass(frozen=True)
class Rank:
    """What one GPU holds in one phase, in bytes by part. ``spread`` is the size of expert parallelism."""

    number: int
    phase: str
    spread: int
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def largest(ranks: list[Rank]) -> list[Rank]:
    """The largest phase of each GPU."""
    worst: dict[int, Rank] = {}
    for rank in ranks:
        if rank.number not in worst or rank.total > worst[rank.number].total:
            worst[rank.number] = rank
    return list(worst.values())


def phases(subject: Profile, hf: Mapping[str, Any], config: Any, spreads: tuple[int, ...]) -> list[Rank]:
    """Every GPU in every phase: steps at each of ``spreads``, rollouts and updates at that of the run (the first).

    Raises:
        vime.weights.errors.WeightError: the experts do not divide.
    """
    ranks, out = config.actor_num_gpus, []
    width = 2 if config.dtype == "bfloat16" else 4
    gradient = 4 if config.accumulate_allreduce_grads_in_fp32 else width
    # Adam: two fp32 moments; fp32 masters of bf16 weights, and fp32 copies of bf16 gradients while it runs
    states = 0 if config.optimizer == "sgd" else 8 if width == 4 else 12
    copied = 4 if config.optimizer == "adam" and gradient == 2 else 0
    tokens, rows, recorded = _tokens(subject, ranks)
    tokens = min(tokens, config.max_tokens_per_gpu)
    wide, kept, cache = _widths(hf, config, width)
    vocab, bucket = int(hf["vocab_size"]) * width, 2 * int(hf["vocab_size"]) * int(hf["hidden_size"]) * width
    engine = sum(split(hf, config.engine_data_parallel_size))
    # E4M3 and an fp32 scale for each 128 elements of a row, of all but embedding and head
    quantised = max(0, engine - 2 * int(hf["vocab_size"]) * int(hf["hidden_size"])) * (1 + 4 / 128) if config.fp8 and config.vllm_keep_fp8_weights else 0
    for spread in spreads:
        dense, experts = split(hf, spread)
        whole, copies = dense + experts, ranks // spread
        # partial sums by source rank, unless each layer adds them up in its backward (vime.megatron.gradients)
        at_once = copies == 1 and tokens >= _tokens(subject, ranks)[0]
        partials = 0 if at_once else (spread - 1) * experts * gradient
        for number in range(ranks):
            here = config.engine_data_parallel_size > 1 or number == 0
            awake = {"engine weights": engine * width, "KV cache": max(config.kv_cache_gib * GIB, cache)} if here else {}
            if here and quantised:
                awake["kept FP8 weights"] = quantised
            asleep = {} if config.offload_rollout else awake
            gradients = {"gradients": whole * gradient}
            outside = {} if config.offload_rollout else gradients
            always = {"trainer weights": whole * width, "optimizer": whole * states, "contexts": (1 + here) * CONTEXT_GIB * GIB}
            out.append(Rank(number, "step", spread, {
                **always, "gradients": whole * (gradient + copied), **asleep, "partial sums of experts": partials,
                "activations": tokens * (kept + 2 * wide), "logits": 2 * rows * vocab}))
            out.append(Rank(number, "forward", spread, {
                **always, **(awake if spread == spreads[0] else asleep), **outside, "activations": max(tokens, recorded) * wide,
                "logits": recorded * vocab}))
            if spread == spreads[0] and config.offload_rollout:
                out.append(Rank(number, "waking", spread, {**always, **gradients, **awake}))
            if spread == spreads[0]:
                out.append(Rank(number, "weight update", spread, {**always, **awake, **outside, "buckets": bucket}))
    return out


def _tokens(subject: Profile, ranks: int) -> tuple[int, int, int]:
    """Of the rank that gets most: tokens of a step, response tokens of a step, tokens whose layers are recorded."""
    from gates.experts import SAMPLES
    from vime.rl.packing import split_among

    def most(lengths: list[int]) -> int:
        return max(sum(lengths[i] for i in part) for part in split_among(len(lengths), ranks))

    def lengths(prompts: int, samples: int) -> list[int]:  # as Harness.requests
        found = [3 + (subject.prompt_tokens - 3) * (p + 1) // prompts + subject.response_tokens for p in range(prompts)]
        return [n for n in found for _ in range(samples)]

    sequences = -(-subject.prompts * SAMPLES // ranks)
    return most(lengths(subject.prompts, SAMPLES)), sequences * subject.response_tokens, most(lengths(2 * subject.prompts, 1))


def _widths(hf: Mapping[str, Any], config: Any, width: int) -> tuple[int, int, int]:
    """Bytes a token: of the widest layer at work, of what recompute keeps; and bytes of the cache of one sequence."""
    from vime.latent import experts, latent

    hidden, layers = int(hf["hidden_size"]), int(hf["num_hidden_layers"])
    moe, mla = experts(hf), latent(hf)
    heads = mla.heads * (2 * mla.row + mla.v + mla.nope) if mla else 4 * hidden
    # rows of a token's experts that arrive here, if tokens choose them evenly: input, gate and up, their product, output
    rows = moe.top_k * (2 * hidden + 3 * moe.ffn) if moe else 0
    widest = max(heads + 4 * hidden, rows + 4 * hidden, 3 * int(hf.get("intermediate_size") or hidden))
    row = (mla.row + (mla.indexer.dim if mla.indexer else 0)) * layers * width if mla else 4 * hidden * layers
    return widest * width, layers * hidden * width, row * config.max_model_len


def split(hf: Mapping[str, Any], spread: int) -> tuple[int, int]:
    """Elements on a rank: of what every rank holds, and of its experts."""
    from vime.weights.families import family_for

    count: Counter[bool] = Counter()
    for unit in family_for(dict(hf)).plan(hf).units:
        count[unit.expert is not None] += math.prod(unit.shape)
    return count[False], count[True] // spread
