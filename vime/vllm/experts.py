"""Mixture-of-experts layers of vLLM, routed to ``vime.ops``.

vLLM builds router, expert weights and shared expert and drives them from one runner. The runner's ``forward`` is replaced,
so names and loading stay vLLM's: routing, experts, the sum over slots and the shared expert are ops on the live weights.
Grouping tokens by expert is a loop order only; a row never sees how many rows its expert got.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from vime import ops
from vime.latent import Experts, experts
from vime.vllm import fp8
from vime.vllm.expert_parallel import spread_rows
from vime.vllm.layers import UnsupportedLayer

_stock_init, _stock_load = MoERunner.__init__, MoERunner.load_weights


def init(self: Any, *args: Any, **kwargs: Any) -> None:
    """``MoERunner.__init__``, with the reading of the config that both sides share."""
    _stock_init(self, *args, **kwargs)
    self.vime_experts = _require(self, experts(get_current_vllm_config().model_config.hf_config.to_dict()))
    self.vime_decides, self.vime_observer = "routing", None
    self.vime_local = _local_ids(self) if self.moe_config.ep_size > 1 else None
    self.vime_fp8_blocks = fp8.expert_blocks(self)


def forward(self: Any, hidden_states: torch.Tensor, router_logits: torch.Tensor, input_ids: torch.Tensor | None = None,
            shared_experts_input: torch.Tensor | None = None) -> torch.Tensor:
    """``MoERunner.forward``: ``[T, H]`` (after the pre-MLP norm) -> ``[T, H]``."""
    e: Experts = self.vime_experts
    scores_TE = ops.router_scores(hidden_states, self.gate.weight, e.kind)
    bias_E = self.gate.e_score_correction_bias if e.bias else None
    ids_TK, weights_TK = ops.route(scores_TE, e.top_k, bias_E=bias_E, **e.route_options())
    if self.vime_observer is not None:
        self.vime_observer(ids_TK)
    weights = self.routed_experts.w13_weight, self.routed_experts.w2_weight, self.vime_fp8_blocks
    if self.vime_local is None:
        rows_TKH = expert_rows(hidden_states, ids_TK, *weights)
    else:
        rows_TKH = spread_rows(hidden_states, ids_TK, self.vime_local, get_ep_group().device_group,
                               lambda x_RH, ids_R: expert_rows(x_RH, ids_R[:, None], *weights)[:, 0])
    y_TH = ops.combine_slots(rows_TKH, weights_TK)
    if self._shared_experts is not None:
        y_TH = y_TH + self._shared_experts._layer(hidden_states)
    return y_TH


def expert_rows(x_TH: torch.Tensor, ids_TK: torch.Tensor, gate_up_E2FH: torch.Tensor, down_EHF: torch.Tensor,
                fp8_blocks: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
    """``row[t, k] = down[e] silu_and_mul(gate_up[e] x[t])`` with ``e = ids[t, k]``, in the model dtype, ``[T, K, H]``; with
    ``fp8_blocks`` (of the rows of both weights) in block FP8."""

    return ops.expert_rows(x_TH, ids_TK, gate_up_E2FH, down_EHF, fp8_blocks)


def _local_ids(runner: Any) -> torch.Tensor:
    """``[ranks, E]``: vLLM's own placement, each rank a run of experts in order; checked against this rank's map."""
    experts_, size = runner.moe_config.num_experts, runner.moe_config.ep_size
    share = experts_ // size
    ids = torch.arange(experts_)
    local = torch.stack([torch.where(ids // share == r, ids % share, -1) for r in range(size)])
    held = runner.routed_experts._expert_map
    if held is None or held.tolist() != local[runner.moe_config.ep_rank].tolist():
        raise UnsupportedLayer(f"{runner.layer_name}: experts are not placed in runs of {share}; covered: expert_placement_strategy linear")
    return local.to(runner.routed_experts.w13_weight.device)


def load_weights(self: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
    """``MoERunner.load_weights``, which in vLLM 0.26 reports names that no parameter has: those within the experts."""
    for name in _stock_load(self, weights):
        yield name if name.startswith("routed_experts.") else f"routed_experts.{name}"


def keep_weights(self: object, layer: torch.nn.Module) -> None:
    """``process_weights_after_loading``: nothing is packed."""
    fp8.keep_experts(layer)


def no_kernel_of_its_own(self: Any) -> None:
    """``maybe_init_modular_kernel``, which vLLM calls on engines of several expert ranks once the weights are there: its kernel and
    its dispatcher would be made here, and ``keep_weights`` has left none to make; ``forward`` needs neither."""


keep_weights.vime_keeps = True  # type: ignore[attr-defined]  # for vime.vllm.layout, which must not import this module


def _require(runner: Any, e: Experts | None) -> Experts:
    """The reading of the config, if vLLM built the layer as it says. Raises UnsupportedLayer naming the difference."""
    name, routed, config = runner.layer_name, runner.routed_experts, runner.moe_config
    if e is None:
        raise UnsupportedLayer(f"{name}: experts of a model type that vime does not cover; covered: qwen3_moe, deepseek_v3, glm_moe_dsa")
    if config.tp_size > 1 or config.ep_size != config.dp_size or e.count % config.ep_size:
        raise UnsupportedLayer(f"{name}: {e.count} experts at expert parallel size {config.ep_size}, tensor parallel size "
                               f"{config.tp_size}, data parallel size {config.dp_size} in the engine; covered: tensor parallel size 1, and "
                               "as many expert ranks as data parallel ranks, a divisor of the experts")
    asked = {"experts": e.count, "experts per token": e.top_k, "scores": e.kind, "expert bias": e.bias,
             "shared expert": bool(e.shared)}
    gate = runner.gate
    found = {"experts": config.num_experts, "experts per token": config.experts_per_token, "scores": routed.scoring_func,
             "expert bias": getattr(gate, "e_score_correction_bias", None) is not None,
             "shared expert": runner._shared_experts is not None}
    differing = [f"{key}: {asked[key]} in config.json, {found[key]} in vLLM" for key in asked if asked[key] != found[key]]
    if differing:
        raise UnsupportedLayer(f"{name}: " + "; ".join(differing) + ". vLLM reads topk_method (noaux_tc) and scoring_func (sigmoid)")
    odd = {"no gate": gate is None, "a gate on the shared expert": runner.shared_expert_gate is not None,
           "a transform of its input": runner.routed_input_transform is not None,
           "a transform of its output": runner.routed_output_transform is not None,
           "expert biases": config.has_bias, "redundant experts": routed.global_num_experts != config.num_logical_experts,
           "weights applied on the input": routed.apply_router_weight_on_input,
           "quantised experts": type(routed.quant_method) is not UnquantizedFusedMoEMethod,
           "padded weights": (routed.hidden_size, routed.intermediate_size_per_partition)
           != (config.hidden_dim_unpadded, config.intermediate_size_per_partition_unpadded)}
    if any(odd.values()):
        raise UnsupportedLayer(f"{name}: experts with {', '.join(what for what, yes in odd.items() if yes)}; covered: none of these")
    return e


def problem(runner: Any) -> str | None:
    """Why a built expert layer is not aligned, or None."""
    if type(runner).forward is not forward or not hasattr(runner, "vime_experts"):
        return f"{type(runner).__name__}.forward is not vime's"
    method = type(runner.routed_experts.quant_method)
    if method.process_weights_after_loading is not keep_weights:
        return f"{method.__name__} packs the experts away; a changed weight would not be seen"
    bias = getattr(runner.gate, "e_score_correction_bias", None)
    if bias is not None and bias.dtype != torch.float32:
        return f"the expert bias is {bias.dtype}; expected float32"
    return None


def install() -> None:
    MoERunner.__init__ = init  # type: ignore[method-assign]
    MoERunner.forward = forward  # type: ignore[method-assign]
    MoERunner.load_weights = load_weights  # type: ignore[method-assign]
    MoERunner.maybe_init_modular_kernel = no_kernel_of_its_own  # type: ignore[method-assign]
    UnquantizedFusedMoEMethod.process_weights_after_loading = keep_weights  # type: ignore[method-assign]
