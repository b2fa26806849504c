"""Two runs of one recipe: the same bits in every step, or the first step and quantity that differ.

The steps are walked in order, and inside a step the quantities in the order of causation
(:data:`alignment.runlog.QUANTITIES`): a gradient that differs in step k comes before the token that it led to in step
k + 1. Runs of different recipes, topologies, versions or machines are no two runs of one thing, so they are INVALID and
not FAIL, unless the caller says that the comparison is across versions.
"""
from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from alignment import fingerprints, runlines
from alignment.digest import combined
from alignment.errors import InputError
from alignment.runlog import QUANTITIES, Ledger, find, read
from alignment.verdict import Cause, Coverage, Place, Status, Verdict, combine

#: The digest of a quantity without parts: equal, and no evidence.
_NOTHING = combined({})

#: Fields of the start line that two runs share, and what a difference is called.
IDENTITY = ("topology", "recipe", "versions", "hardware")
#: What may be let through by name: a comparison across versions says so in its verdict.
ACROSS = ("versions", "hardware")

#: Conditions that are judged by what was sent in the steps: its name there, and what is said where it was equal.
_SENT = {"concurrency": ("in_flight", "as many requests were in flight"), "arrival": ("order", "requests were sent in one order")}

#: Quantity that differs first -> what usually does that.
_CAUSES = {
    "prompts": Cause("data_order", "the data is read in another order: an unseeded shuffle, or other data"),
    "seeds": Cause("seed", "the seeds of requests differ: taken from a clock, a counter or a process, not from the run's seed"),
    "sampled_tokens": Cause("engine", "same prompts, seeds and trainer, other tokens: the engine's logits or its random numbers depend "
                                       "on the batch, or it holds an old prefix cache"),
    "rollout_logprobs": Cause("engine", "the engine alone differs on the same tokens: a prefix cache kept over a weight update, or a kernel "
                                         "that depends on the batch"),
    "train_logprobs": Cause("trainer", "the trainer's forward pass differs on the same tokens and weights"),
    "rewards": Cause("reward", "the reward of the same text differs: it reads a clock, a file or a random number"),
    "advantages": Cause("advantage", "the same rewards give other advantages: summed in another order, or grouped otherwise"),
    "batch_composition": Cause("batch_order", "the same samples are packed in another order: a set was iterated, or ties are not broken"),
    "loss": Cause("loss_order", "the same log-probabilities give another loss: added in another order"),
    "gradients": Cause("add_order", "the backward pass adds in no fixed order (atomic adds, a kernel that splits, a reduction over ranks)"),
    "grad_norm": Cause("norm_order", "the same gradients give another norm: summed in another order (a set was iterated, other threads)"),
    "optimizer": Cause("optimizer", "the same gradients give another optimizer state"),
    "weights": Cause("optimizer", "the same optimizer state gives other weights"),
    "engine_weights": Cause("transport", "the trainer's weights are equal and the engine's are not: the update lost or changed something"),
    "rng": Cause("random_state", "random numbers were drawn another number of times, or a generator was not seeded"),
}


def compare(a: str | Path | Ledger, b: str | Path | Ledger, *, name: str = "repro", across: Iterable[str] = (), from_step: int = 0,
            moved: Sequence[str] = ()) -> Verdict:
    """Judge two ledgers.

    Args:
        a, b: a ledger, its file, or the folder that holds it.
        across: of :data:`ACROSS`: these may differ; the verdict then says that it is across them.
        from_step: compare from this step on (a run that was continued in another folder has no earlier ones).
        moved: conditions that must have been different between the runs; one that was not is NOT_RUN.

    Raises:
        InputError: no ledger there, or an unknown name in ``across``.
    """
    unknown = sorted(set(across) - set(ACROSS))
    if unknown:
        raise InputError(f"across {', '.join(unknown)}", f"some of {', '.join(ACROSS)}")
    left, right = (x if isinstance(x, Ledger) else read(x) for x in (a, b))
    same = left is right if isinstance(a, Ledger) or isinstance(b, Ledger) else os.path.samefile(find(a), find(b))
    if same:
        return Verdict(name, Status.NOT_RUN, "both are one and the same ledger: nothing was compared", coverage={"steps": Coverage(0, 1)})
    crossed: list[str] = []
    known = bool(left.starts and right.starts)  # a ledger that does not say what it is of is compared with nothing
    identity = [_identity(left, right, field, across, crossed) for field in IDENTITY] if known else []
    comparable = known and all(v.green for v in identity)
    steps = _steps(left, right, from_step)
    copies = [s for s in steps["both"] if runlines.one_recording(left.steps[s], right.steps[s])]
    if copies and copies == steps["both"]:
        return Verdict(name, Status.NOT_RUN, "one ledger is a copy of the other: every step took the same time to the microsecond; "
                       "compare two runs", coverage={"steps": Coverage(0, len(steps["all"]))})
    lengths = _lengths(left, right)
    judged = [_judge_step(*_shared(left.steps[s], right.steps[s], bool(lengths)), s, kernels=not crossed) for s in steps["both"]] if comparable else []
    children = identity + judged + [_replayed(x) for x in (left, right) if x.replayed]
    children += [_whole("A", left), _whole("B", right), _steps_verdict(steps, comparable, from_step, lengths)]
    children += [v for side, x in (("A", left), ("B", right)) if (v := _unjudged(side, x)) is not None]
    children += [_moved(left, right, condition) for condition in moved]
    out = combine(name, children)
    places = [p for v in judged if v.first_bad is not None for p in (v.first_bad, *v.downstream)]
    if places and out.first_bad == places[0]:
        out.downstream = places[1:]
    out.coverage = {"steps": Coverage(len(judged), max(1, len(steps["all"]))),
                    "quantities": Coverage(sum(v.coverage["quantities"].compared for v in judged),
                                           max(1, sum(v.coverage["quantities"].expected for v in judged)))}
    if crossed:
        out.info["across"] = crossed
        out.reason = f"across {', '.join(crossed)}: " + (out.reason or "equal all the same")
    if from_step:
        out.reason = f"from step {from_step} on: " + (out.reason or "equal")
    out.info["conditions"] = {k: [left.start.get("conditions", {}).get(k), right.start.get("conditions", {}).get(k)]
                              for k in sorted({*left.start.get("conditions", {}), *right.start.get("conditions", {})})}
    out.info["notes"] = [f"{side}: {n}" for side, x in (("A", left), ("B", right)) for n in x.notes]
    if copies:
        out.info["notes"].append(f"{len(copies)} step(s), the first is {copies[0]}, are one recording that both ledgers hold")
    _explain(out, left, right)
    return out


def _identity(a: Ledger, b: Ledger, field: str, across: Iterable[str], crossed: list[str]) -> Verdict:
    x, y = (fingerprints.flat(v.start.get(field) or {}) for v in (a, b))
    names = list(dict.fromkeys([*x, *y]))
    differing = [n for n in names if (n in x) != (n in y) or _written(x[n]) != _written(y[n])]
    names = [n for n in names if n in differing or x[n] is not None]  # what is unknown on both sides says nothing
    if not differing:
        covered = Coverage(len(names), max(1, len(names)))
        return Verdict(f"same {field}", Status.PASS if names else Status.NOT_RUN, "" if names else f"no {field} is recorded",
                       coverage={"facts": covered})
    text = "; ".join(f"{n} {x.get(n)!r} in A, {y.get(n)!r} in B" for n in differing[:4])
    more = f" and {len(differing) - 4} more" if differing[4:] else ""
    if field in across:
        crossed.append(f"{field} ({text}{more})")
        return Verdict(f"same {field}", Status.PASS, f"across {field}: {text}{more}", coverage={"facts": Coverage(len(names), len(names))})
    todo = {"recipe": "run both with the same flags, model and data",
            "topology": "run both with the same number of ranks on the same kind of device",
            "versions": "run both in one environment, or compare --across versions",
            "hardware": "run both on one kind of machine, or compare --across hardware"}[field]
    return Verdict(f"same {field}", Status.INVALID, f"the ledgers are of different {field}: {text}{more}; {todo}",
                   coverage={"facts": Coverage(len(names) - len(differing), len(names))},
                   causes=[Cause("other_run", f"another {field}: {text}", evidence={"fields": differing})])


def _written(value: Any) -> str:
    """As the ledger has it: 1, 1.0 and true are three values there, and one in Python."""
    return json.dumps(value, sort_keys=True, default=str)


def _lengths(a: Ledger, b: Ledger) -> str:
    """In words, after how many steps each ended; empty where both were of as many, or one of them does not say."""
    x, y = ((v.end or {}).get("steps") for v in (a, b))
    return "" if x is None or y is None or x == y else f"A ended after {x} steps, B after {y}"


def _shared(a: Mapping[str, Any], b: Mapping[str, Any], cut: bool) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The lines of one step. ``cut``: where one side did no more than check the last update, only what that has."""
    if not cut or (a.get("trained") is False) == (b.get("trained") is False):
        return a, b
    x, y = ({**v, "kernels": {}, "digests": {q: d for q, d in v["digests"].items() if q in runlines.COMPARED}} for v in (a, b))
    return x, y


def _steps(a: Ledger, b: Ledger, from_step: int) -> dict[str, list[int]]:
    mine, theirs = ({s for s in x.steps if s >= from_step} for x in (a, b))
    return {"both": sorted(mine & theirs), "all": sorted(mine | theirs), "a": sorted(mine - theirs), "b": sorted(theirs - mine)}


def _steps_verdict(steps: dict[str, list[int]], comparable: bool, from_step: int, lengths: str = "") -> Verdict:
    cover = {"steps": Coverage(len(steps["both"]) if comparable else 0, max(1, len(steps["all"])))}
    if not comparable:
        return Verdict("every step", Status.NOT_RUN, "not two runs of one recipe: no step was compared", coverage=cover)
    lone = [(side, s) for side, key in (("A", "a"), ("B", "b")) for s in steps[key][:1]]
    if lengths and not lone:  # the one's last check is beside a training step of the other
        return Verdict("every step", Status.INVALID, f"{lengths}; run both with the same --num-rollout", coverage=cover)
    if lone:
        side, first = min(lone, key=lambda x: x[1])
        hint = ""
        if steps["both"] and first < steps["both"][0]:
            hint = (f"; the other was continued at step {steps['both'][0]}: name the folder with its first part, or compare with "
                    f"--from-step {steps['both'][0]}")
        elif lengths:
            hint = "; run both with the same --num-rollout"
        return Verdict("every step", Status.INVALID, f"{lengths}{': ' if lengths else ''}step {first} is in {side} only ({len(steps['a'])} only in A, {len(steps['b'])} "
                                                     f"only in B){hint}", coverage=cover)
    return Verdict("every step", Status.PASS if steps["both"] else Status.NOT_RUN, "" if steps["both"] else "no step was recorded" + (f" from step {from_step} on" if from_step else ""),
                   coverage=cover)


def _judge_step(a: Mapping[str, Any], b: Mapping[str, Any], step: int, kernels: bool = False) -> Verdict:
    """One step: the first quantity that differs, in the order of causation. ``kernels``: equal bits of other kernels are
    a difference as well, since the next input can tell them apart."""
    x, y = a["digests"], b["digests"]
    known = [q for q in QUANTITIES if q in x or q in y] + sorted((set(x) | set(y)) - set(QUANTITIES))
    both = [q for q in known if q in x and q in y]
    differing = [q for q in both if x[q] != y[q]]
    lone = [q for q in known if q not in both]
    empty = [q for q in both if x[q] == y[q] == _NOTHING]
    cover = {"quantities": Coverage(len(both) - len(empty), max(1, len(known)))}
    name = f"step {step}"
    if differing:
        first = differing[0]
        part, count = _part(a, b, first)
        place = _place(step, first, part)
        words = f"{_words(first)} {'differ' if _words(first).endswith('s') and first != 'loss' else 'differs'} first"
        where = "" if part is None else f" ({part}; {count})"
        later = f"; then {', '.join(_words(q) for q in differing[1:])}" if differing[1:] else ""
        before = [q for q in lone if known.index(q) < known.index(first)]
        later += f"; {', '.join(map(_words, before))} before it: recorded on one side only" if before else ""
        causes = [_CAUSES[first]] if first in _CAUSES else []
        causes += _kernels(a, b)
        return Verdict(name, Status.FAIL, f"{words}{where}{later}", coverage=cover, first_bad=place, causes=causes,
                       downstream=[Place(step=step, stage=q) for q in differing[1:]],
                       stats={"differing": len(differing), **_numbers(a, b, first)}, info={"differing": differing})
    if lone:
        return Verdict(name, Status.INVALID, f"{_words(lone[0])} is recorded on one side only", coverage=cover,
                       first_bad=Place(step=step, stage=lone[0]))
    odd = runlines.not_finite(a) or runlines.not_finite(b)
    if odd:
        return Verdict(name, Status.INVALID, f"{odd} is not finite; equal bits of it prove nothing", coverage=cover,
                       first_bad=Place(step=step, stage=odd))
    edited = runlines.contradiction(a, b)
    if edited:
        return Verdict(name, Status.INVALID, f"{edited}: a line was edited", coverage=cover,
                       first_bad=Place(step=step, stage=edited.partition(" ")[0]))
    others = _kernels(a, b) if kernels else []
    if others:
        return Verdict(name, Status.FAIL, f"every bit is equal, and {others[0].text}: another input can tell them apart", coverage=cover,
                       first_bad=Place(step=step, stage="kernels"), causes=others)
    if empty:
        return Verdict(name, Status.NOT_RUN, f"{_words(empty[0])}: nothing was recorded on either side", coverage=cover,
                       first_bad=Place(step=step, stage=empty[0]))
    return Verdict(name, Status.PASS, coverage=cover)


def _part(a: Mapping[str, Any], b: Mapping[str, Any], quantity: str) -> tuple[str | None, str]:
    """The first named part of a quantity that differs, and how many do."""
    x, y = (s.get("parts", {}).get(quantity) for s in (a, b))
    if quantity == "engine_weights":  # kept only where it differs from the trainer's
        x, y = (p if p is not None else s.get("parts", {}).get("weights") for p, s in ((x, a), (y, b)))
    if not isinstance(x, dict) or not isinstance(y, dict):
        return None, ""
    names = list(dict.fromkeys([*x, *y]))
    bad = [n for n in names if x.get(n) != y.get(n)]
    return (bad[0], f"{len(bad)} of {len(names)} differ") if bad else (None, "")


def _place(step: int, quantity: str, part: str | None) -> Place:
    if part is None:
        return Place(step=step, stage=quantity)
    if quantity in ("gradients", "weights", "engine_weights", "optimizer"):
        return Place(step=step, stage=quantity, tensor=part)
    if quantity in ("batch_composition", "rng"):
        return Place(step=step, stage=quantity, module=part)
    return Place(step=step, stage=quantity, request=part)


def _numbers(a: Mapping[str, Any], b: Mapping[str, Any], quantity: str) -> dict[str, Any]:
    x, y = a.get("numbers", {}).get(quantity), b.get("numbers", {}).get(quantity)
    return {} if x is None and y is None else {"a": x, "b": y}


def _kernels(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Cause]:
    x, y = a.get("kernels") or {}, b.get("kernels") or {}
    out = []
    for side in dict.fromkeys([*x, *y]):
        gone, new = sorted(set(x.get(side, ())) - set(y.get(side, ()))), sorted(set(y.get(side, ())) - set(x.get(side, ())))
        if gone or new:
            out.append(Cause("kernels", f"other kernels ran in the {side}: only in A {', '.join(gone) or 'none'}; only in B "
                                        f"{', '.join(new) or 'none'}", evidence={"a": gone, "b": new}))
    return out


def _replayed(ledger: Ledger) -> Verdict:
    """Steps that a continued run did again have to be what they were."""
    children = []
    for step, old, new in ledger.replayed:
        shared = set(old["digests"]) & set(new["digests"])  # a last turn that only compares has fewer

        def only(line: dict[str, Any], shared: set[str] = shared) -> dict[str, Any]:
            return {**line, "digests": {q: d for q, d in line["digests"].items() if q in shared}}

        verdict = _judge_step(only(old), only(new), step)
        verdict.name = f"step {step}, done again after the restart"
        children.append(verdict)
    return combine("steps done again", children)


def _whole(side: str, ledger: Ledger) -> Verdict:
    """A ledger that can be trusted to hold the whole run, and a run that was itself green."""
    cover = {"ledgers": Coverage(0 if ledger.problems else 1, 1)}
    if ledger.problems:
        more = f" (and {len(ledger.problems) - 1} more)" if ledger.problems[1:] else ""
        return Verdict(f"ledger {side}", Status.INVALID, f"ledger {side} ({ledger.path}): {ledger.problems[0]}{more}", coverage=cover)
    return Verdict(f"ledger {side}", Status.PASS, coverage=cover)


def _unjudged(side: str, ledger: Ledger) -> Verdict | None:
    """A run that could not judge itself (NaN, tokens that do not fit) has nothing that equal bits would prove."""
    end = ledger.end or {}
    if end.get("verdict") != Status.INVALID:
        return None
    return Verdict(f"run {side} itself", Status.INVALID, f"the run ended as INVALID: {end.get('reason', '')}".rstrip(": "))


def _moved(a: Ledger, b: Ledger, condition: str) -> Verdict:
    x, y = (v.start.get("conditions", {}).get(condition) for v in (a, b))
    moved = x is not None and y is not None and x != y
    text = "" if moved else (f"condition {condition!r} was {'never recorded' if x is None and y is None else f'{x!r} in both runs'}: "
                             "it was not tried")
    if moved and condition in _SENT:  # what was asked for may come to the same
        key, words = _SENT[condition]
        both = [(p, q) for s in sorted(a.steps.keys() & b.steps.keys())
                if (p := a.steps[s].get("sent", {}).get(key)) is not None and (q := b.steps[s].get("sent", {}).get(key)) is not None]
        moved = any(p != q for p, q in both)
        text = "" if moved else (f"condition {condition!r} was {x!r} and {y!r}, and " + (
            f"{words} in every step" if both else "what was sent is recorded in no step of both") + ": it was not tried")
    return Verdict(f"other {condition}", Status.PASS if moved else Status.NOT_RUN, text, coverage={"conditions": Coverage(int(moved), 1)})


def _explain(out: Verdict, a: Ledger, b: Ledger) -> None:
    """What the runs said of themselves is no part of the comparison, but often the cause of a difference."""
    for side, ledger in (("A", a), ("B", b)):
        said = (ledger.end or {}).get("verdict")
        if said and said != "PASS":
            text = f"run {side} was itself {said}: {(ledger.end or {}).get('reason', '')}".strip()
            out.info.setdefault("own_verdicts", {})[side] = text
            if out.status is Status.FAIL:
                out.causes.append(Cause("own_verdict", text))
            elif out.green:
                out.reason = "; ".join(x for x in (out.reason, f"the same bits, and {text}") if x)


def _words(quantity: str) -> str:
    return {"grad_norm": "gradient norm", "rng": "random states", "rollout_logprobs": "rollout log-probabilities",
            "train_logprobs": "training log-probabilities", "batch_composition": "batch composition",
            "engine_weights": "engine weights", "optimizer": "optimizer state", "sampled_tokens": "sampled tokens"}.get(quantity, quantity)
