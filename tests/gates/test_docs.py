"""The example of docs/gates.md works as it stands; flags, commands and files that the documents name are there."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in ("alignment", "architecture", "gates", "repro", "weights")),
         "examples/megatron_core/README.md"]
#: Flags of other people's programs.
FOREIGN = {"--no-deps", "--pyargs", "--stat"}


def test_the_example(pytester):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "gates.md").read_text(), re.DOTALL)
    pytester.makepyfile(test_mine=example)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--gate-require", "batch", "--gate-device", "cpu")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["batch *PASS *tokens 16/16*1/1*"])


def flags_by_command() -> dict[str, set[str]]:
    """``"train"``, ``"repro run"`` and so on -> its flags."""
    import typer

    from vime.cli import app

    found: dict[str, set[str]] = {}
    todo = [("", typer.main.get_command(app))]
    while todo:
        name, command = todo.pop()
        found[name] = {"--help"} | {o for p in command.params for o in (*p.opts, *p.secondary_opts) if o.startswith("--")}
        todo += [(f"{name} {sub}".strip(), c) for sub, c in getattr(command, "commands", {}).items()]
    found["repro run"] |= found["train"]  # hands further flags on
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_is_one(page):
    known = set().union(*flags_by_command().values()) | FOREIGN
    for path in (p for folder in ("gates", "tools", "ci", "examples") for p in (ROOT / folder).rglob("*.py")):
        known |= set(re.findall(r'"(--[a-z0-9][a-z0-9-]*)"', path.read_text()))
    said = set(re.findall(r"(?<![\w-])--[a-z0-9][a-z0-9-]*", (ROOT / page).read_text()))
    assert not said - known, sorted(said - known)


def shown(page: str) -> list[str]:
    """The command lines of vime in blocks of code and in backticks; in a block, words of prose may follow."""
    text = (ROOT / page).read_text()
    blocks = "".join(re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    return re.findall(r"^vime .*", blocks, re.MULTILINE) + re.findall(r"`(vime [^`]*)`", text)


def test_every_vime_command_has_the_flags_it_is_shown_with():
    commands = flags_by_command()
    lines = [(page, line) for page in PAGES for line in shown(page)]
    assert len(lines) > 30
    for page, line in lines:
        words = re.split(r" {3,}| #", line)[0].split()[1:] + re.findall(r"(?<=   )--[a-z-]+", line)
        name = next(n for n in (" ".join(words[:2]), words[0], "") if n in commands)
        assert name or words[0].startswith("--"), f"{page}: {line}: there is no such command"
        flags = {w.strip("[].,").partition("=")[0] for w in words if w.strip("[").startswith("--")}
        assert flags <= commands[name], f"{page}: {line}: {sorted(flags - commands[name])}"


@pytest.mark.parametrize("page", PAGES)
def test_every_file_is_there(page):
    said = re.findall(r"(?<![\w/.])(?:vime|alignment|gates|tests|ci|docs|tools|scripts|examples)/[\w./-]*\w", (ROOT / page).read_text())
    assert not [name for name in said if not (ROOT / name).exists()]
