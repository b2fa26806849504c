"""The error that carries a message for a person.

Bad input must end in one clear message and a non-zero exit, without a traceback. The command line prints any
exception class that vime or alignment define as a message; everything else is a fault of ours and keeps its traceback.
"""
from __future__ import annotations

#: Exit codes of the command line besides those of a verdict: 2 for what was asked, 10 for what then went wrong.
WRONG_USAGE, COULD_NOT_JUDGE = 2, 10


class VimeError(RuntimeError):
    """What was found, what was expected, what to do. Raised when something goes wrong while running."""

    exit_code = COULD_NOT_JUDGE


class BadInput(VimeError):
    """What was given cannot be used; nothing has been started or written."""

    exit_code = WRONG_USAGE


def is_for_people(error: BaseException) -> bool:
    """True if ``error`` is of a class that this project defined, so that its text is meant to be read alone."""
    return isinstance(error, VimeError) or type(error).__module__.partition(".")[0] in ("vime", "alignment", "gates")


def exit_code_of(error: BaseException) -> int:
    """2 where the input is to blame (ValueError among our own classes), 10 where nothing could be judged."""
    return getattr(error, "exit_code", WRONG_USAGE if isinstance(error, ValueError) else COULD_NOT_JUDGE)
