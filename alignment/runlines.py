"""What a line of a ledger has to look like, and what it says against itself.

A checksum tells a damaged line from a whole one, and nothing else: a line that another program wrote, or a person, has a
good checksum as well. So the form is checked before anything is compared, and content that proves nothing (a digest of
nothing, NaN on both sides) is told from content that does.
"""
from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from typing import Any

#: Quantities of a step in the order of causation: none can be changed by one that comes later in the same step. The
#: random states come last: they are what the next step starts from.
QUANTITIES = ("prompts", "seeds", "sampled_tokens", "rollout_logprobs", "train_logprobs", "rewards", "advantages",
              "batch_composition", "loss", "gradients", "grad_norm", "optimizer", "weights", "engine_weights", "rng")
#: What a turn that only compares has.
COMPARED = QUANTITIES[:7]

#: Facts of a start line.
FACTS = ("topology", "recipe", "versions", "hardware", "conditions")
_VERDICTS = ("PASS", "FAIL", "INVALID", "NOT_RUN")
_LARGEST = 1 << 53  # beyond it a number in JSON is not the same number everywhere
_DIGEST = re.compile(r"[a-z0-9]+:\S+")
_FLOAT = re.compile(r"[0-9a-f]{16}")


def parse(text: bytes) -> dict[str, Any] | None:
    """One JSON object, strictly: no key twice, no NaN. None where it is not one."""
    try:
        body = json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key is there twice")
    return out


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def is_step(value: Any) -> bool:
    """A number of steps: a whole number from 0, and small enough to be one."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


def fault(body: Mapping[str, Any]) -> str | None:
    """What is wrong with the form of one line, or None."""
    return {"start": _start, "step": _step, "end": _end}[body["kind"]](body)


def _start(body: Mapping[str, Any]) -> str | None:
    for field in FACTS:
        if not isinstance(body.get(field, {}), dict):
            return f"its {field} is {_short(body[field])}; expected names and values"
    resumed = body.get("resumed_from")
    if resumed is not None and not is_step(resumed):
        return f"resumed_from is {_short(resumed)}; expected a number of steps"
    return None


def _end(body: Mapping[str, Any]) -> str | None:
    if not is_step(body.get("steps")):
        return f"the end line counts {_short(body.get('steps'))} steps; expected a number"
    if body.get("verdict") not in _VERDICTS:
        return f"the end line says {_short(body.get('verdict'))}; expected one of {', '.join(_VERDICTS)}"
    return None


def _step(body: Mapping[str, Any]) -> str | None:
    step, digests = body.get("step"), body.get("digests")
    if step is None or not isinstance(digests, dict):
        return "is a step without its number or digests"
    if not is_step(step):
        return f"is step {_short(step)}; expected a whole number from 0 to 2^53"
    odd = next((q for q, d in digests.items() if not isinstance(d, str) or not _DIGEST.fullmatch(d)), None)
    if odd is not None:
        return f"step {step}: the digest of {odd} is {_short(digests[odd])}; expected one such as xxh3:0123abcd"
    wanted = COMPARED if body.get("trained") is False else QUANTITIES
    missing = [q for q in wanted if q not in digests]
    if missing:
        return f"step {step} has no {', '.join(missing)}"
    for field, good in (("parts", lambda v: isinstance(v, dict) and all(isinstance(d, str) for d in v.values())),
                        ("numbers", lambda v: isinstance(v, int | float | str) and not isinstance(v, bool)),
                        ("sent", lambda v: isinstance(v, int | str) and not isinstance(v, bool)),
                        ("kernels", lambda v: isinstance(v, list) and all(isinstance(k, str) for k in v))):
        table = body.get(field, {})
        if not isinstance(table, dict) or not all(good(v) for v in table.values()):
            return f"step {step}: its {field} are {_short(table)}; expected a table by name"
    return None


def not_finite(body: Mapping[str, Any]) -> str | None:
    """The first quantity of a step that is NaN or infinite: by its number, by its bits, or in one of its parts."""
    for name, value in body.get("numbers", {}).items():
        if isinstance(value, str) or not math.isfinite(value):
            return str(name)
    for name, digest in body["digests"].items():
        form, _, bits = digest.partition(":")
        if form == "f64" and not _finite(bits):
            return str(name)
    for name in ("rewards", "advantages"):  # their parts are the bits of one float64 each
        if not all(_finite(bits) for bits in body.get("parts", {}).get(name, {}).values()):
            return name
    return None


def _finite(bits: str) -> bool:
    return not _FLOAT.fullmatch(bits) or math.isfinite(struct.unpack(">d", bytes.fromhex(bits))[0])


def contradiction(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """A quantity with one digest on both sides whose parts or number are not: one of the two lines was edited."""
    for quantity, digest in a["digests"].items():
        if b["digests"].get(quantity) != digest:
            continue
        for field in ("parts", "numbers"):
            x, y = a.get(field, {}).get(quantity), b.get(field, {}).get(quantity)
            if json.dumps(x, sort_keys=True) != json.dumps(y, sort_keys=True):
                return f"{quantity} has one digest on both sides, and other {field}"
    return None


def one_recording(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Two lines that took the same time to the microsecond are copies of one."""
    return bool(a.get("cost")) and a.get("cost") == b.get("cost")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
