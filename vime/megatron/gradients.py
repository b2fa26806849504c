"""Gradients whose bits do not show how many ranks share the experts.

Two sums in Megatron depend on the topology. An expert's weight gradient is one product over all rows that reached its
rank, from however many ranks; and gloo's and NCCL's rings add in an order that differs by element. Here the
gradient of an expert is one partial sum per *source rank* (the rank whose tokens they are), rounded as a dense layer's
gradient is, accumulated over microbatches in the dtype of ``main_grad``; and every sum over ranks runs from rank 0 up, one
addition each in fp32, rounded once to the dtype of ``main_grad``. Then EP 1, 2, 4 and 8 on the same ranks give the same bits.

The cost: expert gradients take as much memory at EP ``N`` as at EP 1 (``N`` partial sums for each of ``1/N`` of the
experts), and nothing is overlapped. A step of one microbatch whose experts are spread over all ranks (:func:`one_microbatch`)
adds the sources up in the backward of each layer and keeps none of them: the same additions, in the memory of one gradient.
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
_AT_ONCE = "vime_at_once"  # on a parameter: the factor of its gradient, which is finished in the one backward of the step
_DONE = "vime_done"
_EXPERTS = ("SequentialMLP", "TEGroupedMLP")
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
    if counts_S is not None and bias is not None:
        raise Refused("an expert with a bias is not aligned")
    if counts_S is None or not (torch.is_grad_enabled() and weight.requires_grad):
        return _forward(x, weight, bias)
    return _SourceLinear.apply(x, weight, counts_S)


def _forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    import vime

    block_N = fp8.blocks_of(weight)
    if block_N is None or not vime.is_fp8():
        return ops.linear(x, weight, bias) if _sources.get() is None else ops.expert_linear(x, weight)
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
        shares = _shares(x_RK, dy_RN, ctx.counts_S)
        if not hasattr(weight_NK, "main_grad"):  # no data parallel around the model: an ordinary gradient
            return dx_RK, _total(weight_NK, shares).to(weight_NK.dtype), None
        scale = getattr(weight_NK, _AT_ONCE, None)
        if scale is not None:
            if getattr(weight_NK, _DONE, False):
                raise RuntimeError("a second backward in a step that was said to have one microbatch")
            setattr(weight_NK, _DONE, True)
            weight_NK.main_grad.copy_(_total(weight_NK, shares).mul_(scale))
            return dx_RK, None, None
        sums = _sums(weight_NK, len(ctx.counts_S))
        for source, share in shares:
            sums[source] += share
        return dx_RK, None, None


def _shares(x_RK: torch.Tensor, dy_RN: torch.Tensor, counts_S: tuple[int, ...]) -> Iterator[tuple[int, torch.Tensor]]:
    """Source rank and its part of the weight gradient, by rising source, where there are rows of it."""
    for source, (x, dy) in enumerate(zip(x_RK.split(counts_S), dy_RN.split(counts_S), strict=True)):
        if x.shape[0]:
            yield source, ops.weight_gradient(dy, x)


def _total(weight: torch.Tensor, shares: Iterator[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Their sum in fp32, in order. Starts at +0, as the partial sums do, so that a -0 comes out the same."""
    total = torch.zeros_like(weight, dtype=torch.float32)
    for _, share in shares:
        total += share
    return total


def _sums(weight: Any, sources: int) -> list[torch.Tensor]:
    """The partial sum of each source: the first is ``main_grad``, the others are kept on the parameter until it is reduced."""
    if sources > 1 and getattr(weight, _PARTIALS, None) is None:
        setattr(weight, _PARTIALS, torch.zeros(sources - 1, *weight.shape, dtype=weight.main_grad.dtype, device=weight.device))
    return [weight.main_grad, *(getattr(weight, _PARTIALS) if sources > 1 else ())]


def expert_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Name in ``model`` -> trained parameter of a routed expert, in order."""
    out: dict[str, torch.nn.Parameter] = {}
    for prefix, module in model.named_modules():
        if type(module).__name__ in _EXPERTS:
            out |= {f"{prefix}.{name}": p for name, p in module.named_parameters() if p.requires_grad}
    return out


def drop_partials(model: Any) -> None:
    """Forget partial sums of a step that was not finished, and that it had one microbatch."""
    for parameter in expert_parameters(model).values():
        for name in (_PARTIALS, _AT_ONCE, _DONE):
            if hasattr(parameter, name):
                delattr(parameter, name)


def one_microbatch(ddp: Any) -> None:
    """Say that the step which begins has one backward on every rank. Changes no bit.

    Expert gradients are then finished in that backward, without partial sums, if every source's rows come to one rank;
    where several sets of ranks hold an expert, its partial sums are kept as ever.
    """
    from megatron.core import parallel_state

    import vime

    if not vime.is_enabled("linear") or dist.get_world_size(parallel_state.get_expert_data_parallel_group()) > 1:
        return
    for parameter in expert_parameters(ddp.module).values():
        setattr(parameter, _AT_ONCE, _scale(ddp))


def _scale(ddp: Any) -> float:
    from megatron.core import parallel_state

    everyone = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return 1.0 if ddp.config.calculate_per_token_loss else 1.0 / dist.get_world_size(everyone)


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


def _reduce(parameters: Sequence[Any], sums: Sequence[list[torch.Tensor]], group: Any, scale: float) -> None:
    """Write ``scale * sum`` into each ``main_grad``; ``sums[i]`` are the partial sums of a parameter. Bucket by bucket."""
    bucket: list[tuple[int, int, int]] = []  # parameter, first and last element
    room = _BUCKET
    for number, parameter in enumerate(parameters):
        start, size = 0, parameter.numel()
        while start < size:  # a vocabulary is reduced in parts: what is held besides stays small
            stop = min(size, start + room)
            bucket.append((number, start, stop))
            room -= stop - start
            start = stop
            if not room:
                _reduce_bucket(parameters, sums, bucket, group, scale)
                bucket, room = [], _BUCKET
    if bucket:
        _reduce_bucket(parameters, sums, bucket, group, scale)


def _reduce_bucket(parameters: Sequence[Any], sums: Sequence[list[torch.Tensor]], bucket: list[tuple[int, int, int]], group: Any,
                   scale: float) -> None:
    parts_SL = torch.cat([torch.stack([part.reshape(-1)[start:stop].float() for part in sums[i]]) for i, start, stop in bucket], dim=1)
    total_L, at = reduce_in_order(parts_SL, group).mul_(scale), 0
    for i, start, stop in bucket:
        parameters[i].main_grad.view(-1)[start:stop].copy_(total_L[at:at + stop - start])  # rounded here, if to bf16
        at += stop - start


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

    everyone, scale = parallel_state.get_data_parallel_group(with_context_parallel=True), _scale(ddp)
    experts = list(expert_parameters(ddp.module).values())
    known = {id(p) for p in experts}
    dense = [p for p in ddp.module.parameters() if p.requires_grad and id(p) not in known]
    _reduce(dense, [[p.main_grad] for p in dense], everyone, scale)  # type: ignore[attr-defined]
    sources = parallel_state.get_expert_model_parallel_world_size() if by_source else 1
    kept = [p for p in experts if not (by_source and hasattr(p, _AT_ONCE))]
    _reduce(kept, [_sums(p, sources) for p in kept], parallel_state.get_expert_data_parallel_group(), scale)
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
