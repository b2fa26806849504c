"""Faults that are planted into a trainer rank for negative controls of the gates on latent attention and experts.

Each does what a real implementation has been seen to do, in the trainer only, so that the gate must go red at the place
where it acts. Planting returns what undoes it. Nothing of this is reachable from a setting.
"""
from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vime import ops
from vime.megatron.check import unwrap
from vime.megatron.faults_fp8 import FAULTS_FP8
from vime.megatron.planting import NoSuchFault, Undo, swap, while_runs


def _router_in_bf16(model: Any, layer: int) -> Undo:
    """Router logits rounded to bf16 before the scores, as a router in the model's dtype gives them."""
    stock = ops.router_scores

    def scores(x_TH: torch.Tensor, weight_EH: torch.Tensor, kind: str) -> torch.Tensor:
        logits = ops.linear(x_TH.float(), weight_EH.float()).bfloat16().float()
        return torch.sigmoid(logits) if kind == "sigmoid" else torch.softmax(logits, -1) if kind == "softmax" else stock(x_TH, weight_EH, kind)

    return while_runs(_moe(model, layer).router, ops, "router_scores", scores)


def _moe(model: Any, layer: int) -> Any:
    mlp = model.decoder.layers[layer].mlp
    if type(mlp).__name__ != "MoELayer":
        raise NoSuchFault(f"layer {layer} has no experts, so this fault finds nothing to act on")
    return mlp


def _on_combine(model: Any, layer: int, combine: Callable[..., torch.Tensor]) -> Undo:
    """Replace the sum over slots of one layer; ``combine(rows, weights, ids, dispatcher)``."""
    dispatcher = _moe(model, layer).token_dispatcher

    def postprocess(rows_TKH: torch.Tensor) -> torch.Tensor:
        exchange, dispatcher._now = dispatcher._now, None
        return combine(rows_TKH, exchange.weights_TK, exchange.ids_TK, dispatcher).view(dispatcher._shape)

    dispatcher.combine_postprocess = postprocess
    return lambda: delattr(dispatcher, "combine_postprocess")


def _in_order(rows_TKH: torch.Tensor, weights_TK: torch.Tensor, order_TK: torch.Tensor) -> torch.Tensor:
    index = order_TK[:, :, None].expand_as(rows_TKH)
    return ops.combine_slots(rows_TKH.gather(1, index), weights_TK.gather(1, order_TK))


def _expert_order(model: Any, layer: int) -> Undo:
    """Slots added by rising expert id."""
    return _on_combine(model, layer, lambda rows, weights, ids, _: _in_order(rows, weights, ids.argsort(1)))


def _unsorted_without_grad(model: Any, layer: int) -> Undo:
    """Slots in another order where grad is off, as ``torch.topk(sorted=is_grad_enabled())`` may give them."""

    def combine(rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, _: Any) -> torch.Tensor:
        order = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return _in_order(rows, weights, order if torch.is_grad_enabled() else order.flip(1))

    return _on_combine(model, layer, combine)


def _stock_dispatcher(model: Any, layer: int) -> Undo:
    """Megatron's ``MoEAlltoAllTokenDispatcher`` in one layer, its refusal lifted for that layer.

    The router is ours still, in Megatron's form (a map and probabilities over all experts); the experts apply the weights before
    their second linear layer, as that dispatcher asks of them; it adds the rows of experts on one rank first, then across ranks.
    """
    from vime.megatron.routes import moe as route

    moe = _moe(model, layer)
    router, listed = moe.router.forward, route._layer_refusals

    def in_megatrons_form(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights_TK, ids_TK = router(*args, **kwargs)
        probs_TE = torch.zeros(len(ids_TK), moe.config.num_moe_experts, device=ids_TK.device).scatter(1, ids_TK, weights_TK)
        return probs_TE, torch.zeros_like(probs_TE, dtype=torch.bool).scatter(1, ids_TK, True)

    def weights_before_the_second_layer(rows_RH: torch.Tensor, counts_E: torch.Tensor, probs_R: torch.Tensor) -> tuple[torch.Tensor, None]:
        counts, outputs = counts_E.tolist(), []
        for expert, rows, probs in zip(moe.experts.local_experts, rows_RH.split(counts), probs_R.split(counts), strict=True):
            if len(rows):
                inner = ops.silu_and_mul(expert.linear_fc1(rows)[0])
                outputs.append(expert.linear_fc2((inner * probs[:, None]).to(inner.dtype))[0])
        return torch.cat(outputs) if outputs else rows_RH, None

    def lifted(module: Any, config: Any) -> Any:
        return (reason for reason in listed(module, config) if module is not moe or not reason.startswith("its dispatcher is"))

    stock = _alltoall(moe)  # first: what may raise is over before anything is replaced
    moe.router.forward, moe.experts.forward = in_megatrons_form, weights_before_the_second_layer
    swapped = [swap(moe, "token_dispatcher", stock), swap(route, "_layer_refusals", lifted)]

    def undo() -> None:
        for one in swapped:
            one()
        del moe.router.forward, moe.experts.forward

    return undo


def _alltoall(moe: Any) -> Any:
    """A dispatcher of Megatron's own for an expert layer."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    return MoEAlltoAllTokenDispatcher(moe.num_local_experts, moe.local_expert_indices, config=moe.config,
                                      pg_collection=ProcessGroupCollection.use_mpu_process_groups())


def _swapped_experts(model: Any, layer: int) -> Undo:
    """The first expert of rank 0 and that of rank 1 hold each other's weights (at EP 1: experts 0 and 1)."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    group, rank = parallel_state.get_expert_model_parallel_group(), parallel_state.get_expert_model_parallel_rank()
    experts = _moe(model, layer).experts.local_experts

    def exchange() -> None:
        with torch.no_grad():
            if group.size() == 1:
                for a, b in zip(experts[0].parameters(), experts[1].parameters(), strict=True):
                    kept = a.clone()
                    a.copy_(b)
                    b.copy_(kept)
                return
            for parameter in experts[0].parameters():
                held = [torch.empty_like(parameter) for _ in range(group.size())]
                dist.all_gather(held, parameter.detach().contiguous(), group=group)
                if rank < 2:
                    parameter.copy_(held[1 - rank])

    exchange()
    return exchange


def _core(model: Any, layer: int) -> Any:
    core = model.decoder.layers[layer].self_attention.core_attention
    if getattr(core, "indexer", None) is None:
        raise NoSuchFault(f"layer {layer} has no indexer of its own, so this fault finds nothing to act on")
    return core


def _unsorted_indices(model: Any, layer: int) -> Undo:
    """The chosen keys in falling order: the same set, read the other way round."""
    core = _core(model, layer)
    stock = core.choose

    def choose(*args: Any) -> torch.Tensor:
        index_TK = stock(*args)
        counts_T = (index_TK >= 0).sum(1, keepdim=True)
        place_TK = torch.arange(index_TK.shape[1], device=index_TK.device).expand_as(index_TK)
        return torch.where(place_TK < counts_T, index_TK.gather(1, (counts_T - 1 - place_TK).clamp(min=0)), -1)

    core.choose = choose
    return lambda: delattr(core, "choose")


def _rotary_layout(model: Any, layer: int) -> Undo:
    """The indexer rotates halves instead of interleaved pairs."""
    indexer = _core(model, layer).indexer
    return swap(indexer, "indexer", dataclasses.replace(indexer.indexer, interleaved=not indexer.indexer.interleaved))


def _norm_epsilon(model: Any, layer: int) -> Undo:
    """``rms_norm_eps`` of the config where the query's norm has 1e-6."""
    return swap(model.decoder.layers[layer].self_attention.q_layernorm, "eps", 1e-5)


def _scale_off_by_one(model: Any, layer: int) -> Undo:
    """Each block of a row read with the scale of the next one, in the attention of one layer."""
    attention = model.decoder.layers[layer].self_attention
    if not attention.fp8_cache:
        raise NoSuchFault("the model has no FP8 cache, so no scale can be off by one block")

    def through(row_TD: torch.Tensor, rank: int) -> torch.Tensor:
        q, scale = ops.quantise_blocks(row_TD[:, :rank])
        return torch.cat([ops.dequantise_blocks(q, scale.roll(1, dims=1), row_TD.dtype), row_TD[:, rank:]], dim=1)

    return while_runs(attention, ops, "through_fp8_cache", through)


#: Name -> (what plants it, whether it acts on a layer with experts rather than on one with an indexer).
FAULTS: dict[str, tuple[Callable[[Any, int], Undo], bool]] = {
    "router in bf16": (_router_in_bf16, True),
    "slots added in expert order": (_expert_order, True),
    "slots unsorted in the no-grad pass": (_unsorted_without_grad, True),
    "one expert swapped between ranks": (_swapped_experts, True),
    "indices unsorted": (_unsorted_indices, False),
    "KV scale off by one block": (_scale_off_by_one, False),
    "RMSNorm epsilon": (_norm_epsilon, False),
    "the indexer's rotary layout": (_rotary_layout, False),
    "stock dispatcher let through": (_stock_dispatcher, True),
}


def _gradients_from_the_last(model: Any, layer: int) -> Undo:
    """Gradients added from the last rank to the first: as good a sum, in another order."""
    del model, layer
    from vime.megatron import gradients

    stock = gradients._sum_in_order
    return swap(gradients, "_sum_in_order", lambda parts_SL: stock(parts_SL.flip(0)))


#: Faults that act on no layer's output.
ELSEWHERE: dict[str, Callable[[Any, int], Undo]] = {"gradients added from the last rank down": _gradients_from_the_last}


def plant(model: Any, name: str, layer: int) -> Undo:
    """Plant a fault into one layer of a model (from 0). Collective where experts are spread over ranks.

    Raises:
        NoSuchFault: an unknown name, or nothing to act on.
    """
    known = {n: does for n, (does, _) in FAULTS.items()} | ELSEWHERE | FAULTS_FP8
    if name not in known:
        raise NoSuchFault(f"there is no fault {name!r}; known: {', '.join(known)}")
    return known[name](unwrap(model), layer)


@contextlib.contextmanager
def stock_dispatchers(model: Any) -> Iterator[None]:
    """Megatron's own dispatchers in every expert layer, for a test of their refusal."""
    layers = [m for m in unwrap(model).modules() if type(m).__name__ == "MoELayer"]
    undo = [swap(m, "token_dispatcher", _alltoall(m)) for m in layers]
    try:
        yield
    finally:
        for one in undo:
            one()
