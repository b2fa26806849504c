"""The error that carries a message for a person.

Bad input must end in one clear message and a non-zero exit, without a traceback. The command line prints any
exception class that vime or alignment define as a message; everything else is a fault of ours and keeps its traceback.
"""
from __future__ import annotations


class VimeError(RuntimeError):
    """What was found, what was expected, what to do."""


def is_for_people(error: BaseException) -> bool:
    """True if ``error`` is of a class that this project defined, so that its text is meant to be read alone."""
    return isinstance(error, VimeError) or type(error).__module__.partition(".")[0] in ("vime", "alignment", "gates")
