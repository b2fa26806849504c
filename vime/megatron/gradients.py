"""Gradients whose bits do not show how many ranks share the experts.

Two sums in Megatron depend on the topology. An expert's weight gradient is one product over all rows that reached its
rank, from however many ranks; and gloo's and NCCL's rings add in an order that differs by element. Here the
gradient of an expert is one partial sum per *source rank* (the rank whose tokens they are), rounded as a dense layer's
gradient is, accumulated over micro-batches in fp32; and every sum over ranks runs from rank 0 up, one addition each in
fp32. Then EP 1, 2, 4 and 8 on the same ranks give the same bits.

The cost: expert gradients take as much memory at EP ``N`` as at EP 1 (``N`` partial sums for each of ``1/N`` of the
experts), and nothing is overlapped.
"""
from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from vime import ops
from vime.fp8 import FP8
from vime.megatron import fp8
from vime.megatron.patch import HookPoint, Refused, note

_PARTIALS = "vime_partials"
_EXPERTS = "SequentialMLP"
_BUCKET = 1 << 24  # elements that are reduced at once
_sources: contextvars.ContextVar[tuple[int, ...] | None] = contextvars.ContextVar("vime_sources", default=None)


@contextlib.contextmanager
def rows_from(counts_S: Sequence[int]) -> Iterator[None]:
    """Linear layers called inside get rows that come from these ranks, in rank order."""
    token = _sources.set(tuple(counts_S))
    try:
        yield
    finally:
        _sources.reset(token)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """:func:`vime.ops.linear`, or :func:`vime.ops.linear_fp8` where the weight is marked; inside :func:`rows_from`, with a
    weight gradient that is kept apart by source rank."""
    counts_S = _sources.get()
    if counts_S is None or not (torch.is_grad_enabled() and weight.requires_grad):
        return _forward(x, weight, bias)
    if bias is not None:
        raise Refused("an expert with a bias is not aligned")
    return _SourceLinear.apply(x, weight, counts_S)


def _forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    import vime

    block_N = fp8.blocks_of(weight)
    if block_N is None or not vime.is_fp8():
        return ops.linear(x, weight, bias)
    note(FP8)
    return ops.linear_fp8(x, weight, bias, block_N)


class _SourceLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RK: torch.Tensor, weight_NK: torch.Tensor, counts_S: tuple[int, ...]) -> torch.Tensor:
        ctx.save_for_backward(x_RK)
        ctx.weight, ctx.counts_S = weight_NK, counts_S  # the parameter itself, where its partial sums are kept
        return _forward(x_RK, weight_NK)  # the backward below is the same in FP8: straight through to what was rounded

    @staticmethod
    def backward(ctx: Any, dy_RN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:  # type: ignore[override]
        (x_RK,), weight_NK = ctx.saved_tensors, ctx.weight
        dx_RK = ops.linear(dy_RN, weight_NK.detach().t().contiguous())
        shares = []
        for source, (x, dy) in enumerate(zip(x_RK.split(ctx.counts_S), dy_RN.split(ctx.counts_S), strict=True)):
            if x.shape[0]:
                shares.append((source, ops.linear(dy.t().contiguous(), x.t().contiguous())))
        if not hasattr(weight_NK, "main_grad"):  # no data parallel around the model: an ordinary gradient
            total = torch.zeros_like(weight_NK, dtype=torch.float32)
            for _, share in shares:
                total += share
            return dx_RK, total.to(weight_NK.dtype), None
        partials = _partials(weight_NK, len(ctx.counts_S))
        for source, share in shares:
            partials[source] += share
        return dx_RK, None, None


def _partials(weight: torch.Tensor, sources: int) -> torch.Tensor:
    """fp32 ``[sources, *weight.shape]``, kept on the parameter until the gradients are reduced."""
    found = getattr(weight, _PARTIALS, None)
    if found is None:
        found = torch.zeros(sources, *weight.shape, dtype=torch.float32, device=weight.device)
        setattr(weight, _PARTIALS, found)
    return found


def expert_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Name in ``model`` -> trained parameter of a routed expert, in order."""
    out: dict[str, torch.nn.Parameter] = {}
    for prefix, module in model.named_modules():
        if type(module).__name__ == _EXPERTS:
            out |= {f"{prefix}.{name}": p for name, p in module.named_parameters() if p.requires_grad}
    return out


def drop_partials(model: Any) -> None:
    """Forget partial sums of a step that was not finished."""
    for parameter in expert_parameters(model).values():
        if hasattr(parameter, _PARTIALS):
            delattr(parameter, _PARTIALS)


def _sum_in_order(parts_SL: torch.Tensor) -> torch.Tensor:
    total = parts_SL[0].clone()
    for part in parts_SL[1:]:
        total += part
    return total


def reduce_in_order(parts_SL: torch.Tensor, group: Any) -> torch.Tensor:
    """Sum over the group's ranks from the first up, and within each over its ``S`` parts: fp32 ``[L]``, on every rank.

    Each rank adds one slice of the elements, for all; the slices are gathered after that. So the traffic is that of a
    ring, and the order is that of the ranks.
    """
    size = dist.get_world_size(group) if group is not None else 1
    if size == 1:
        return _sum_in_order(parts_SL)
    parts, length = parts_SL.shape
    width = -(-length // size)
    padded = torch.nn.functional.pad(parts_SL, (0, width * size - length)).view(parts, size, width)
    mine = torch.empty(size, parts, width, dtype=parts_SL.dtype, device=parts_SL.device)
    dist.all_to_all_single(mine, padded.transpose(0, 1).contiguous(), group=group)
    total_W = _sum_in_order(mine.view(size * parts, width))
    whole = torch.empty(size * width, dtype=parts_SL.dtype, device=parts_SL.device)
    dist.all_gather_into_tensor(whole, total_W, group=group)
    return whole[:length]


def _reduce(parameters: Sequence[torch.nn.Parameter], parts: Sequence[torch.Tensor], group: Any, scale: float) -> None:
    """Write ``scale * sum`` into each ``main_grad``; ``parts[i]`` is ``[S, *shape]``. Bucket by bucket."""
    start = 0
    while start < len(parameters):
        end, size = start, 0
        while end < len(parameters) and (end == start or size + parameters[end].numel() <= _BUCKET):
            size += parameters[end].numel()
            end += 1
        flat_SL = torch.cat([p.reshape(p.shape[0], -1).float() for p in parts[start:end]], dim=1)
        total_L, at = reduce_in_order(flat_SL, group), 0
        for parameter in parameters[start:end]:
            n = parameter.numel()
            parameter.main_grad.copy_((total_L[at:at + n] * scale).view(parameter.shape))  # type: ignore[attr-defined]
            at += n
        start = end


def finish(ddp: Any, by_source: bool) -> None:
    """Reduce all gradients of Megatron's data parallel in rank order, into ``main_grad``.

    Args:
        ddp: Megatron's ``DistributedDataParallel``.
        by_source: whether expert gradients were kept apart by source rank (linear layers run through :func:`linear`).

    Raises:
        Refused: settings under which Megatron has started or cut the reduction elsewhere.
    """
    for name in ("overlap_grad_reduce", "use_distributed_optimizer"):
        if getattr(ddp.ddp_config, name, False):
            raise Refused(f"DistributedDataParallelConfig.{name} is on; gradients of a model with experts are reduced in rank "
                          "order, which it would bypass. Switch it off.")
    from megatron.core import parallel_state

    everyone = parallel_state.get_data_parallel_group(with_context_parallel=True)
    scale = 1.0 if ddp.config.calculate_per_token_loss else 1.0 / dist.get_world_size(everyone)
    experts = list(expert_parameters(ddp.module).values())
    known = {id(p) for p in experts}
    dense = [p for p in ddp.module.parameters() if p.requires_grad and id(p) not in known]
    _reduce(dense, [p.main_grad[None] for p in dense], everyone, scale)  # type: ignore[attr-defined]
    sources = parallel_state.get_expert_model_parallel_world_size() if by_source else 1
    parts = [_partials(p, sources) if by_source else p.main_grad[None] for p in experts]  # type: ignore[attr-defined]
    _reduce(experts, parts, parallel_state.get_expert_data_parallel_group(), scale)
    drop_partials(ddp.module)


def _route_finish(stock: Any) -> Any:
    def finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not expert_parameters(self.module):
            return stock(self, *args, **kwargs)
        import vime

        return finish(self, vime.is_enabled("linear"))

    return finish_grad_sync


def _route_zero(stock: Any) -> Any:
    def zero_grad_buffer(self: Any, *args: Any, **kwargs: Any) -> Any:
        drop_partials(self.module)
        return stock(self, *args, **kwargs)

    return zero_grad_buffer


def hook_points() -> list[HookPoint]:
    """Part of the operation ``moe``: a backward through aligned experts needs this reduction."""
    owner = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
    return [HookPoint(owner, "finish_grad_sync", _route_finish), HookPoint(owner, "zero_grad_buffer", _route_zero)]
