"""Experts of TransformerEngine: ``TEGroupedLinear`` and ``TEGroupedMLP``, one product an expert.

A grouped kernel is one launch over all experts whose tiles depend on how many rows each got. Here every expert's rows go
through the ordinary linear, so a row does not know its neighbours, nor its expert's load. Rows come by expert and, inside
of that, by source rank (:mod:`vime.megatron.gradients`), as for the local ``SequentialMLP``.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from vime import ops
from vime.megatron import gradients
from vime.megatron.patch import HookPoint, Refused, note
from vime.megatron.routes import activation
from vime.megatron.routes.moe import require_slot_order
from vime.megatron.te import linear

_MODULE = "megatron.core.transformer.moe.experts"
CLASS = f"{_MODULE}.TEGroupedMLP"

# Field of TransformerConfig -> values that change nothing.
_FIELDS: dict[str, tuple[Any, ...]] = {
    "use_transformer_engine_op_fuser": (False, None), "moe_mlp_glu_interleave_size": (None,), "moe_paged_stash": (False, None),
    "add_bias_linear": (False,), "moe_apply_probs_on_input": (False, None), "moe_single_grouped_weight": (False, None),
}


def _grouped(module: Any, rows_RK: torch.Tensor, counts_E: Sequence[int], sources_ES: Sequence[Sequence[int]] | None) -> torch.Tensor:
    """The rows of expert 0, then 1 ...: each times its own weight. ``sources_ES``: how many of them come from each rank."""
    linear.refuse_fp8()
    if len(counts_E) != module.num_gemms or sum(counts_E) != rows_RK.shape[0]:
        raise Refused(f"a grouped linear of {module.num_gemms} experts got {rows_RK.shape[0]} rows, split as {list(counts_E)}")
    outputs = []
    for expert, rows in enumerate(rows_RK.split(list(counts_E))):
        if rows.shape[0]:
            with contextlib.nullcontext() if sources_ES is None else gradients.rows_from(sources_ES[expert]):
                note("linear")
                outputs.append(gradients.linear(rows, getattr(module, f"weight{expert}"), None))
    return torch.cat(outputs) if outputs else rows_RK.new_zeros(0, module.out_features)


def _route_grouped(stock: Any) -> Any:
    del stock

    def forward(self: Any, x: torch.Tensor, m_splits: Any) -> tuple[torch.Tensor, None]:
        counts_E = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)
        self.is_first_microbatch = False
        return _grouped(self, x, counts_E, None), None

    return forward


def _route_experts(stock: Any) -> Any:
    del stock

    def forward(self: Any, rows_RH: torch.Tensor, counts_ES: torch.Tensor, probs: Any = None, **kwargs: Any) -> tuple[torch.Tensor, None]:
        del probs  # applied by the token's owner
        require_slot_order(counts_ES, kwargs)
        note("moe")
        counts_E, sources_ES = counts_ES.sum(1).tolist(), counts_ES.tolist()
        if not rows_RH.shape[0]:
            return rows_RH, None  # the input itself goes on, so that the backward still takes part in the exchange
        note("activation")
        h_RF = ops.silu_and_mul(_grouped(self.linear_fc1, rows_RH, counts_E, sources_ES))
        return _grouped(self.linear_fc2, h_RF, counts_E, sources_ES), None

    return forward


def grouped_hook_points(extension: str) -> list[HookPoint]:
    return [HookPoint(f"{extension}:TEGroupedLinear", "forward", _route_grouped)]


def hook_points() -> list[HookPoint]:
    return [HookPoint(f"{_MODULE}:TEGroupedMLP", "forward", _route_experts)]


def grouped_refusals(module: Any, config: Any) -> Iterator[str]:
    del config
    yield from linear.settings_refusals(module, but=("ub_name",))  # a label here
    if module.use_bias:
        yield "its experts have a bias"
    if getattr(module, "single_grouped_weight", False):
        yield "single_grouped_weight is on: all experts are one parameter"
    else:
        for expert in range(module.num_gemms):
            yield from linear.plain_weight(f"weight{expert}", getattr(module, f"weight{expert}"))


def refusals(module: Any, config: Any) -> Iterator[str]:
    del module
    for field, neutral in _FIELDS.items():
        value = getattr(config, field, neutral[0])
        if value not in neutral:
            yield f"{field} is {value!r}; aligned is {neutral[0]!r}"
    yield from activation.refusals(None, config)
