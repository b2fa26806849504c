"""The error that carries a message for a person.

Bad input must end in one clear message and a non-zero exit, without a traceback. The command line prints any
exception class that vime or alignment define as a message; everything else is a fault of ours and keeps its traceback.
"""
from __future__ import annotations

import importlib.util
import os

#: Exit codes of the command line besides those of a verdict: 2 for what was asked, 10 for what then went wrong.
WRONG_USAGE, COULD_NOT_JUDGE = 2, 10


class VimeError(RuntimeError):
    """What was found, what was expected, what to do. Raised when something goes wrong while running."""

    exit_code = COULD_NOT_JUDGE


class BadInput(VimeError):
    """What was given cannot be used; nothing has been started or written."""

    exit_code = WRONG_USAGE


class MissingPackage(VimeError):
    """A package that the command needs is not installed. The message names it and how to get it."""


#: Packages of the stack: what is imported -> its name on an index.
STACK = {"torch": "torch", "vllm": "vllm", "megatron": "megatron-core", "transformers": "transformers"}


def has_driver() -> bool:
    """Whether an NVIDIA driver is installed, without importing torch."""
    return os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidiactl")


def how_to_install() -> str:
    """The command that installs the stack of this machine, to be run in a clone."""
    return "pip install -e '.[gpu]' in a clone" if has_driver() else "python tools/install_cpu_stack.py in a clone"


def missing_package(module: str) -> MissingPackage:
    """The error for a package of :data:`STACK` that can't be found, by the name under which it is imported."""
    return MissingPackage(f"{STACK[module]} is not installed in this Python; run {how_to_install()}. `vime doctor` shows what else is "
                          "missing")


def plain(error: BaseException) -> BaseException:
    """:class:`MissingPackage` for an import of the stack that failed (also where it led to ``error``), else ``error`` itself."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ModuleNotFoundError):
        cause = cause.__cause__
    name = getattr(cause, "name", None) or ""
    module = name.partition(".")[0]
    if module not in STACK or is_for_people(error):
        return error
    try:
        found = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        found = False
    if found and "." in name:
        return MissingPackage(f"the installed {STACK[module]} has no module {name}: it is of a release that vime does not know, or damaged; "
                              "`vime doctor` shows which releases are proven")
    return missing_package(module)


def require_stack(*modules: str) -> None:
    """Raise :class:`MissingPackage` for the first of these that can't be found. Imports none of them."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise missing_package(module)


class NoSuchDevice(BadInput):
    """A GPU was asked for where torch sees none."""


def require_device(device: str) -> None:
    """Raise :class:`NoSuchDevice` if ``device`` is ``"cuda"`` and there is no GPU. Starts no CUDA context."""
    if device != "cuda":
        return
    import torch

    if torch.cuda.device_count() == 0:
        raise NoSuchDevice(f"--device is cuda, and torch {torch.__version__} sees no GPU; use --device cpu, or see what is missing with "
                           "`vime doctor --device cuda`")


def is_for_people(error: BaseException) -> bool:
    """True if ``error`` is of a class that this project defined, so that its text is meant to be read alone."""
    return isinstance(error, VimeError) or type(error).__module__.partition(".")[0] in ("vime", "alignment", "gates")


def exit_code_of(error: BaseException) -> int:
    """2 where the input is to blame (ValueError among our own classes), 10 where nothing could be judged."""
    return getattr(error, "exit_code", WRONG_USAGE if isinstance(error, ValueError) else COULD_NOT_JUDGE)


#: How many lines of an error :func:`brief` shows, and how much of each.
BRIEF_LINES, BRIEF_WIDTH = 6, 300


def brief(error: BaseException) -> str:
    """The text of an error of many lines as one, its lines apart by bars: the first says what it is, the last ones (what a compiler has
    under its caret, the end of a log) why, so that of a long text the middle goes. Lines of nothing but marks are left out."""
    lines = [line.strip()[:BRIEF_WIDTH] for line in str(error).splitlines() if any(map(str.isalnum, line))]
    return " | ".join(lines if len(lines) <= BRIEF_LINES else [lines[0], "...", *lines[2 - BRIEF_LINES:]])
