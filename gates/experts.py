"""What the gates on latent attention and experts do with a harness: one end-to-end run, one layer by layer, one over topologies.

The same functions serve the packaged gates (``gates/test_ep.py``) and the two tests that carry the mission's names
(``tests/test_glm52_*``). Every verdict is :mod:`alignment`'s.
"""
from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from alignment import ledger
from alignment.verdict import Coverage, Place, Status, Verdict
from gates.fixtures import Gate
from gates.harness import Harness
from gates.judging import same_layers, same_logprobs, same_weights
from gates.profiles import Profile

PROFILE = "glm5.2-6layer-tiny"
#: What the gates run on where nothing else is asked for: the true widths on GPUs, the same structure made small on a CPU.
PROFILES = {"cpu": PROFILE, "cuda": "glm5.2-6layer"}
ONE_GPU = "glm5.2-6layer-128e"  # trainer and engine on one GPU: with all 256 experts they do not fit
SAMPLES = 2  # a prompt: advantages compare the samples of one prompt
_EXPERT = ".local_experts."
_ROUNDED_AWAY = ("slots added in expert order", "slots unsorted in the no-grad pass")
_PROBES = 256  # prompts among which one is looked for that shows a fault of these


def default_profile(ranks: int, device: str) -> str:
    """What a gate of that many ranks runs on."""
    return ONE_GPU if device == "cuda" and ranks == 1 else PROFILES[device]


def settings(ranks: int, folder: Any = None, profile: Profile | None = None, device: str = "cpu") -> dict[str, Any]:
    """Fields of the run: experts over all trainer ranks, full recompute, a frozen indexer; with several ranks and latent
    attention (``folder`` None: yes) the FP8 cache, else one in the model's dtype. With several ranks a step is one microbatch
    (:func:`vime.megatron.gradients.one_microbatch`). On ``device`` ``"cuda"`` the engine has as many ranks, one beside each of the
    trainer's: on a CPU as many engines would only take turns."""
    fp8 = ranks > 1 and (folder is None or _shapes(folder)[0] is not None)
    fields = {"actor_num_gpus": ranks, "expert_model_parallel_size": ranks, "kv_cache_dtype": "fp8_e4m3" if fp8 else "auto",
              "recompute": True, "freeze_indexer": True, "engine_data_parallel_size": ranks if device == "cuda" else 1}
    if device == "cuda":
        fields["enforce_eager"] = True  # graphs of these layers are compared in tests/cuda/test_graphs_moe.py
    if profile is None:
        return fields
    longest, sequences = profile.prompt_tokens + profile.response_tokens, profile.prompts * SAMPLES
    tokens = longest * (-(-sequences // ranks) if ranks > 1 else 2)
    fields["max_tokens_per_gpu"] = max(1024, tokens)
    return {name: value for name, value in fields.items() if name not in profile.train}  # what is asked of the profile goes first


def _shapes(folder: Any) -> tuple[Any, Any]:
    """Latent attention (or None) and experts of a checkpoint."""
    from vime.latent import experts, latent
    from vime.rl.config import read_hf_config

    config = read_hf_config(folder)
    return latent(config), experts(config)


def _has_indexer(harness: Harness) -> bool:
    mla, _ = _shapes(harness.folder)
    return mla is not None and mla.indexer is not None


def requests(harness: Harness, tag: str) -> list[Any]:
    return harness.requests(harness.profile.prompts, SAMPLES, tag=tag)


def layers(harness: Harness) -> tuple[Any, Any]:
    """Samples and the engine's layers: one sample a prompt, since the prefix cache computes a shared prompt once only."""
    return harness.engine_layers(harness.requests(2 * harness.profile.prompts, tag="layers"))


def abs_diff(samples: Any, trainer: list[dict[str, Any]]) -> float:
    """``train_rollout_logprob_abs_diff``: the mean of each sample's mean, as the field prints it."""
    return float(np.mean([np.abs(np.asarray(s.logprobs, np.float32) - t["logprobs"]).mean()
                          for s, t in zip(samples, trainer, strict=True)]))


def rollout_and_step(gate: Gate, harness: Harness, updates: int) -> float:
    """Rollout, comparison, step, online update, again: ``updates`` times and one comparison more. The largest abs diff."""
    if _has_indexer(harness):
        gate.happened("keys were dropped by the indexer", _dropped(gate, harness, requests(harness, "warm")))
    worst = 0.0
    for step in range(updates + 1):
        samples = harness.generate(requests(harness, f"s{step}-"))
        trainer = harness.logprobs(samples)
        worst = max(worst, abs_diff(samples, trainer))
        if not gate.record(same_logprobs(samples, trainer, f"after {step} update(s)", gate.tier)).green:
            return worst
        if step < updates:
            before = harness.trainer_digests()
            _step(gate, harness, samples, step)
            update = harness.update()
            gate.happened(f"step {step}: tensors changed", update.changed)
            gate.record(same_weights(update.trainer, update.engine, f"version {update.version}"))
            frozen = [n for n in update.trainer if ".indexer." in n]
            moved = [n for n in frozen if before[n] != update.trainer[n]]
            if _has_indexer(harness):
                gate.record(_none(f"step {step}: the indexer is frozen", moved, len(frozen), "changed"))
    gate.describe(train_rollout_logprob_abs_diff=worst)
    return worst


def _dropped(gate: Gate, harness: Harness, warm: list[Any]) -> int:
    harness.generate(warm)
    stats = harness.session.client.stats()
    gate.describe(keys_seen=stats["keys_seen"], keys_dropped=stats["keys_dropped"])
    print(f"keys: {stats['keys_dropped']} of {stats['keys_seen']} were dropped by the indexer")
    return int(stats["keys_dropped"])


def _step(gate: Gate, harness: Harness, samples: Any, step: int) -> None:
    stats = harness.train(samples, SAMPLES)
    gate.happened(f"step {step}: rewards varied in groups", harness.varied)
    gate.happened(f"step {step}: training forward equals the no-grad pass", stats.ratio_off == 0)
    trained = {name for part in harness.session.pool.ranks.call("gradient_digests") for name in part}
    main = _main_parameters(harness)
    without = set(stats.without_gradient) | (main - trained)
    idle = {n.rpartition(".linear_")[0] for n in without if _EXPERT in n}
    print(f"step {step}: {len(main - without)} of {len(main)} main parameters got a gradient; {len(idle)} experts had no token")
    gate.happened(f"step {step}: every expert had a token", not idle)
    lost = sorted(n for n in without if _EXPERT not in n)
    gate.record(_none(f"step {step}: every main parameter got a gradient", lost, len(main - without), "got none"))


def _main_parameters(harness: Harness) -> set[str]:
    """Megatron's names of everything that a step has to train: all that the checkpoint fills but the indexer, which is frozen, and
    the bias of experts, which is no parameter."""
    from vime.rl.config import read_hf_config
    from vime.weights.families import family_for

    config = read_hf_config(harness.folder)
    return {unit.name for unit in family_for(config).plan(config).units
            if ".indexer." not in unit.name and not unit.name.endswith(".expert_bias")}


def _none(name: str, bad: list[str], of: int, what: str) -> Verdict:
    """PASS if no tensor is bad among ``of``, of which there must be some."""
    return Verdict(name, Status.FAIL if bad else Status.PASS, f"{bad[0]} {what} ({len(bad)} in all)" if bad else "",
                   coverage={"tensors": Coverage(of, of)}, first_bad=Place(tensor=bad[0]) if bad else None)


def layerwise_zero(gate: Gate, harness: Harness) -> None:
    """Every layer's output, by request, position and token; then every fault that can act on the model, each at its place."""
    samples, engine = layers(harness)
    if not gate.record(clean_layers(gate, harness, samples, engine)).green:
        return
    refused = harness.session.pool.ranks.call("refusals", True)[0]
    gate.happened("Megatron's stock dispatchers are refused by name", any("MoEAlltoAllTokenDispatcher" in r for r in refused))
    for name, layer in controls(harness).items():
        if name in _ROUNDED_AWAY:
            gate.control(name, *on_a_telling_prompt(harness, name))
        else:
            gate.control(name, Place(layer=layer), planted(harness, samples, engine, name, layer))
    gate.record(same_layers(engine, harness.trainer_layers(samples), "layers, the faults taken back", gate.tier))


def clean_layers(gate: Gate, harness: Harness, samples: Any, engine: Any) -> Verdict:
    """Every layer's output without a fault: what the engine recorded against the trainer's."""
    gate.describe(excluded=f"the terminal position of each of {len(samples)} requests: its token was sampled last and is never "
                           "fed to the engine")
    return same_layers(engine, harness.trainer_layers(samples), "layers", gate.tier)


def controls(harness: Harness) -> dict[str, int]:
    """Fault -> the layer it is planted into: one with an indexer, or one with experts, in the middle of the model.

    Of a model without an indexer, the faults of experts only.
    """
    from vime.megatron.faults import FAULTS

    mla, moe = _shapes(harness.folder)
    sparse = [i for i, has in enumerate(moe.sparse) if has]
    full = [i for i, has in enumerate(mla.indexer.full) if has] if _has_indexer(harness) else []
    return {name: places[len(places) // 2] for name, (_, on_experts) in FAULTS.items() if (places := sparse if on_experts else full)}


def on_a_telling_prompt(harness: Harness, name: str) -> tuple[Place, Verdict]:
    """The place of a fault whose traces mostly vanish in bf16, and what the gate says on a prompt where one does not.

    Another order of four fp32 additions reaches about one bf16 element in 200,000, so the prompt is looked for: with the
    trainer alone, against itself, among 256 of them and in each layer with experts.
    """
    from vime.vllm.protocol import Sample

    asked = harness.requests(_PROBES, tag="probe")
    probe = [Sample(request_id=r.request_id, prompt_token_ids=r.prompt_token_ids, token_ids=[0], logprobs=[0.0],
                    finish_reason="length", weight_version=harness.version, num_cached_tokens=0) for r in asked]
    clean, ranks = harness.trainer_layers(probe), harness.session.pool.ranks
    for layer in [i for i, has in enumerate(_shapes(harness.folder)[1].sparse) if has]:
        ranks.call("plant", name, layer)
        try:
            faulty = harness.trainer_layers(probe)
        finally:
            ranks.call("plant", None)
        output = f"layers.{layer}"
        differs = (clean.outputs[output] != faulty.outputs[output]).any(1).nonzero()
        if len(differs):
            request = clean.rows[int(differs[0])][0]
            samples, engine = harness.engine_layers([r for r in asked if r.request_id == request])
            return Place(layer=layer), planted(harness, samples, engine, name, layer)
    pytest.fail(f"{name}: no prompt of {_PROBES} shows it in any layer: the fault could not be planted")


def planted(harness: Harness, samples: Any, engine: Any, name: str, layer: int) -> Verdict:
    """What the layerwise comparison says with a fault in one layer of the trainer."""
    ranks = harness.session.pool.ranks
    ranks.call("plant", name, layer)
    try:
        return same_layers(engine, harness.trainer_layers(samples), "layers")
    finally:
        ranks.call("plant", None)


def spreads_on(profile: Profile, ranks: int) -> tuple[int, ...]:
    """The EP sizes of a profile that so many ranks can take."""
    return tuple(spread for spread in profile.spreads if ranks % spread == 0)


def over_topologies(gate: Gate, harness: Harness) -> None:
    """Log-probabilities, every reduced gradient and the weights after a step, at each EP size of the profile on the same ranks.

    Control: the last size once more, with gradients added in another order of the ranks; on two ranks, whose sums have one order
    only, with two experts in each other's place.
    """
    samples = harness.generate(requests(harness, "topology-"))
    with harness.session.trainer_alone():
        _over_topologies(gate, harness, samples, spreads_on(harness.profile, harness.config.actor_num_gpus))


def _over_topologies(gate: Gate, harness: Harness, samples: Any, spreads: tuple[int, ...]) -> None:
    rows: list[tuple[int, dict[str, str]]] = []
    for spread in spreads:
        _respread(harness, spread)
        rows.append((spread, _digests(harness, samples)))
    print(table(rows))
    gate.happened("spreads beside the first", len(rows) - 1)
    first, truth = rows[0]
    gate.describe(topologies={f"EP{spread}": summary(found) for spread, found in rows})
    for spread, found in rows[1:]:
        gate.record(_same(f"EP{spread} against EP{first}", f"EP{spread}", truth, found))
    last, fault, layer = spreads[-1], "gradients added from the last rank down", 0
    if harness.config.actor_num_gpus == 2:
        fault = "one expert swapped between ranks"
        layer = controls(harness)[fault]
    _respread(harness, last)
    harness.session.pool.ranks.call("plant", fault, layer)
    try:
        faulty = _digests(harness, samples)
    finally:
        harness.session.pool.ranks.call("plant", None)
    gate.control(fault, Place(stage=f"EP{last}"), _same("topologies", f"EP{last}", truth, faulty))
    _respread(harness, last)


def _same(name: str, stage: str, truth: dict[str, str], found: dict[str, str]) -> Verdict:
    cells = [ledger.Cell(stage, n, _form(truth.get(n)), _form(found.get(n))) for n in dict.fromkeys([*truth, *found])]
    return ledger.judge(name, [stage], cells)


def _respread(harness: Harness, spread: int) -> None:
    pool = harness.session.pool
    pool.ranks.call("respread", spread)
    pool.config = pool.config.replace(expert_model_parallel_size=spread)


def _form(digest: str | None) -> str | None:
    return None if digest is None else f"xxh3-128:{digest.rpartition(':')[2]}"


def _digests(harness: Harness, samples: Any) -> dict[str, str]:
    from alignment.digest import digest

    found = {f"logprobs of {r['request_id']}": digest(np.asarray(r["logprobs"])) for r in harness.logprobs(samples)}
    harness.train(samples, SAMPLES)
    for rank, part in enumerate(harness.session.pool.ranks.call("gradient_digests")):
        for name, value in part.items():
            if found.setdefault(f"gradient of {name}", value) != value:
                found[f"gradient of {name} on rank {rank}"] = value  # ranks that share it hold different ones: no other EP has this
    return found | {f"weight {name}": value for name, value in harness.trainer_digests().items()}


def summary(found: dict[str, str]) -> dict[str, str]:
    """Kind of thing -> one digest over all of that kind, and how many there are."""
    out = {}
    for kind in ("logprobs", "gradient", "weight"):
        part = sorted((n, d) for n, d in found.items() if n.startswith(kind))
        out[kind] = f"{hashlib.sha256(repr(part).encode()).hexdigest()[:16]} ({len(part)})"
    return out


def table(rows: list[tuple[int, dict[str, str]]]) -> str:
    """The digests of all topologies, for a person."""
    lines = [f"{'':6}{'log-probs':26}{'gradients':26}{'weights after the step':26}"]
    lines += [f"EP{spread:<4}" + "".join(f"{value:26}" for value in summary(found).values()) for spread, found in rows]
    return "\n".join(lines)
