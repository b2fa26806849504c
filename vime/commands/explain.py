"""``vime explain``: :mod:`vime.explain` with progress."""
from __future__ import annotations

import json
import sys
from typing import Any

from vime.commands.progress import TerminalProgress


def run(profile: str, device: str, dtype: str | None, as_json: bool, **sizes: Any) -> int:
    """Measure and print; the exit code of the fully aligned run's verdict. ``sizes``: of :func:`vime.explain.explain`."""
    from vime.explain import explain, show

    with TerminalProgress() as progress:
        found = explain(profile, device=device, dtype=dtype, say=progress.phase, **sizes)
    if as_json:
        from alignment.report import strict

        sys.stdout.write(json.dumps(strict(found.to_dict()), indent=1, default=str) + "\n")
    else:
        show(found)
    return found.verdict.exit_code
