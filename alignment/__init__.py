"""Judge whether two runs computed the same numbers. No trainer, no engine: works on anybody's dumps.

    from alignment import bits, layers, logprobs, match, records, rerun, weights
    verdict = logprobs.judge(trainer, rollout)      # PASS, FAIL, INVALID or NOT_RUN
    print(verdict.summary())

``docs/alignment.md`` shows each function. Everything is imported when first used, so that ``import alignment`` is
quick.
"""
from __future__ import annotations

import importlib
from typing import Any

_MODULES = (
    "bits", "compare", "diagnose", "digest", "dumps", "errors", "evidence", "formats", "layers", "logprobs", "mapping",
    "match", "places", "records", "report", "requests", "rerun", "runlog", "runs", "sources", "verdict", "weights",
)  # fmt: skip
_NAMES = {
    "Verdict": "verdict", "Status": "verdict", "Coverage": "verdict", "Place": "verdict", "Cause": "verdict",
    "combine": "verdict", "worst": "verdict", "InputError": "errors", "KeyCollision": "errors",
    "Tokens": "match", "Packed": "match", "Run": "rerun", "RecordWriter": "records", "RecordReader": "records",
    "compare_runs": "compare",
}  # fmt: skip

__all__ = [*_MODULES, *_NAMES]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f"alignment.{_NAMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"alignment.{name}")
    raise AttributeError(f"module 'alignment' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
