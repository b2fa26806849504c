"""The table at the end of the demo."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from alignment.verdict import Verdict
    from vime.commands.demo import Part

_STYLE = {"PASS": "bold green", "FAIL": "bold red", "INVALID": "bold red", "NOT_RUN": "bold yellow"}


def show(console: Console, verdict: Verdict, parts: Sequence[Part]) -> None:
    """Print what was found, dtype by dtype, and the verdict."""
    table = Table(title="the same model in vLLM and in Megatron")
    for name, justify in (("dtype", "left"), ("", "left"), ("off", "right"), ("on", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for part in parts:
        for i, (what, off, on) in enumerate(_rows(part)):
            table.add_row(part.dtype if i == 0 else "", what, off, on)
        table.add_section()
    console.print()
    console.print(table)
    for part in parts:
        bad = [v for v in part.verdict().children if not v.green]
        for v in bad[:3]:
            console.print(Text(f"{part.dtype}: ") + Text(v.summary()))
    line = Text(verdict.status.value, _STYLE[verdict.status.value])
    line.append(f"  {verdict.stats['seconds']:.0f} s, at most {verdict.stats['peak_memory_gib']} GiB of memory", "")
    console.print(line)


def _rows(part: Part) -> list[tuple[str, str, str]]:
    off, on = part.off.metrics, [s.metrics for s in part.on]
    named = {kind: [v for s in part.on for v in s.verdicts if v.name.startswith(kind)] for kind in ("layers", "weights", "training")}
    trained = [m for m in on if "tensors_changed" in m]
    changed = ", ".join(f"{m['tensors_changed']}/{m['tensors']}" for m in trained)
    return [
        ("differing log-probabilities", f"{off['differing']} of {off['tokens']}", f"{_sum(on, 'differing')} of {_sum(on, 'tokens')}"),
        ("largest difference", f"{off['train_rollout_logprob_abs_diff_max']:.2e}",
         f"{max(m['train_rollout_logprob_abs_diff_max'] for m in on):.2e}"),
        ("mean difference", f"{off['train_rollout_logprob_abs_diff']:.2e}",
         f"{max(m['train_rollout_logprob_abs_diff'] for m in on):.2e}"),
        ("weight updates (tensors changed)", "-", f"{len(trained)} ({changed})"),
        ("engine holds the trainer's weights", "-", _green(named["weights"])),
        ("layers equal (with the final norm)", "-", "; ".join(_layers(v) for v in named["layers"])),
        ("training forward = no-grad forward", "-", _green(named["training"])),
        ("prompt tokens from the prefix cache", f"{off['cached_prompt_tokens']}", f"{_sum(on, 'cached_prompt_tokens')}"),
        ("compared of what was expected", "-", _coverage(part.verdict())),
        ("within rounding of transformers", "-", _green(part.third_party)),
        ("seconds, starts included", f"{part.seconds['off']:.0f}", f"{part.seconds['on']:.0f}"),
    ]


def _coverage(verdict: Verdict) -> str:
    """The share that was compared, over all units; a PASS needs all of it."""
    counts = [c for c in verdict.coverage.values() if c.expected]
    share = min((c.compared / c.expected for c in counts), default=0.0)
    return f"{100 * share:.3g} %"


def _sum(metrics: Sequence[dict[str, Any]], key: str) -> int:
    return sum(m[key] for m in metrics)


def _green(verdicts: Sequence[Verdict]) -> str:
    return f"{sum(v.green for v in verdicts)} of {len(verdicts)}"


def _layers(v: Verdict) -> str:
    cover = v.coverage.get("layers")
    return f"{cover} compared, {'0 differing elements' if v.green else v.status.value}"
