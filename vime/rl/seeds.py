"""Seeds that do not depend on the order in which anything happens.

Every sample owns a seed derived from the run seed, its prompt and its place in the group, so that a request drawn
alone, in a batch, first or last gets the same random numbers. The hash is xxh3-64 over a fixed text form: Python's
own ``hash`` changes with the process and ``random`` with the number of earlier draws.
"""
from __future__ import annotations

import xxhash

_POSITIVE_63 = (1 << 63) - 1  # engines keep a seed in a signed 64-bit integer


def kept_hash(*parts: int | str) -> int:
    """A hash of ``parts`` in [0, 2**63), the same in every process, release and machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return xxhash.xxh3_64_intdigest(text.encode()) & _POSITIVE_63


def sample_seed(run_seed: int, prompt_id: str, sample_index: int) -> int:
    """The seed of one sample of one prompt."""
    return kept_hash("sample", run_seed, prompt_id, sample_index)
