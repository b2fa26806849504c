"""The command line of ``vime repro``. Imports nothing heavy; :mod:`vime.commands.repro` does the work."""
from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Two runs of one recipe: the same bits, or what differs first.", no_args_is_help=True, rich_markup_mode=None)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a screen.")]


class Only(StrEnum):
    a = "a"
    b = "b"


class Across(StrEnum):
    versions = "versions"
    hardware = "hardware"


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    output_dir: Annotated[Path, typer.Option(help="Folder for both runs (a and b) and the report.")],
    profile: Annotated[str | None, typer.Option(help="A profile of the gates, or a Hugging Face folder. Default: SmolLM2-135M-Instruct.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for both runs.")] = 7200.0,
    only: Annotated[Only | None, typer.Option(help="a: make the first run and stop. b: make the second beside it, and compare.")] = None,
    at_once: Annotated[bool, typer.Option("--at-once", help="Both runs at the same time, where the device holds both.")] = False,
    as_json: Json = False,
) -> None:
    """Run vime train twice in fresh processes, and compare. The second runs under other conditions. Further flags go to vime train."""
    from vime.commands import repro as command
    from vime.commands.output import finish

    done = command.run(output_dir, list(context.args), profile=profile, timeout=timeout, quiet=as_json,
                       only=only.value if only else None, at_once=at_once)
    if done is None:
        typer.echo(f"run a is in {output_dir}; the same command with --only b makes the second and compares", err=True)
        return
    finish(done[0], as_json, **done[1])


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="A ledger, or the --output-dir of a vime train.")],
    b: Annotated[Path, typer.Argument(help="Another.")],
    across: Annotated[list[Across] | None, typer.Option(help="Compare although these differ, and say so. Repeatable.")] = None,
    from_step: Annotated[int, typer.Option(min=0, help="Compare from this step on.")] = 0,
    as_json: Json = False,
) -> None:
    """Two ledgers: PASS, or the first step and quantity that differ. Causes come before consequences."""
    from vime.commands import repro as command
    from vime.commands.output import finish

    finish(command.compare(a, b, [x.value for x in across or []], from_step), as_json)
