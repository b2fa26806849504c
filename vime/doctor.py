"""``vime doctor``: can this machine run this profile, and what would be refused.

It starts nothing and builds nothing. Each check says what it found and what to do; the verdict is PASS (ready),
INVALID (something contradicts: an environment variable, a wrong wheel) or NOT_RUN (something is missing). An untested
pair of versions does not stop anybody: it is said, and the gates are what answers it.
"""
from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
from importlib import metadata, resources
from typing import Any

from alignment import machine
from alignment.verdict import Coverage, Status, Verdict, combine
from vime.contract import OPS
from vime.errors import BadInput, how_to_install, is_for_people

DTYPES = ("bfloat16", "float32")
#: Variable -> (values that contradict vime, why). ``None`` means any value.
CONTRADICTIONS: dict[str, tuple[tuple[str, ...] | None, str]] = {
    "VLLM_PLUGINS": (None, "it limits which plugins vLLM loads; it has to name vime"),
    "VLLM_USE_V2_MODEL_RUNNER": (("1",), "the plugin replaces parts of the first model runner"),
    "VLLM_ENABLE_V1_MULTIPROCESSING": (("1",), "the model has to be reachable in the engine's process"),
    "VLLM_ATTENTION_BACKEND": (None, "the attention backend is vime's own"),
    "NVIDIA_TF32_OVERRIDE": (("1",), "it turns fp32 GEMMs into TF32"),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": (("1",), "it turns fp32 GEMMs into TF32"),
    "PYTHONOPTIMIZE": (("1", "2"), "it removes assertions"),
}
_TORCH_FRIENDS = ("torchvision", "torchaudio", "torchcodec")


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was looked at. ``todo`` is empty where nothing is to be done."""

    name: str
    status: Status
    found: str
    todo: str = ""


def examine(profile: str | None = None, device: str | None = None) -> Verdict:
    """Look at this machine.

    Args:
        profile: a profile of the gates or a checkpoint folder; None checks the machine alone.
        device: ``"cpu"`` or ``"cuda"``; None takes what the gates would take.

    Returns:
        a Verdict; its children are the checks, ``info`` holds ``versions``, ``hardware``, ``kernels``, ``device``,
        ``proven`` and ``notes``.
    """
    versions = machine.versions()
    checks = [_python(versions), *_stack(versions), *_torch_friends(versions), _plugin()]
    notes: list[str] = []
    info: dict[str, Any] = {"versions": versions, "notes": notes}
    if "torch" in versions:
        chosen, device_check = _device(device)
        checks.append(device_check)
        info["device"] = chosen
        checks += _environment(chosen or device or "cpu", notes)
        checks.append(_kernels(chosen or device or "cpu", info))
    info["proven"] = _proven(versions, info.get("device"), notes)
    if profile is not None:
        checks += _profile(profile, info.get("device"))
    info["hardware"] = machine.hardware()
    children = [Verdict(c.name, c.status, c.found + (f". {c.todo}" if c.todo else ""), coverage={"checks": Coverage(1, 1)},
                        info={"todo": c.todo}) for c in checks]
    return combine("doctor", children, info=info)


def _python(versions: dict[str, str]) -> Check:
    major, minor = map(int, versions["python"].split(".")[:2])
    good = (3, 11) <= (major, minor) < (3, 14)
    return Check("python", Status.PASS if good else Status.INVALID, versions["python"],
                 "" if good else "vime needs Python 3.11 to 3.13")


def _stack(versions: dict[str, str]) -> list[Check]:
    out = []
    for name in ("torch", "vllm", "megatron-core", "transformers"):
        if name in versions:
            out.append(Check(name, Status.PASS, versions[name]))
        else:
            out.append(Check(name, Status.NOT_RUN, "not installed", f"run {how_to_install()}"))
    return out


def _torch_friends(versions: dict[str, str]) -> list[Check]:
    """torchvision and its kin are built for one torch; another one breaks ``import transformers``."""
    torch_version = versions.get("torch", "").partition("+")[0]
    out = []
    for name in _TORCH_FRIENDS:
        try:
            wants = [r for r in metadata.requires(name) or [] if re.match(r"torch\s*==", r)]
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        pinned = re.search(r"==\s*([\d.]+)", wants[0]) if wants else None
        if torch_version and pinned and pinned.group(1) != torch_version:
            out.append(Check(name, Status.INVALID, f"{version} is built for torch {pinned.group(1)}, installed is {torch_version}",
                             f"nothing here needs it: pip uninstall {' '.join(_TORCH_FRIENDS)}"))
    return out


def _plugin() -> Check:
    names = [e.value for e in metadata.entry_points(group="vllm.general_plugins") if e.name == "vime"]
    if names:
        return Check("vllm plugin", Status.PASS, f"entry point {names[0]}")
    return Check("vllm plugin", Status.NOT_RUN, "vLLM would not find vime: its entry point is not installed",
                 "install the package (pip install -e . or a wheel), a PYTHONPATH is not enough")


def _device(forced: str | None) -> tuple[str | None, Check]:
    from gates.devices import decide, probe

    try:
        decision = decide(1, probe(), forced=forced)
    except (ImportError, RuntimeError, OSError) as err:
        return None, Check("device", Status.NOT_RUN, f"torch cannot be imported or asked: {err}", "reinstall torch")
    status = Status.PASS if decision.device else Status.NOT_RUN
    found = f"{decision.device} ({decision.reason})" if decision.device else decision.reason
    return decision.device, Check("device", status, found)


def _environment(device: str, notes: list[str]) -> list[Check]:
    from vime.determinism import ENVIRONMENT
    from vime.determinism import examine as examine_determinism

    out = []
    _, refused = examine_determinism(device, tuple(ENVIRONMENT))
    for text in refused:
        if text.startswith("PYTHONHASHSEED"):
            notes.append("vime's own processes start with PYTHONHASHSEED=0; your own scripts have to set it before the start")
        else:
            out.append(Check("environment", Status.INVALID, text))
    for name, (values, why) in CONTRADICTIONS.items():
        value = os.environ.get(name)
        if value is None or (values is not None and value not in values):
            continue
        if name == "VLLM_PLUGINS" and "vime" in value.split(","):
            continue
        out.append(Check("environment", Status.INVALID, f"{name} is {value!r}: {why}", f"unset {name}"))
    return out or [Check("environment", Status.PASS, "nothing contradicts")]


def _kernels(device: str, info: dict[str, Any]) -> Check:
    """Which implementation of each operation would run; compiles nothing."""
    from vime.ops import registry

    if device == "cpu":
        from vime.ops.cpu import build

        try:
            level, path = build.library()
        except build.BuildError as err:
            return Check("kernels", Status.INVALID, str(err))
        if not path.exists():
            missing = build.missing_tools()
            info["kernels"] = {"cpu": f"{level}, not compiled yet"}
            return Check("kernels", Status.NOT_RUN if missing else Status.PASS,
                         f"C++ kernels ({level}) are compiled on first use", f"install {' and '.join(missing)}" if missing else "")
    import torch

    found: dict[str, str] = {}
    uncovered = []
    for op in OPS:
        for dtype in DTYPES:
            try:
                found[f"{op} {dtype}"] = registry.implementation(op, device, getattr(torch, dtype))
            except registry.UnsupportedOp:
                uncovered.append(f"{op} {dtype}")
            except RuntimeError as err:
                return Check("kernels", Status.NOT_RUN, str(err).strip().splitlines()[0])
    info["kernels"] = found
    text = f"{len(found)} implementations on {device}" + (f"; none for {', '.join(uncovered)}" if uncovered else "")
    return Check("kernels", Status.PASS if found else Status.NOT_RUN, text)


def _proven(versions: dict[str, str], device: str | None, notes: list[str]) -> list[dict[str, Any]]:
    """What the packaged evidence proves for exactly these versions on this device."""
    table = json.loads(resources.files("gates").joinpath("proven.json").read_text())
    mine = [row for row in table if all(versions.get(k) == v for k, v in row["versions"].items())
            and (device is None or row["device"] == device)]
    if not mine:
        have = ", ".join(f"{k} {versions.get(k, 'missing')}" for k in ("vllm", "megatron-core", "torch"))
        others = sorted({", ".join(f"{k} {v}" for k, v in row["versions"].items()) for row in table})
        notes.append(f"untested: no evidence for {have}" + (f" on {device}" if device else "")
                     + (f"; proven are {'; '.join(others)}" if others else "") + ". Run: vime gate rerun batch logprob layerwise weights")
    return mine


def _profile(name: str, device: str | None) -> list[Check]:
    from gates.profiles import UnknownProfile, find

    try:
        profile = find(name)
    except UnknownProfile as err:
        raise BadInput(str(err)) from None
    out = []
    if device is not None and device not in profile.devices:
        out.append(Check("profile", Status.NOT_RUN, f"{profile.name} runs on {', '.join(profile.devices)}, not on {device}"))
    try:
        ready = profile.present()
        text = "is there" if ready else "is written on first use"
        if not ready and profile.package and importlib.util.find_spec(profile.package) is None:
            out.append(Check("checkpoint", Status.NOT_RUN, f"not there, and the package that carries it ({profile.package}) is "
                             "not installed", f"run {how_to_install()}"))
        else:
            out.append(Check("checkpoint", Status.PASS, text))
        if ready and importlib.util.find_spec("torch") is not None:
            from gates.harness import run_settings
            from vime.rl.config import TrainConfig, read_hf_config, require_fit
            from vime.rl.memory import require_memory

            folder, device = profile.checkpoint(), device or "cpu"
            config = TrainConfig(hf_checkpoint=str(folder), device=device, **run_settings(profile, device))
            hf_config = read_hf_config(folder)
            require_fit(config, hf_config)
            require_memory(config, hf_config)
            out.append(Check("memory", Status.PASS, "enough for trainer and engine"))
    except Exception as err:
        if not is_for_people(err):
            raise
        out.append(Check("profile", Status.NOT_RUN, str(err)))
    return out


def show(verdict: Verdict, console: Any = None) -> None:
    """Print the checks, the kernels and the notes; one screen."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from alignment.report import one_line

    console = console or Console()
    table = Table(box=None, pad_edge=False, show_header=False)
    words = {Status.PASS: ("ok", "green"), Status.INVALID: ("contradicts", "bold red"), Status.NOT_RUN: ("missing", "bold yellow")}
    for child in verdict.children:
        word, style = words.get(child.status, (str(child.status), "bold red"))
        table.add_row(Text(word, style), Text(one_line(child.name)), Text(one_line(child.reason)))
    console.print(table)
    kernels = verdict.info.get("kernels") or {}
    if kernels:
        console.print(Text("kernels: " + one_line(", ".join(sorted(set(kernels.values()))))))
    proven: dict[str, set[str]] = {}
    for row in verdict.info.get("proven", []):
        proven.setdefault(f"{row['code']}: {row['model']} {row['dtype']} on {row['device']}", set()).update(row["gates"])
    for subject, gates in proven.items():
        console.print(Text(f"proven on these versions {one_line(subject)}: {', '.join(sorted(gates))}"))
    for note in verdict.info.get("notes", []):
        console.print(Text(f"note: {one_line(note)}"))
    console.print(Text("ready" if verdict.green else "not ready", "bold green" if verdict.green else "bold red"))
