"""The same input twice, and everything that must not matter: the run, the batch, the cache, the message size.

Runs are compared op by op in the order in which the ops ran; the first op that differs is the place, and what differs
between the runs besides (its axes: cached tokens, rows, tokens per expert, bytes ...) is the trigger. A test of an
axis that never moved has not been run, and says so.
"""
from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from alignment import diagnose, fingerprints, mapping
from alignment.errors import InputError, KeyCollision
from alignment.sources import as_source, as_tensor
from alignment.sweeps import crossed, judge_sweep
from alignment.verdict import Cause, Coverage, Place, Status, Verdict

__all__ = ["Run", "crossed", "judge", "judge_configs", "judge_environment", "judge_self", "judge_sweep", "training_modules"]


@dataclasses.dataclass(frozen=True)
class Run:
    """One run: its ops in the order in which they ran, and what was different about it.

    Attributes:
        ops: {op: tensor} or pairs (op, tensor). A tensor holds only the rows that all runs share: the caller selects
            the rows of the request, never this library.
        axes: what must not matter, e.g. {"cached tokens": 4, "batch size": 2}.
        config: facts that must be equal between runs and ranks, e.g. {"l2norm": {"lanes": 1024}}.
        process: anything that tells processes apart (a pid), where a fresh process is part of the claim.
    """

    ops: mapping.Named
    axes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    label: str | None = None
    process: Any = None


def judge(
    runs: Sequence[Any] | Mapping[Any, Any],
    *,
    name: str = "rerun",
    tier: str | float = "exact",
    require: Iterable[str] = (),
    require_hits: str | None = None,
    fresh_process: bool = False,
    side: str = "run",
) -> Verdict:
    """Compare every run with the first one.

    Args:
        runs: a list, or {label: run}; a run is a :class:`Run`, {op: tensor}, or one tensor. Keep the first run: a
            warm-up that is thrown away is an axis that was not compared.
        require: axes that must have differed between two of the runs; one that did not is NOT_RUN.
        require_hits: an axis that counts (prefix-cache hits): above 0 in some run, or NOT_RUN.
        fresh_process: runs must come from at least two processes.
        side: what a run is called in the report ("run", "rank").
    """
    if not isinstance(runs, Mapping | Sequence) or isinstance(runs, str | bytes):
        raise InputError(f"runs are a {type(runs).__name__}", "a list of runs, or {label: run}")
    table = {str(k): _run(r) for k, r in (runs.items() if isinstance(runs, Mapping) else enumerate(runs, 1))}
    if len(table) < len(runs):
        raise KeyCollision(f"{len(runs)} runs under {len(table)} labels: {[*map(str, runs)]}", "one label a run (1 and '1' are one)")
    labels = list(table)
    if len(table) < 2:
        return Verdict(name, Status.NOT_RUN, f"{len(table)} {side}(s): nothing to compare with", tier=str(tier),
                       coverage={f"{side}s": Coverage(0, 2)})  # fmt: skip
    children = []
    if any(r.config for r in table.values()):
        keys = {(int(k) if k.isdigit() else k): r.config for k, r in table.items()}
        children.append(fingerprints.judge(keys, side=side))
    first = table[labels[0]]
    pairs: dict[str, Verdict] = {}
    for label in labels[1:]:
        pairs[label] = _pair(first, table[label], labels[0], label, name, tier, side)
    trigger = _triggers(table, pairs, labels)
    bad = [v for v in pairs.values() if v.status is not Status.PASS]
    if bad and trigger is not None and bad[0].status is Status.FAIL:
        bad[0].causes.insert(0, trigger)
    children += pairs.values()
    children += _axes(table, [require] if isinstance(require, str) else list(require), require_hits, name)
    if fresh_process:
        processes = {str(r.process) for r in table.values() if r.process is not None}
        many = len(processes) > 1
        text = "all runs come from one process: its caches and seeds agree with themselves"
        text = text if processes else "no run says which process it comes from"
        children.append(Verdict(f"{name}.process", Status.PASS if many else Status.NOT_RUN, "" if many else text,
            coverage={"processes": Coverage(min(len(processes), 2) if many else 0, 2)}))  # fmt: skip
    out = mapping.in_order(name, children, tier=str(tier))
    out.coverage[f"{side}s"] = Coverage(len(table), len(table))
    out.info["pairs"] = {f"{labels[0]} vs {k}": v.status.value for k, v in pairs.items()}
    out.info["groups"] = _groups(table, labels)
    return out


def _run(value: Any) -> Run:
    if isinstance(value, Run):
        return value
    if isinstance(value, Mapping):
        if isinstance(value.get("ops"), Mapping) and set(value) <= {f.name for f in dataclasses.fields(Run)}:
            return Run(**value)
        return Run(value)
    if isinstance(value, list | tuple) and value and all(isinstance(v, tuple) and len(v) == 2 and isinstance(v[0], str) for v in value):
        return Run(value)
    return Run({"output": value})


def _copied(value: Any) -> Run:
    """The result of one call by itself: a call that fills one buffer every time would be compared with itself."""
    return Run({n: as_tensor(v, n).clone() for n, v in mapping.as_mapping(_run(value).ops).items()})


def _pair(first: Run, other: Run, a: str, b: str, name: str, tier: Any, side: str) -> Verdict:
    def locate(tensor: str, found: Place) -> Place:
        return dataclasses.replace(found, module=found.module or tensor)

    def explain(tensor: str, x: Any, y: Any) -> list[Cause]:
        sx, sy = as_source(x, tensor), as_source(y, tensor)
        bad = [(f"{tensor} ({side} {label})", s.tensor()) for label, s in ((a, sx), (b, sy)) if s.nbytes < 64 << 20]
        origin = diagnose.nonfinite(bad)
        if origin is not None:
            finite = [diagnose.nonfinite([x]) is None for x in bad]
            kind = origin.text.partition(" ")[0]
            change = f" (finite→{kind} between the runs)" if finite[0] else f" ({kind}→finite between the runs)" if finite[-1] else ""
            return [dataclasses.replace(origin, text=origin.text + change)]
        return diagnose.tensor(x, y, tensor)

    options = mapping.Options(tier, Place(run=f"{a} vs {b}"), explain, locate, "ops")
    return mapping.compare(first.ops, other.ops, f"{name}[{side} {a} vs {b}]", None, options)


def _same(x: Run, y: Run) -> bool:
    """Bit-equal ops; what is not a number is the same if its bits are."""
    left, right = mapping.as_mapping(x.ops), mapping.as_mapping(y.ops)
    from alignment.digest import digest_all

    return left.keys() == right.keys() and digest_all(left) == digest_all(right)


def _groups(table: Mapping[str, Run], labels: list[str]) -> list[list[str]]:
    """Runs that agree with each other."""
    groups: list[list[str]] = []
    for label in labels:
        home = next((g for g in groups if _same(table[g[0]], table[label])), None)
        groups.append([label]) if home is None else home.append(label)
    return groups


def _triggers(table: Mapping[str, Run], pairs: Mapping[str, Verdict], labels: list[str]) -> Cause | None:
    """The axes that differ exactly where the runs do, and those that do not differ at all."""
    bad = next((k for k in labels[1:] if pairs[k].status is Status.FAIL), None)
    if bad is None:
        return None
    axes = {label: {n: fingerprints.plain(v) for n, v in table[label].axes.items()} for label in labels}
    first, other = axes[labels[0]], axes[bad]
    names = list(dict.fromkeys([*first, *other]))
    moved = [n for n in names if first.get(n) != other.get(n)]
    same = [n for n in names if first.get(n) == other.get(n)]
    # An axis that also moved between runs that agree, or stayed where runs differ, is not the trigger.
    def explains(axis: str) -> bool:
        for x, y in itertools.combinations(labels, 2):
            differ = axes[x].get(axis) != axes[y].get(axis)
            if not _same(table[x], table[y]) and not differ:
                return False
        return True

    likely = [n for n in moved if explains(n)] or moved
    if not names:
        return None
    if not moved:
        text = "no axis differs between the runs (" + ", ".join(f"{n} {first[n]}" for n in same) + "): not deterministic, or an axis is not recorded"
        return Cause("nondeterministic", text, None, {"same": same})
    said = ", ".join(f"{n} {first.get(n)} vs {other.get(n)}" for n in likely)
    if same:
        said += ", same " + ", ".join(f"{n} {first[n]}" for n in same)
    return Cause("trigger", f"trigger: {said}", None, {"axes": {n: [first.get(n), other.get(n)] for n in likely}, "same": same})


def _axes(table: Mapping[str, Run], require: list[str], hits: str | None, name: str) -> list[Verdict]:
    out = []
    for axis in require:
        values = [fingerprints.plain(v) for r in table.values() if (v := r.axes.get(axis)) is not None]
        kinds = {str(v) for v in values}
        moved = any(v != values[0] and str(v) != str(values[0]) for v in values)  # 1 and 1.0 are one value, nan is nan
        text = "" if moved else f"axis {axis!r} was {'never recorded' if not kinds else 'always ' + kinds.pop()}: it was not compared"
        out.append(Verdict(f"{name}.axis[{axis}]", Status.PASS if moved else Status.NOT_RUN, text, coverage={"axes": Coverage(int(moved), 1)}))
    if hits is not None:
        counts = [r.axes.get(hits) or 0 for r in table.values()]
        if not all(isinstance(c, int | float) for c in counts):
            raise InputError(f"axis {hits!r} holds {counts}", "numbers that count hits")
        top = max(counts, default=0)
        text = "" if top > 0 else f"{hits} is 0 in every run: no run was warm"
        out.append(Verdict(f"{name}.axis[{hits}]", Status.PASS if top > 0 else Status.NOT_RUN, text, coverage={"axes": Coverage(int(top > 0), 1)}))
    return out


def judge_configs(sides: Mapping[Any, Any], *, name: str = "config fingerprint", side: str = "rank") -> Verdict:
    """Configurations (autotune winners, tile sizes, kernel ids) of each rank or process: {rank: {op: {field: value}}}."""
    return fingerprints.judge(sides, what="config", name=name, side=side)


def judge_environment(sides: Mapping[Any, Any], *, name: str = "environment fingerprint", side: str = "process") -> Verdict:
    """What each process reports about itself (hash of a probe, seeds, flags): {process: {fact: value}}."""
    return fingerprints.judge(sides, what="environment", name=name, side=side)


#: Parts of the names of attributes that say how much a module in training mode disturbs what it computes.
_NOISE = ("drop", "jitter")
#: Fields of a config that modules read without keeping a copy. Other fields may belong to heads that are not there.
_CONFIG = ("attention_dropout", "attn_dropout", "hidden_dropout", "router_jitter_noise", "moe_input_jitter_eps")


def training_modules(model: torch.nn.Module) -> list[str]:
    """Modules in training mode that then draw random numbers, with their p, or read the statistics of their batch; the dropout
    and the router's jitter that a module keeps in its ``config`` too."""
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"a model of type {type(model).__name__}", "a torch.nn.Module")
    found = []
    configs = set[int]()
    for name, module in model.named_modules():
        if not module.training or isinstance(module, torch.nn.modules.loss._Loss):  # whose p is a norm
            continue
        if isinstance(module, torch.nn.RReLU) and module.lower < module.upper:
            found.append(f"{name or '(root)'}: RReLU, training=True, random slopes")
        if isinstance(module, torch.nn.modules.batchnorm._NormBase) and not isinstance(module, torch.nn.modules.instancenorm._InstanceNorm):
            found.append(f"{name or '(root)'}: {type(module).__name__}, training=True, statistics of the batch")
        fields = {n: getattr(module, n, None) for n in ("p", *sorted(n for n in vars(module) if any(w in n for w in _NOISE)))}
        config = vars(module).get("config")
        if config is not None and id(config) not in configs:
            configs.add(id(config))
            fields |= {f"config.{n}": getattr(config, n, None) for n in _CONFIG}
        for field, p in fields.items():
            if isinstance(p, int | float) and not isinstance(p, bool) and 0 < p <= 1:
                found.append(f"{name or '(root)'}: {type(module).__name__}, training=True, {field}={p}")
                break
    return found


def judge_self(
    call: Callable[[], Any], model: torch.nn.Module | None = None, *, times: int = 2, name: str = "trainer vs itself",
    tier: str | float = "exact",
) -> Verdict:
    """Call the trainer's log-prob pass ``times`` times on one input and compare it with itself. Belongs before any
    comparison with a rollout: a trainer that differs from itself would put the blame on the kernels.

    With ``model``, modules in training mode with p > 0, jitter or batch statistics are listed, and are a FAIL even if two
    passes agree (a pass that seeds itself always does).
    """
    if times < 2:
        raise InputError(f"times={times}", "at least 2")
    verdict = judge([_copied(call()) for _ in range(times)], name=name, tier=tier)
    noisy = training_modules(model) if model is not None else []
    if noisy:
        text = f"{len(noisy)} module(s) in training mode with p > 0, jitter or batch statistics: " + "; ".join(noisy[:4])
        verdict.causes.insert(0, Cause("training_mode", text, None, {"modules": noisy}))
        verdict.info["training_modules"] = noisy
        if verdict.status is Status.PASS:
            verdict.status, verdict.reason = Status.FAIL, text
            verdict.first_bad = Place(module=noisy[0].partition(":")[0])
    return verdict


