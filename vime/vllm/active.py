"""What is really in use in a built engine: every layer checked, and the contract read off from it.

vLLM only logs a plugin that fails, silently keeps a stock class where a name changed, and has models that bring layers of
their own. So the engine walks the built model once at start and refuses to run if one module would evaluate anything but
the aligned operation, and the contract is built from parameters and cache as they are, never from flags.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vime import ops
from vime.contract import OPS, Contract
from vime.errors import VimeError
from vime.fp8 import summary
from vime.vllm import plugin


class NotAligned(VimeError):
    """The engine does not evaluate what it was asked to. The message names each place."""


def assert_active(model: torch.nn.Module, wanted: tuple[str, ...], runner: Any = None) -> dict[str, int]:
    """Check that every module of ``model`` goes through ``vime.ops`` for the operations ``wanted``.

    Args:
        model: the built vLLM model.
        wanted: operations that must be aligned; the others are not looked at.
        runner: the model runner, for ``logprob`` and ``sampling``.

    Returns:
        operation -> number of places checked (``moe``: 0 in a dense model; ``activation``: 0 with stock experts only).

    Raises:
        NotAligned: names every module (or function) that is not aligned, or an operation that has no place at all.
    """
    places: dict[str, int] = dict.fromkeys(wanted, 0)
    optional = {"moe"} | ({"activation"} if has_experts(model) else set())  # stock experts have an activation of their own
    bad: list[str] = []
    for op, name, problem in _places(model, runner):
        if op == "unknown":
            if problem is not None:
                bad.append(f"{name}: {problem}")
        elif op in places:
            places[op] += 1
            if problem is not None:
                bad.append(f"{op}: {name}: {problem}")
    bad += [f"{op}: nothing in {type(model).__name__} evaluates it" for op, n in places.items() if n == 0 and op not in optional]
    if bad:
        more = f"\n  ... and {len(bad) - 12} more" if len(bad) > 12 else ""
        raise NotAligned(f"{len(bad)} place(s) of {type(model).__name__} are not aligned:\n  " + "\n  ".join(bad[:12]) + more
                         + "\nSwitch the operation off on both sides, or use a covered architecture (Llama, Qwen2, Qwen3, Qwen3-MoE, "
                         "DeepSeek-V3, GLM-5).")
    return places


def _places(model: torch.nn.Module, runner: Any) -> Iterator[tuple[str, str, str | None]]:
    """(operation, place, problem or None) for everything that computes in ``model``."""
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    from vime.vllm import fp8, linear
    from vime.vllm.attention import VimeAttentionImpl
    from vime.vllm.layers import ACTIVATIONS, NORMS, ROPES

    def method(module: Any, attribute: str, ours: Any) -> str | None:
        kind = type(module.quant_method)
        return None if getattr(kind, attribute, None) is ours else f"{kind.__name__}.{attribute} is not vime's"

    latent, experts = plugin.optional("latent"), plugin.optional("experts")
    model_dtype = next(model.parameters()).dtype
    for name, module in model.named_modules():
        kind = type(module)
        if isinstance(module, LinearBase):
            yield "linear", name, method(module, "apply", linear.apply_linear) or _live(module) or fp8.problem(name, module)
        elif isinstance(module, VocabParallelEmbedding):
            if not isinstance(module, ParallelLMHead):
                yield "embedding", name, method(module, "embedding", linear.embed)
            if isinstance(module, ParallelLMHead) or _is_tied(model, module):
                yield "linear", name, method(module, "apply", linear.apply_linear) or _live(module)
        elif isinstance(module, Attention):
            impl = type(module.impl)
            yield "attention", name, None if impl is VimeAttentionImpl else f"{impl.__name__} is in use"
        elif _is(kind, "MultiHeadLatentAttentionWrapper", "MLAAttention"):
            yield "attention", name, None if latent and kind is latent.VimeLatentAttention else f"stock {kind.__name__}"
        elif _is(kind, "MoERunner"):
            problem = experts.problem(module) or fp8.problem(name, module) if experts else f"stock {kind.__name__}"
            yield "moe", name, problem
            if problem is None:
                yield "activation", name, None  # an aligned expert evaluates it without a module
        elif _is(kind, "RoutedExperts", "FusedMoEMethodBase"):
            continue  # evaluated by the runner above
        elif kind.__name__ in ("LayerNorm", "VimeLayerNorm"):
            yield "norm", name, None if latent and kind is latent.VimeLayerNorm else f"stock {kind.__name__}"
        elif isinstance(module, LogitsProcessor):
            if module.head_dtype not in (None, model_dtype):
                yield "linear", name, f"the LM head is evaluated in {module.head_dtype}, the model in {model_dtype}"
            if module.soft_cap is not None or module.scale != 1.0:
                yield "linear", name, f"logits with soft_cap {module.soft_cap}, scale {module.scale}"
        elif kind.__name__ in ACTIVATIONS or kind in ACTIVATIONS.values():
            yield "activation", name, None if kind in ACTIVATIONS.values() else f"stock {kind.__name__}"
        elif kind.__name__ in NORMS or kind in NORMS.values():
            yield "norm", name, None if kind in NORMS.values() else f"stock {kind.__name__}"
        elif isinstance(module, RotaryEmbedding):
            yield "rope", name, None if kind in ROPES.values() else f"{kind.__name__} is not covered"
        elif _helper(kind.__name__):
            continue
        elif isinstance(module, CustomOp) or any(True for _ in module.parameters(recurse=False)):
            yield "unknown", name, f"{kind.__name__} is a layer that vime does not know"
    if runner is not None:
        from vime.vllm import sampler

        problem = None if getattr(type(runner)._sample, "__func__", type(runner)._sample) is sampler.sample \
            else f"{type(runner).__module__}.{type(runner).__name__}._sample is not vime's"
        yield "sampling", "model runner", problem
        yield "logprob", "model runner", problem


def _is(kind: type, *names: str) -> bool:
    """Whether a class or one of its bases has one of these names: not every release of vLLM has all of them to import."""
    return any(cls.__name__ in names for cls in kind.__mro__)


def _helper(name: str) -> bool:
    """Custom ops that the covered layers own and that an aligned ``forward`` never calls."""
    return name in ("ApplyRotaryEmb", "QuantFP8")


def _live(module: Any) -> str | None:
    weight = getattr(module, "weight", None)
    return None if weight is not None and weight.numel() else "its weight was packed away; a changed weight would not be seen"


def _is_tied(model: torch.nn.Module, embedding: torch.nn.Module) -> bool:
    head = getattr(model, "lm_head", None)
    return head is embedding


def has_experts(model: torch.nn.Module) -> bool:
    """Whether vLLM built an expert layer, whoever evaluates it."""
    return any(_is(type(m), "MoERunner") for m in model.modules())


def build_contract(model: torch.nn.Module, wanted: tuple[str, ...], kv_caches: list[torch.Tensor]) -> Contract:
    """The contract in effect, from parameters, cache tensors and registry.

    Raises:
        NotAligned: parameters of more than one dtype where one is expected, or no KV cache.
    """
    from vime.vllm import fp8

    # A stock linear on the CPU keeps its bias in fp32; what is inside a stock operation is no part of the contract. The
    # expert bias is fp32 on both sides whatever the model is.
    dtypes = {p.dtype for name, p in model.named_parameters()
              if ("linear" in wanted or not name.endswith(".bias")) and not name.endswith("e_score_correction_bias")}
    if len(dtypes) != 1:
        raise NotAligned(f"parameters of several dtypes ({', '.join(sorted(map(str, dtypes)))}); a contract needs one model dtype")
    (dtype,) = dtypes
    device = next(model.parameters()).device
    caches = {c.dtype for c in kv_caches if c.numel()}
    if len(caches) != 1:
        raise NotAligned(f"expected KV caches of one dtype, found {sorted(map(str, caches))}")
    head = getattr(model, "lm_head", None)
    head_dtype = dtype if head is None or getattr(head, "weight", None) is None else head.weight.dtype
    ids = ops.registry.contract_ids(OPS, wanted, device, dtype, experts=has_experts(model))
    in_fp8 = fp8.layers(model)
    params = ops.params(ops.contract_id(device), summary(in_fp8)) if in_fp8 else ops.params()
    params |= _proven(model, wanted, device, dtype)
    return Contract(dtype=_name(dtype), ops=ids, params=params, lm_head_dtype=_relative(head_dtype, dtype),
                    router_dtype=_router_dtype(model, dtype) if has_experts(model) and "moe" not in wanted else "float32",
                    kv_cache_dtype=_kv_cache_dtype(model, caches.pop(), dtype))


def _proven(model: torch.nn.Module, wanted: tuple[str, ...], device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """What the shapes of this model run by on a GPU, proven now where they are not yet."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    layers: set[Any] = set()
    apart: set[Any] = set()
    attention: set[tuple[int, int, int]] = set()
    for module in model.modules():
        if isinstance(module, Attention) and "attention" in wanted:
            attention.add((module.impl.num_heads, module.impl.num_kv_heads, module.impl.head_size))
        if "linear" not in wanted or getattr(module, "weight", None) is None:
            continue
        if isinstance(module, LinearBase):
            layers.add(tuple(module.weight.shape))
        elif isinstance(module, ParallelLMHead) or (isinstance(module, VocabParallelEmbedding) and _is_tied(model, module)):
            apart.add(tuple(module.weight.shape))
    if has_experts(model) or any(_is(type(m), "MultiHeadLatentAttentionWrapper", "MLAAttention") for m in model.modules()):
        layers, apart = set(), {shape for shape in layers | apart if len(shape) == 2}  # the trainer has other layers there
    return ops.proven(device, dtype, layers, apart, attention, training=False)


def _router_dtype(model: torch.nn.Module, dtype: torch.dtype) -> str:
    """Of a stock router: what its gate puts out."""
    gates = [m for m in model.modules() if type(m).__name__ == "GateLinear"]
    return _name(getattr(gates[0], "out_dtype", None) or dtype) if gates else _name(dtype)


def _kv_cache_dtype(model: torch.nn.Module, cache: torch.dtype, dtype: torch.dtype) -> str:
    """Cells of latent attention are bytes where their compressed part is E4M3."""
    formats: set[Any] = {m.format for m in model.modules() if _is(type(m), "VimeLatentAttention")}
    if cache == torch.uint8 and formats and all(f.fp8 for f in formats):
        return "fp8_e4m3"
    return _relative(cache, dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _relative(dtype: torch.dtype, model_dtype: torch.dtype) -> str:
    """``"model"`` is what both sides write where a dtype is the model's own."""
    return "model" if dtype == model_dtype else _name(dtype)
