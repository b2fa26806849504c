"""Router and experts: ``TopKRouter.forward``, ``SequentialMLP.forward``, and the gradients of the experts.

The router's route gives ids and weights in slot order, the same with and without grad (Megatron sorts its choice only where
grad is on). Routed experts get rows without their weights, since these are applied after the experts, by the token's owner.
``MoELayer`` itself, which adds the shared expert last, stays Megatron's; its dispatcher must be vime's.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from vime import ops
from vime.megatron import gradients
from vime.megatron.patch import HookPoint, Refused, note

OP = "moe"
_MOE = "megatron.core.transformer.moe"
MODULES = (f"{_MOE}.moe_layer.MoELayer", f"{_MOE}.router.TopKRouter", f"{_MOE}.experts.SequentialMLP",
           f"{_MOE}.shared_experts.SharedExpertMLP")

# Field of TransformerConfig -> (values that are aligned, why others are not).
_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "moe_router_dtype": (("fp32",), "the router runs in FP32 on both sides"),
    "moe_expert_capacity_factor": ((None,), "a capacity drops tokens depending on the batch"),
    "moe_pad_expert_input_to_capacity": ((False, None), "padding to a capacity drops tokens depending on the batch"),
    "moe_token_dropping": ((False, None), "dropped tokens depend on the batch"),
    "moe_input_jitter_eps": ((None,), "it adds noise to the router's input"),
    "moe_router_force_load_balancing": ((False, None), "it replaces the router's choice by a random one"),
    "moe_router_force_biased": ((None, False), "it adds a random bias to the router's logits"),
    "moe_z_loss_coeff": ((None, 0, 0.0), "the auxiliary loss has no route"),
    "moe_shared_expert_overlap": ((False, None), "the shared expert must be added after the slots"),
    "moe_shared_expert_gate": ((False, None), "a gate on the shared expert has no route"),
    "moe_latent_size": ((None,), "projections around the experts have no route"),
    "moe_apply_probs_on_input": ((False, None), "weights are applied after the experts, in slot order"),
    "moe_enable_routing_replay": ((False, None), "the router is to agree by itself"),
    "expert_tensor_parallel_size": ((1, None), "experts cut over ranks are not aligned"),
    "pipeline_model_parallel_size": ((1,), "pipeline stages are not proven for experts"),
    "overlap_moe_expert_parallel_comm": ((False, None), "the order of the dispatches is fixed"),
}


def normalises(config: Any) -> bool:
    """Whether Megatron divides the weights of the chosen experts by their sum."""
    if config.moe_router_score_function == "sigmoid":
        return config.moe_router_topk > 1
    return not config.moe_router_pre_softmax


def require_slot_order(counts_ES: torch.Tensor, further: Mapping[str, Any]) -> None:
    """Raise :class:`Refused` unless experts got what :mod:`vime.megatron.dispatch` feeds them: rows of each from each rank, and no
    argument beyond (``further``) that is set."""
    if counts_ES.dim() != 2 or any(value is not None for value in further.values()):
        raise Refused("the experts were not fed by slot-order dispatch; Megatron's own dispatchers add rows on the way, in an "
                      "order that depends on which experts share a rank. Call vime.megatron.experts.use_slot_order(model)")


def _route_router(stock: Any) -> Any:
    del stock

    def forward(self: Any, input: torch.Tensor, padding_mask: torch.Tensor | None = None,
                **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = [name for name, value in {"padding_mask": padding_mask, **kwargs}.items() if value is not None]
        if given:
            raise Refused(f"TopKRouter.forward was called with {', '.join(given)}, which vime can't align")
        config = self.config
        if config.moe_router_dtype != "fp32":
            raise Refused(f"moe_router_dtype is {config.moe_router_dtype!r}; the router runs in FP32 on both sides: set 'fp32'")
        note(OP)
        x_TH = input.reshape(-1, input.shape[-1])
        scores_TE = ops.router_scores(x_TH, self.weight, self.score_function)
        scaling = config.moe_router_topk_scaling_factor
        ids_TK, weights_TK = ops.route(
            scores_TE, self.topk, bias_E=self.expert_bias, groups=config.moe_router_num_groups or 1,
            top_groups=config.moe_router_group_topk or 1, normalise=normalises(config),
            scaling=1.0 if scaling is None else float(scaling))
        return weights_TK, ids_TK

    return forward


def _route_experts(stock: Any) -> Any:
    del stock

    def forward(self: Any, rows_RH: torch.Tensor, counts_ES: torch.Tensor, probs: Any = None,
                **kwargs: Any) -> tuple[torch.Tensor, None]:
        del probs  # applied by the token's owner
        require_slot_order(counts_ES, kwargs)
        note(OP)
        per_expert, outputs = rows_RH.split(counts_ES.sum(1).tolist()), []
        for expert, rows, counts_S in zip(self.local_experts, per_expert, counts_ES.tolist(), strict=True):
            if rows.shape[0]:
                with gradients.rows_from(counts_S):
                    outputs.append(expert(rows)[0])
        # without any row the input itself goes on, so that the backward still takes part in the exchange
        return (torch.cat(outputs) if outputs else rows_RH), None

    return forward


def hook_points() -> list[HookPoint]:
    return [HookPoint(f"{_MOE}.router:TopKRouter", "forward", _route_router),
            HookPoint(f"{_MOE}.experts:SequentialMLP", "forward", _route_experts), *gradients.hook_points()]


def refusals(module: Any, config: Any) -> Iterator[str]:
    kind = type(module).__name__
    if kind == "MoELayer":
        yield from _layer_refusals(module, config)
    elif kind == "TopKRouter":
        if module.bias is not None:
            yield "its router has a bias"
        if config.moe_router_score_function not in ("sigmoid", "softmax"):
            yield f"moe_router_score_function is {config.moe_router_score_function!r}; aligned: sigmoid, softmax"
        groups, top_groups = config.moe_router_num_groups, config.moe_router_group_topk
        if groups and groups > 1 and config.moe_router_topk != 2 * (top_groups or 1):
            yield (f"it ranks groups by their best {config.moe_router_topk // (top_groups or 1)} expert(s) (moe_router_topk "
                   f"{config.moe_router_topk} over moe_router_group_topk {top_groups}); aligned is the best two, as DeepSeek-V3 does")
        if not isinstance(module.routing_type, str) or module.routing_type == "sinkhorn":
            yield f"moe_router_load_balancing_type is {module.routing_type!r}; aligned: none"
        elif module.is_aux_loss_enabled():
            yield f"{module.routing_type} with coefficient {config.moe_aux_loss_coeff} has no route; set moe_aux_loss_coeff to 0"


def _layer_refusals(module: Any, config: Any) -> Iterator[str]:
    for field, (aligned, why) in _FIELDS.items():
        value = getattr(config, field, aligned[0])
        if value not in aligned:
            yield f"{field} is {value!r}; aligned is {aligned[0]!r}: {why}"
    from vime.megatron.dispatch.dispatcher import SlotOrderDispatcher

    if not isinstance(module.token_dispatcher, SlotOrderDispatcher):
        yield (f"its dispatcher is {type(module.token_dispatcher).__name__}; Megatron's dispatchers add the rows of a token per rank "
               "first, so the sum depends on which experts share a rank. Call vime.megatron.experts.use_slot_order(model)")
