"""``vime explain``: which operation causes how much of the mismatch, and what aligning it costs.

A user with an unmodified stack sees "the log-probabilities differ" and nothing else. Here one operation at a time is
left stock while all others are aligned, on both sides, with a real trainer and a real engine on the same input: what
differs then is that operation's doing, and the time saved is its cost. The cheapest set that reaches zero is found by
leaving out, dearest first, what is not needed, and is then run as a whole: two operations may each be dispensable
alone and not together.
"""
from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from alignment.verdict import Status, Verdict
from vime.errors import BadInput, is_for_people

PAIRS = 3


@dataclasses.dataclass(frozen=True)
class Row:
    """One configuration against all operations aligned.

    Attributes:
        stock: operations that were left stock.
        verdict: trainer against engine, both in this configuration; None where the configuration was refused.
        cost: time of "all aligned" over time of this configuration (rollout and log-probs), median of alternating
            pairs: what aligning these operations costs. spread: the smallest and the largest of them; where 1 lies
            between, this machine was too busy to tell.
        refused: why it could not run.
    """

    stock: tuple[str, ...]
    verdict: Verdict | None
    cost: float | None = None
    refused: str = ""
    spread: tuple[float, float] | None = None

    @property
    def differing(self) -> int | None:
        """Tokens whose log-probability differs; None where that is not known."""
        return None if self.verdict is None else self.verdict.stats.get("differing")

    def to_dict(self) -> dict[str, Any]:
        said = {} if self.verdict is None else self.verdict.to_dict()
        return {"stock": list(self.stock), "verdict": said.get("verdict"), "differing": self.differing,
                "max_abs": said.get("stats", {}).get("max_abs"), "coverage": said.get("coverage", {}),
                "cost": self.cost, "cost_spread": self.spread, "refused": self.refused}


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found. ``cheapest`` is the smallest-cost set of aligned operations seen to reach zero, or None."""

    model: str
    device: str
    dtype: str
    ops: tuple[str, ...]
    aligned: Row
    off: Row
    rows: list[Row]
    cheapest: tuple[str, ...] | None
    cheapest_row: Row | None

    @property
    def verdict(self) -> Verdict:
        """Of all operations aligned: does alignment reach zero here at all."""
        assert self.aligned.verdict is not None
        return self.aligned.verdict

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; carries ``verdict``, ``coverage``, ``first_bad`` and ``cause`` of the fully aligned run."""
        return {**self.verdict.to_dict(), "model": self.model, "device": self.device, "dtype": self.dtype,
                "ops": list(self.ops), "off": self.off.to_dict(), "leave_one_out": [r.to_dict() for r in self.rows],
                "cheapest": None if self.cheapest is None else list(self.cheapest),
                "cheapest_cost": None if self.cheapest_row is None else self.cheapest_row.cost}


def explain(profile: str = "smollm2-135m", *, device: str = "cpu", dtype: str | None = None,
            ops: Sequence[str] | None = None, only: Sequence[str] = (), prompts: int | None = None, samples: int | None = None,
            tokens: int | None = None, pairs: int = PAIRS, say: Callable[[str], None] = lambda text: None) -> Explanation:
    """Measure. Starts one engine and one trainer for "all aligned", and a second pair for each configuration in turn.

    Args:
        profile: a profile of the gates, or a folder with a Hugging Face checkpoint.
        device, dtype: where and in what; the profile's first dtype by default.
        ops: the operations that are aligned; by default every one that the engine's plugin routes.
        only: leave these stock, one at a time; by default each of ``ops``.
        prompts, samples, tokens: size of the input (prompts, samples of each, sampled tokens of each sample); by default
            the profile's.
        pairs: how often the time of "all aligned" and of a configuration alternate.
        say: called with one line of progress before each configuration.

    Raises:
        BadInput: an unknown profile or operation, or a device or dtype it does not run on.
        VimeError: a trainer or engine that cannot start with everything aligned.
    """
    from gates.harness import Harness
    from gates.profiles import UnknownProfile, find
    from vime.latent import experts
    from vime.rl.config import read_hf_config
    from vime.vllm.plugin import ROUTED, check_ops

    try:
        subject = find(profile)
    except UnknownProfile as err:
        raise BadInput(str(err)) from None
    if device not in subject.devices:
        raise BadInput(f"profile {subject.name} runs on {', '.join(subject.devices)}, not on {device}")
    fitting = subject.cuda_dtypes if device == "cuda" else subject.dtypes
    dtype = dtype or fitting[0]
    if dtype not in fitting:
        raise BadInput(f"profile {subject.name} runs in {', '.join(fitting)} on {device}, not in {dtype}")
    for name, size in (("prompts", prompts), ("samples", samples), ("tokens", tokens), ("pairs", pairs)):
        if size is not None and size < 1:
            raise BadInput(f"{name} is {size}; expected at least 1")
    subject = dataclasses.replace(subject, prompts=prompts or subject.prompts, samples=samples or subject.samples,
                                  response_tokens=tokens or subject.response_tokens)
    every = tuple(check_ops(ops if ops is not None else ROUTED))
    if ops is None and experts(read_hf_config(subject.checkpoint())) is None:
        every = tuple(op for op in every if op != "moe")  # a dense model has no place for it
    if unknown := [op for op in only if op not in every]:
        raise BadInput(f"{unknown[0]} is not an operation that is aligned here; expected {', '.join(every)}")
    single = tuple(op for op in every if op in only) or every
    say(f"all {len(every)} operations aligned")
    with Harness(subject, device, dtype, ops=every) as base:
        aligned = Row((), _compare(base))

        def measure(stock: tuple[str, ...], what: str) -> Row:
            say(what)
            left = tuple(op for op in every if op not in stock)
            try:
                with Harness(subject, device, dtype, ops=left) as other:
                    said = _compare(other)
                    ratios = _cost(base, other, pairs)
                    return Row(stock, said, statistics.median(ratios), spread=(min(ratios), max(ratios)))
            except Exception as err:  # of one stock configuration: the others are still worth knowing
                first = (str(err).splitlines() or [""])[0]
                return Row(stock, None, refused=first if is_for_people(err) else f"{type(err).__name__}: {first}")

        off = measure(every, "all stock (vime off)")
        rows = [measure((op,), f"{op} stock, everything else aligned ({i} of {len(single)})") for i, op in enumerate(single, 1)]
        cheapest, row = _cheapest(every, aligned, rows, measure)
    return Explanation(subject.name, device, dtype, every, aligned, off, rows, cheapest, row)


def _compare(harness: Any) -> Verdict:
    from gates.judging import same_logprobs

    samples = harness.generate(harness.requests(harness.profile.prompts, harness.profile.samples))
    return same_logprobs(samples, harness.logprobs(samples), "rollout against trainer")


def _cost(base: Any, other: Any, pairs: int) -> list[float]:
    requests = base.requests(base.profile.prompts, base.profile.samples)

    def seconds(harness: Any) -> float:
        began = time.perf_counter()
        harness.logprobs(harness.generate(requests))
        return time.perf_counter() - began

    seconds(base), seconds(other)  # warm
    return [seconds(base) / seconds(other) for _ in range(pairs)]


def _cheapest(every: tuple[str, ...], aligned: Row, rows: list[Row],
              measure: Callable[[tuple[str, ...], str], Row]) -> tuple[tuple[str, ...] | None, Row | None]:
    """Leave out what is not needed, dearest first, as long as the rest still reaches zero together."""
    if aligned.verdict is None or not aligned.verdict.green:
        return None, None
    spare = [r for r in rows if r.verdict is not None and r.verdict.green and r.cost is not None and r.cost > 1]
    spare.sort(key=lambda r: -(r.cost or 0))
    stock: tuple[str, ...] = ()
    best: Row = dataclasses.replace(aligned, cost=1.0)
    for row in spare:
        tried = row if not stock else measure((*stock, *row.stock), f"{', '.join((*stock, *row.stock))} stock together")
        if tried.verdict is not None and tried.verdict.status is Status.PASS:
            stock, best = tried.stock, tried
    return tuple(op for op in every if op not in stock), best


def _times(row: Row) -> str:
    if not row.cost:
        return "-"
    return f"{row.cost:.2f}x" + (f" ({row.spread[0]:.2f} to {row.spread[1]:.2f})" if row.spread else "")


def show(found: Explanation, console: Any = None) -> None:
    """Print the table and the cheapest set."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from alignment.report import one_line

    console = console or Console()
    tokens = next(iter(found.verdict.coverage.values()), None)
    console.print(Text(f"{one_line(found.model)}, {found.dtype} on {found.device}; {tokens.expected if tokens else 0} sampled tokens"))
    table = Table(box=None, pad_edge=False)
    for name in ("left stock", "differing", "max difference", "aligning it costs"):
        table.add_column(name, justify="left" if name == "left stock" else "right")
    names = [("nothing (all aligned)", found.aligned), ("everything (vime off)", found.off),
             *((", ".join(r.stock), r) for r in found.rows)]
    for name, row in names:
        if row.verdict is None:
            table.add_row(name, "-", "-", Text("refused: " + one_line(row.refused)))
            continue
        differing = row.differing if row.differing is not None else "-"
        largest = row.verdict.stats.get("max_abs")
        table.add_row(name, str(differing), f"{largest:.3g}" if largest else "0" if row.verdict.green else "-",
                      _times(row))
    console.print(table)
    if found.cheapest is None:
        console.print(Text("zero was not reached with everything aligned: "
                           + one_line(found.verdict.reason), "bold red"))
        console.print(Text(found.verdict.summary()))
    else:
        left = [op for op in found.ops if op not in found.cheapest]
        console.print(Text("cheapest set seen to reach zero here: " + ", ".join(found.cheapest), "bold"))
        console.print(Text(f"can stay stock on this input: {', '.join(left) or 'nothing that would save time'}. "
                           "Zero on one input is no proof for all: the gates run with everything aligned."))
