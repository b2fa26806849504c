"""What both sides must agree on before a log-probability of one can be compared with one of the other.

A contract is a flat set of named facts: which operations are aligned and by which implementation, the dtypes that
matter, the parameters that fix an order of additions. The trainer and the engine each build theirs from what is
*in effect* (never from flags) and exchange it before the first rollout; a difference is reported by field.
"""
from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

SCHEMA = 1

#: Every operation that both sides evaluate. Each can be switched alone.
OPS = ("embedding", "linear", "norm", "rope", "activation", "attention", "moe", "logprob", "sampling")


class ContractMismatch(RuntimeError):
    """The two sides do not evaluate the same numerics. The message names every differing field."""


@dataclasses.dataclass(frozen=True)
class Contract:
    """The numerics in effect on one side.

    Attributes:
        dtype: model dtype, ``"float32"`` or ``"bfloat16"``.
        ops: operation -> implementation id (``"cpu/linear/avx512-bf16@1"``), or ``"stock"`` where it is switched off.
        params: parameters that fix an order or a rounding (key tile of attention, residual rounding ...).
        lm_head_dtype, router_dtype, kv_cache_dtype: effective dtypes, read after construction.
        logprob_mode: ``"temperature"``: log-softmax of logits / temperature over the full vocabulary.
    """

    dtype: str
    ops: dict[str, str]
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    lm_head_dtype: str = "model"
    router_dtype: str = "float32"
    kv_cache_dtype: str = "model"
    logprob_mode: str = "temperature"
    schema: int = SCHEMA

    def flat(self) -> dict[str, Any]:
        """Every field under one dotted name, e.g. ``ops.linear``."""
        out: dict[str, Any] = {}

        def walk(prefix: str, value: Any) -> None:
            if isinstance(value, dict):
                for key in sorted(value):
                    walk(f"{prefix}.{key}" if prefix else str(key), value[key])
            else:
                out[prefix] = value

        walk("", dataclasses.asdict(self))
        return out

    def fingerprint(self) -> str:
        """32 hex digits over every field."""
        text = json.dumps(self.flat(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def diff(self, other: Contract) -> dict[str, tuple[Any, Any]]:
        """Fields that differ, as name -> (mine, theirs). A field that one side lacks counts as None there."""
        a, b = self.flat(), other.flat()
        return {k: (a.get(k), b.get(k)) for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)}

    def require_equal(self, other: Contract, mine: str = "trainer", theirs: str = "engine") -> None:
        """Raise :class:`ContractMismatch` naming every differing field."""
        differing = self.diff(other)
        if differing:
            lines = [f"  {k}: {mine} has {a!r}, {theirs} has {b!r}" for k, (a, b) in differing.items()]
            raise ContractMismatch(
                f"{mine} and {theirs} do not share one contract; {len(differing)} field(s) differ:\n" + "\n".join(lines)
                + "\nUse the same vime version, dtype and op switches on both sides, on processors of one kind."
            )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Contract:
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ContractMismatch(f"contract has fields this version of vime does not know: {', '.join(unknown)}")
        return cls(**data)
