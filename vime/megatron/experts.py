"""Experts of a Megatron model: its configuration from a Hugging Face config, and slot-order dispatch in its layers."""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from vime.errors import BadInput
from vime.latent import Experts, experts

_LOCAL = re.compile(r"(\.local_experts\.)(\d+)\.")


class ExpertsDoNotDivide(BadInput, ValueError):
    """Experts that can't be spread evenly over the expert-parallel ranks."""


def check_spread(hf_config: Mapping[str, Any], expert_parallel: int) -> None:
    """Raise :class:`ExpertsDoNotDivide` if the experts of a config can't be spread evenly over that many ranks."""
    found = experts(hf_config)
    if found is None:
        if expert_parallel > 1:
            raise ExpertsDoNotDivide(f"expert parallel size is {expert_parallel} for a {hf_config.get('model_type')} model, which has "
                                     "no experts; set --expert-model-parallel-size 1")
    elif found.count % expert_parallel:
        raise ExpertsDoNotDivide(f"{found.count} experts can't be spread evenly over {expert_parallel} ranks; set "
                                 "--expert-model-parallel-size to a divisor of the experts")


def config_fields(found: Experts) -> dict[str, Any]:
    """Fields of Megatron's ``TransformerConfig`` for these experts, dispatched without capacity and auxiliary loss."""
    from megatron.core import parallel_state

    return {
        "num_moe_experts": found.count, "moe_ffn_hidden_size": found.ffn, "moe_router_topk": found.top_k,
        "moe_layer_freq": [int(sparse) for sparse in found.sparse], "moe_grouped_gemm": False,
        "moe_token_dispatcher_type": "alltoall", "moe_router_dtype": "fp32", "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0, "moe_router_score_function": found.kind, "moe_router_enable_expert_bias": found.bias,
        "moe_router_pre_softmax": found.kind == "softmax" and not found.normalise,
        "moe_router_topk_scaling_factor": found.scaling if found.scaling != 1.0 else None,
        "moe_router_num_groups": found.groups if found.groups > 1 else None,
        "moe_router_group_topk": found.top_groups if found.groups > 1 else None,
        "moe_shared_expert_intermediate_size": found.shared or None,
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": 1,
    }


def use_slot_order(model: Any, transport: Callable[[Any], Any] | None = None) -> int:
    """Give every ``MoELayer`` of ``model`` vime's dispatcher in place of Megatron's. Returns how many there are.

    Args:
        model: a Megatron model, maybe wrapped.
        transport: makes a :class:`vime.megatron.dispatch.transport.Transport` from the expert-parallel process group;
            default: torch's all-to-all.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    from vime.megatron.dispatch.dispatcher import SlotOrderDispatcher

    groups, changed = None, 0
    for module in model.modules():
        if type(module).__name__ == "MoELayer":
            groups = groups or ProcessGroupCollection.use_mpu_process_groups()
            module.token_dispatcher = SlotOrderDispatcher(
                module.num_local_experts, module.local_expert_indices, module.config, groups,
                transport(groups.ep) if transport is not None else None)
            changed += 1
    return changed


def global_name(name: str, ep_rank: int, local_count: int) -> str:
    """A parameter's name with the model's expert id in place of the rank's own."""
    return _LOCAL.sub(lambda m: f"{m[1]}{ep_rank * local_count + int(m[2])}.", name)


def local_name(name: str, ep_rank: int, local_count: int) -> str | None:
    """The inverse, or None for an expert that lives on another rank."""
    found = _LOCAL.search(name)
    if found is None:
        return name
    owner, number = divmod(int(found[2]), local_count)
    return _LOCAL.sub(lambda m: f"{m[1]}{number}.", name) if owner == ep_rank else None
