"""A gate on a dictionary of metrics, as a trainer logs them, that cannot be green because the metric is not there."""
from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from alignment import bits
from alignment.errors import InputError
from alignment.sources import as_tensor
from alignment.verdict import Cause, Coverage, Place, Status, Verdict

#: Names of metrics that are a largest value; that cannot be zero where a difference is not.
_LARGEST = re.compile(r"(?<!soft)(?<!arg)max|linf|l_inf")
_UNSIGNED = re.compile(_LARGEST.pattern + r"|(?<![a-z])(?:abs|absolute|mae|mse|rmse|l1|l2)(?![a-z])")
#: Names of metrics that are one place in an order of the differences, or a spread or size of their mean: 0 where some difference is not.
_PARTIAL = re.compile(r"(?<![a-z])(?:median|quantiles?|percentiles?|minimum|min|std|stddev|var|variance|(?<!top)(?<!top_)[pq]\d+|abs(?:olute)?_?(?:of_?)?mean)(?![a-z])")
_MEAN = re.compile(r"(?<![a-z])(?:mean|avg|average)(?![a-z])")


def gate_metrics(
    metrics: Mapping[str, Any],
    key: str = "train_rollout_logprob_abs_diff",
    *,
    tier: str | float = "1e-6",
    tokens: int | str | None = None,
    diffs: Any = None,
    mask: Any = None,
    name: str | None = None,
) -> Verdict:
    """A gate on a dictionary of metrics that cannot be green because the metric is not there.

    Args:
        key: the metric: a number, or the per-token differences themselves.
        tier: ``"exact"`` (0) or a bound: ``|diff| < bound``.
        tokens: how many tokens the metric is over, or the key of that number.
        diffs: per-token differences [T] (signed or absolute), where the metric is only a mean.
        mask: True where a token counts, shape of ``diffs``.
    Returns:
        NOT_RUN if the key is missing or 0 tokens count; INVALID for NaN, an infinite or negative value, or a mean
        that cannot bound the largest difference; FAIL above the bound, at the largest token.
    """
    name, bound = name or key, bits.bound_of(tier)
    tier = bits.tier_name(tier)
    if not isinstance(metrics, Mapping):
        raise InputError(f"metrics of type {type(metrics).__name__}", "a mapping name -> value")
    if isinstance(tokens, str):
        said = repr(tokens)
        if tokens not in metrics:
            return Verdict(name, Status.NOT_RUN, f"{tokens!r} is not in the metrics: nothing says how many tokens", tier)
        count = metrics[tokens]
    else:
        said, count = "tokens", tokens  # said is the name of what holds the number
    if count is not None or said != "tokens":
        count = count.item() if hasattr(count, "item") and getattr(count, "size", 1) != 0 else count
        if isinstance(count, bool) or not isinstance(count, int | float) or not np.isfinite(count) or count != int(count):
            return Verdict(name, Status.INVALID, f"{said} is {count!r}: expected a number of tokens", tier)
        count = int(count)
    if key not in metrics or metrics[key] is None:
        near = ", ".join(sorted(map(str, metrics))[:8]) or "none"
        return Verdict(name, Status.NOT_RUN, f"the metric {key!r} is not there; found: {near}", tier)
    if count is not None and count <= 0:
        return Verdict(name, Status.NOT_RUN, "0 tokens after masking", tier, {"tokens": Coverage(0, 0)})
    try:
        value = as_tensor(metrics[key], key)
    except InputError as e:
        return Verdict(name, Status.INVALID, f"{key} is no number: {e}", tier, first_bad=Place(tensor=key))
    if value.dtype == torch.bool or value.is_complex():
        return Verdict(name, Status.INVALID, f"{key} is {str(metrics[key])[:40]}: a difference is a real number", tier, first_bad=Place(tensor=key))
    value = value.double()
    if diffs is None and value.ndim > 0:
        diffs = value
    if diffs is not None:
        if not isinstance(diffs, list | tuple) and not as_tensor(diffs, "diffs").is_floating_point():
            return Verdict(name, Status.INVALID, f"the differences are of dtype {as_tensor(diffs, 'diffs').dtype}: they were cut to whole numbers",
                           tier, first_bad=Place(tensor=key))  # fmt: skip
        out = _gate_tokens(as_tensor(diffs, "diffs").double(), mask, bound, name, tier, count)
        if value.ndim == 0:
            out.info["metric"] = float(value)
            if not bool(value.isfinite()) and out.status in (Status.PASS, Status.NOT_RUN):
                return Verdict(name, Status.INVALID, f"{key} is {float(value)}", tier, out.coverage)
            if out.status is Status.PASS and abs(float(value)) > max(bound or 0.0, 1.001 * out.stats["max_abs"]):
                text = f"{key} is {float(value):g}, and the largest of the differences is {out.stats['max_abs']:g}: they are not those it was made from"
                return Verdict(name, Status.INVALID, text, tier, out.coverage, Place(tensor=key), stats=out.stats)
        return out
    x = float(value)
    cover = {"tokens": Coverage(count, count)} if count else {"metrics": Coverage(1, 1)}
    stats = {"value": x}
    if not np.isfinite(x):
        return Verdict(name, Status.INVALID, f"{key} is {x}", tier, cover, stats=stats)
    if x < 0:
        cause = Cause("missing_abs", "an absolute difference cannot be negative: the abs is missing", None, {"value": x})
        return Verdict(name, Status.INVALID, f"{key} is {x:g}, below 0", tier, cover, causes=[cause], stats=stats)
    if x > 0 and (bound is None or x >= bound):
        limit = "0" if bound is None else f"{bound:g}"
        return Verdict(name, Status.FAIL, f"{key} is {x:g}, not below {limit}", tier, cover, Place(tensor=key), stats=stats)
    partial = _PARTIAL.search(key.lower())
    if partial:
        return Verdict(name, Status.INVALID, f"{key} is {x:g} and by its name ({partial.group()}) bounds only a part of the differences, or their mean; "
                       "give diffs, or their largest absolute value", tier, cover, Place(tensor=key), stats=stats)  # fmt: skip
    if x == 0 and not _UNSIGNED.search(key.lower()):
        return Verdict(name, Status.INVALID, f"{key} is 0 and may be a mean of signed differences, which is 0 for +0.5 and -0.5; give "
                       "diffs, or a metric whose name says abs or max", tier, cover, Place(tensor=key), stats=stats)  # fmt: skip
    if x == 0 and count is None:
        return Verdict(name, Status.NOT_RUN, f"{key} is 0, which it is over no token as well: give tokens or diffs", tier,
                       {"tokens": Coverage(0, 1)}, stats=stats)  # fmt: skip
    if x == 0 or (_LARGEST.search(key.lower()) and not _MEAN.search(key.lower())) or (_UNSIGNED.search(key.lower()) and count is not None and bound is not None and x * count < bound):
        return Verdict(name, Status.PASS, "", tier, cover, stats=stats)
    return Verdict(name, Status.INVALID, f"{key} is {x:g}, a mean over {count or 'an unknown number of'} tokens: it "
                   "does not bound the largest difference; give diffs", tier, cover, stats=stats)


def _gate_tokens(
    diffs: torch.Tensor, mask: Any, bound: float | None, name: str, tier: str, tokens: int | None
) -> Verdict:
    from alignment.logprobs import judge  # which offers the gate above as one of its own

    zero = torch.zeros_like(diffs)
    out = judge(zero, diffs, name=name, tier=tier, mask=mask)
    if tokens is not None and out.coverage["tokens"].compared:
        out.coverage["tokens"] = Coverage(out.coverage["tokens"].compared, tokens)
        if out.status is Status.PASS:  # a Verdict checks its coverage on construction
            out = dataclasses.replace(out)
    top = out.stats.get("max_abs", 0.0)
    if out.status is Status.FAIL and sum(out.stats["nonfinite"]) and not (top >= bound if bound is not None else top > 0):
        place = out.first_bad or Place()
        text = f"{sum(out.stats['nonfinite'])} of the differences are no numbers, the first at {list(place.index or ())}"
        return Verdict(name, Status.INVALID, text, tier, out.coverage, dataclasses.replace(place, position=(place.index or (None,))[-1]), stats=out.stats)
    if out.status is Status.FAIL:  # the place of a metric gate is its largest token
        out.first_bad = Place(index=tuple(out.stats["max_index"]), position=out.stats["max_index"][-1])
        out.reason = f"max {out.stats['max_abs']:g} at token {out.stats['max_index'][-1]}; mean {out.stats['mean_abs']:g}"
        out.causes = []
    return out
