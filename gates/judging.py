"""From what a harness recorded to a verdict, with its picture. Every judgement is :mod:`alignment`'s."""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from alignment import bits, layers, ledger, logprobs, match, pictures
from alignment.verdict import Status, Verdict, combine
from gates.harness import Layers, record


def same_logprobs(a: Sequence[Any], b: Sequence[Any], name: str, tier: str = "exact",
                  sides: tuple[str, str] = ("rollout", "trainer")) -> Verdict:
    """Records (or samples) of two sides, by request, position and token. With the worst request as a picture."""
    left, right = _records(a), _records(b)
    verdict = logprobs.judge(left, right, name=name, tier=tier)
    if verdict.status is not Status.NOT_RUN:
        shown = verdict.first_bad.request if verdict.first_bad and verdict.first_bad.request else left[0]["request_id"]
        one, other = (next((r for r in side if r["request_id"] == shown), None) for side in (left, right))
        if one is not None and other is not None and one["token_ids"] == other["token_ids"]:
            x, y = one["logprobs"], other["logprobs"]
            start = len(one["prompt_token_ids"])
            pictures.attach(verdict, pictures.series(
                f"{name}: log-probabilities of request {shown}", range(start, start + len(x)),
                {sides[0]: x.tolist(), sides[1]: y.tolist()}, _marks(x, y, bits.bound_of(tier))))
    return verdict


def _marks(x: Any, y: Any, bound: float | None) -> list[bool]:
    """Which points the picture marks: those that count as different at this tier."""
    return (x != y).tolist() if bound is None else (abs(x - y) >= bound).tolist()


def _records(side: Sequence[Any]) -> list[dict[str, Any]]:
    return [r if isinstance(r, dict) else record(r) for r in side]


def same_layers(engine: Layers, trainer: Layers, name: str = "layers", tier: str = "exact") -> Verdict:
    """Every layer output of every token that both sides compute, with a layer x token picture."""
    tokens = match.judge(engine.tokens(), trainer.tokens(), f"{name}.tokens")
    if not tokens.green:
        return combine(name, [tokens, Verdict(name, Status.NOT_RUN, f"blocked: {tokens.name} is {tokens.status}")])
    place_of = {key: i for i, key in enumerate(engine.rows)}
    rows = trainer.rows
    order = [place_of[key] for key in rows]
    left = {n: x[order] for n, x in engine.outputs.items()}
    verdict = layers.judge(left, trainer.outputs, name=name, tier=tier, order=list(trainer.outputs),
                           tokens=[t for _, _, t in rows], positions=[p for _, p, _ in rows])
    if verdict.first_bad is not None and verdict.first_bad.row is not None:
        verdict.first_bad = dataclasses.replace(verdict.first_bad, request=rows[verdict.first_bad.row][0])
    out = combine(name, [tokens, verdict], tier=verdict.tier, stats=verdict.stats, info=dict(verdict.info))
    out.coverage = {**verdict.coverage, "tokens": tokens.coverage["tokens"]} if "tokens" in tokens.coverage else out.coverage
    names = [n for n in trainer.outputs if n in left]
    counts = [_differing(left[n], trainer.outputs[n]) for n in names]
    return pictures.attach(out, pictures.heat(f"{name}: layer x token", [n.removeprefix("layers.") for n in names],
                                              [f"{r}:{p}" for r, p, _ in rows], counts))


def _differing(a: Any, b: Any) -> list[float | None]:
    """Elements of each row whose bits differ, for the picture; None where two rows have no common form."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return [None] * len(a)
    import torch

    as_int = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return (a.contiguous().view(as_int) != b.contiguous().view(as_int)).sum(-1).tolist()


def same_weights(sent: Mapping[str, str], held: Mapping[str, str], name: str) -> Verdict:
    """Digests of what was sent against what is held, tensor by tensor."""

    def form(digest: str | None) -> str | None:
        return None if digest is None else f"xxh3-128:{digest}"

    names = list(dict.fromkeys([*sent, *held]))
    return ledger.judge(name, ["engine"], [ledger.Cell("engine", n, form(sent.get(n)), form(held.get(n))) for n in names])
