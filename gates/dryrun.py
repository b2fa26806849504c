"""What a gate would do on its GPUs, checked without one: arguments, groups, ownership, shapes, kernels and memory.

A run on eight GPUs that fails at the first collective has cost a node; everything that can be known before is known
here, from the config of the profile alone (no checkpoint is written). A dry run proves nothing about numerics: its
verdict says so by its name and never becomes evidence.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from alignment.verdict import Coverage, Place, Status, Verdict, combine
from gates import gpu_memory
from gates.gpu_memory import GIB
from gates.markers import GATES
from gates.profiles import Profile, find

#: A GPU of the machines that the gates are made for (H200), as its driver reports it.
GPU_GIB = 139.0
#: Functions of ``vime.ops`` that a model needs, by what it has.
NEEDS: dict[str, tuple[tuple[str, str], ...]] = {
    "dense": (("linear", "linear"), ("norm", "rms_norm"), ("norm", "add_rms_norm"), ("rope", "apply_rope"), ("rope", "table"),
              ("activation", "silu_and_mul"), ("embedding", "embedding"), ("logprob", "token_logprob"), ("logprob", "log_softmax"),
              ("sampling", "sample")),
    "grouped-query attention": (("attention", "attention_varlen"), ("attention", "attention_paged"), ("attention", "kv_cache_write")),
    "latent attention": (("attention", "sparse_attention"),),
    "experts": (("moe", "sigmoid"), ("moe", "exp")),
}


def run(gate: str, profile: str | None = None, gpu_gib: float = GPU_GIB, config: Mapping[str, Any] | None = None) -> Verdict:
    """Check everything about ``gate`` on CUDA that needs no GPU.

    Args:
        gate: a name of :data:`gates.markers.GATES`.
        profile: a profile; default the full six-layer GLM-5.2 for the gates on experts, else SmolLM2.
        gpu_gib: memory of one GPU.
        config: ``config.json`` in place of the profile's, for tests.

    Returns:
        One verdict with a child for each kind of check; FAIL names the first thing that stands in the way.

    Raises:
        ValueError: an unknown gate. gates.profiles.UnknownProfile: an unknown profile.
    """
    if gate not in GATES:
        raise ValueError(f"unknown gate {gate!r}; known: {', '.join(GATES)}")
    ranks = GATES[gate][0]
    from gates.experts import default_profile

    subject = find(profile if profile is not None else default_profile(ranks, "cuda") if gate.startswith("ep") else "smollm2-135m")
    hf = dict(config or _config(subject))
    children = [*_spread(gate, hf), _arguments(gate, subject, hf, ranks)]
    if all(c.green for c in children):  # of a model that is refused nothing more can be said
        children += [*_layout(hf, ranks), _kernels(hf, subject.dtypes[0]), _memory(gate, subject, hf, ranks, gpu_gib)]
    out = combine(f"dry run of {gate}", children)
    out.info |= {"profile": subject.name, "ranks": ranks, "proves": "nothing about numerics"}
    return out


def _spread(gate: str, hf: Mapping[str, Any]) -> list[Verdict]:
    """A gate on experts has nothing to spread where there are none."""
    from vime.latent import experts

    if not gate.startswith("ep") or experts(hf):
        return []
    return [Verdict("experts", Status.NOT_RUN, f"the model has no experts, so {gate} has nothing to spread over ranks",
                    coverage={"experts": Coverage(0, 1)})]


def _config(subject: Profile) -> dict[str, Any]:
    from gates.synthetic import DENSE, config_of
    from gates.synthetic_experts import SPARSE

    if subject.name in DENSE or subject.name in SPARSE:
        return config_of(subject.name)
    from vime.rl.config import read_hf_config

    return read_hf_config(subject.checkpoint())


def _train_config(gate: str, subject: Profile, hf: Mapping[str, Any], ranks: int) -> Any:
    """The config that the gate gives to its harness."""
    from gates.experts import settings
    from gates.harness import run_settings
    from vime.latent import latent
    from vime.rl.config import TrainConfig

    longest = subject.prompt_tokens + subject.response_tokens
    fields = {"max_tokens_per_gpu": max(1024, 2 * longest), **run_settings(subject, "cuda")}
    if gate.startswith("ep"):
        fields |= settings(ranks, None, subject, "cuda")
        fields["kv_cache_dtype"] = fields["kv_cache_dtype"] if latent(hf) else "auto"
    return TrainConfig(hf_checkpoint=subject.name, device="cuda", dtype=subject.dtypes[0], **fields)


def _arguments(gate: str, subject: Profile, hf: Mapping[str, Any], ranks: int) -> Verdict:
    from vime.errors import VimeError
    from vime.megatron.model import check_config
    from vime.rl.config import require_fit

    try:
        config = _train_config(gate, subject, hf, ranks)
        check_config(hf)
        require_fit(config, hf)
    except (VimeError, ValueError) as error:
        return Verdict("arguments", Status.FAIL, str(error), first_bad=Place(stage="arguments"))
    return Verdict("arguments", Status.PASS, coverage={"fields": Coverage(*[len(dataclasses.fields(config))] * 2)})


def _layout(hf: Mapping[str, Any], ranks: int) -> Iterator[Verdict]:
    """Groups and ownership: every tensor on the ranks that its place names, every expert on exactly one of a group."""
    plan, topology, error = _plan(hf, ranks)
    if error is not None or topology is None:
        yield Verdict("groups", Status.FAIL, str(error), first_bad=Place(stage="groups"))
        return
    groups = sum(len(g) for g in topology.groups.values())
    yield Verdict("groups", Status.PASS, coverage={"groups": Coverage(groups, groups)})
    bad = []
    for unit in plan.units:
        holders = [rank for rank in range(topology.world) if topology.holds(rank, unit)]
        shape = unit.shard_shape(topology.shard_size(unit))
        expected = topology.world if unit.expert is None else topology.world // topology.size("ep")
        if len(holders) != expected or not all(n > 0 for n in shape):
            bad.append((unit.name, holders, shape))
    place = Place(stage="ownership", tensor=bad[0][0]) if bad else None
    yield Verdict("ownership", Status.FAIL if bad else Status.PASS, f"{bad[0][0]} is held by ranks {bad[0][1]}" if bad else "",
                  coverage={"tensors": Coverage(len(plan.units), len(plan.units))}, first_bad=place)


def _plan(hf: Mapping[str, Any], ranks: int) -> tuple[Any, Any, Exception | None]:
    from vime.weights.errors import WeightError
    from vime.weights.families import family_for
    from vime.weights.topology import Sizes, Topology, experts_of, layers_of

    plan = None
    try:
        plan = family_for(dict(hf)).plan(hf)
        count = experts_of(plan)
        topology = Topology.build(Sizes(ep=ranks if count else 1, world=ranks), layers_of(plan), count)
        topology.check(plan)
    except WeightError as error:
        return plan, None, error
    return plan, topology, None


def _kernels(hf: Mapping[str, Any], dtype: str) -> Verdict:
    """Whether each function that the model needs has an implementation on CUDA. Whether it is proven, ``vime prove`` says."""
    import torch

    from vime.latent import experts, latent
    from vime.ops import registry

    wanted = [*NEEDS["dense"], *NEEDS["latent attention" if latent(hf) else "grouped-query attention"]]
    wanted += NEEDS["experts"] if experts(hf) else ()
    missing = []
    for op, function in wanted:
        try:
            found = registry.resolve(op, "cuda", torch.float32 if op == "moe" else getattr(torch, dtype)).functions
        except (registry.UnsupportedOp, RuntimeError) as error:
            missing.append((op, function, str(error)))
            continue
        if function not in found:
            missing.append((op, function, "no such function"))
    names = ", ".join(f"{op}.{function}" for op, function, _ in missing)
    return Verdict("kernels", Status.FAIL if missing else Status.PASS, f"no CUDA implementation of {names}" if missing else "",
                   coverage={"functions": Coverage(len(wanted), len(wanted))},
                   first_bad=Place(stage="kernels", module=f"{missing[0][0]}.{missing[0][1]}") if missing else None)


def memory(gate: str, subject: Profile, hf: Mapping[str, Any], ranks: int) -> list[gpu_memory.Rank]:
    """The largest phase of every GPU. The gates for several ranks also take steps at the other sizes of expert parallelism. Beside
    the one pair of trainer and engine, the gate on cost has a stock pair, and the gate on batches a second engine."""
    from gates.experts import spreads_on

    spreads = [ranks, *spreads_on(subject, ranks)] if gate.startswith("ep") else [1]
    found = gpu_memory.largest(gpu_memory.phases(subject, hf, _train_config(gate, subject, hf, ranks), tuple(dict.fromkeys(spreads))))
    beside = {"cost": {"stock pair": found[0].total},
              "batch": {"second engine": sum(found[0].parts.get(n, 0) for n in ("engine weights", "KV cache")) + gpu_memory.CONTEXT_GIB * GIB}}
    return [dataclasses.replace(rank, parts={**rank.parts, **beside.get(gate, {})}) for rank in found]


def _memory(gate: str, subject: Profile, hf: Mapping[str, Any], ranks: int, gpu_gib: float) -> Verdict:
    from vime.weights.errors import WeightError

    try:
        table = memory(gate, subject, hf, ranks)
    except (WeightError, ValueError) as error:
        return Verdict("memory", Status.FAIL, str(error), first_bad=Place(stage="memory"))
    worst = max(table, key=lambda r: r.total)
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in worst.parts.items() if size)
    over = worst.total > gpu_gib * GIB
    needs = f"GPU {worst.number} needs {worst.total / GIB:.1f} GiB in a {worst.phase} at EP{worst.spread}, it has {gpu_gib:g}: {parts}"
    return Verdict("memory", Status.FAIL if over else Status.PASS, needs if over else "", coverage={"ranks": Coverage(ranks, ranks)},
                   first_bad=Place(stage="memory", rank={"ep": worst.number}) if over else None,
                   stats={name: round(size / GIB, 2) for name, size in worst.parts.items()} | {
                       "total_gib": round(worst.total / GIB, 2), "phase": worst.phase, "spread": worst.spread})
