"""What vime can't align in a Megatron model, by name.

A model is checked each time it runs, since a script may build it after ``vime.enable()``, switch it to train mode or
exchange a layer. A layer class that is not known is refused: what it computes is not known either.
"""
from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from vime import fp8 as shared_fp8
from vime.megatron import fp8, te
from vime.megatron.patch import Refused, expect
from vime.megatron.routes import ROUTES, norm, rope

#: Classes that compute nothing themselves, or only sums that are the same for every row.
_NEUTRAL = {
    "megatron.core.models.gpt.gpt_model.GPTModel",
    "megatron.core.models.common.embeddings.language_model_embedding.LanguageModelEmbedding",
    "megatron.core.transformer.transformer_block.TransformerBlock",
    "megatron.core.transformer.transformer_layer.TransformerLayer",
    "megatron.core.transformer.attention.SelfAttention",
    "vime.megatron.latent.LatentSelfAttention",
    "vime.megatron.latent.SparseCore",
    "vime.megatron.latent.LightningIndexer",
    "vime.megatron.latent.IndexNorm",
    "megatron.core.transformer.identity_op.IdentityOp",
    "megatron.core.transformer.identity_op.IdentityFuncOp",
    "megatron.core.fusions.fused_softmax.FusedScaleMaskSoftmax",
    "torch.nn.modules.dropout.Dropout",
    "torch.nn.modules.container.ModuleList",
    "torch.nn.modules.linear.Identity",
}
_DROPOUT, _LAYER = "torch.nn.modules.dropout.Dropout", "megatron.core.transformer.transformer_layer.TransformerLayer"
_SERVED = {name: route for route in ROUTES.values() for name in route.MODULES}

# Field of TransformerConfig -> values that change nothing.
_FIELDS: dict[str, tuple[Any, ...]] = {
    "tensor_model_parallel_size": (1,), "context_parallel_size": (1,), "sequence_parallel": (False,),
    "fp8": (None, False), "fp4": (None, False), "fp16": (False,), "fp32_residual_connection": (False,),
    "bias_dropout_fusion": (False,), "apply_rope_fusion": (False,), "fused_single_qkv_rope": (False, None),
    "cross_entropy_loss_fusion": (False,), "gradient_accumulation_fusion": (False,),
    "defer_embedding_wgrad_compute": (False,), "multi_latent_attention": (False,),
    "mtp_num_layers": (None, 0), "attention_output_gate": (False,), "use_mup": (False,), "no_rope_freq": (None,),
    "fine_grained_activation_offloading": (False,), "cpu_offloading": (False,), "enable_cuda_graph": (False,),
    "cuda_graph_impl": ("none", None), "layernorm_zero_centered_gamma": (False,), "experimental_attention_variant": (None,),
    "inference_fuse_tp_communication": (False,), "tp_comm_overlap": (False,), "fused_residual_rmsnorm": (False, None),
    "delay_wgrad_compute": (False, None), "batch_invariant_mode": (False,), "mlp_chunks_for_prefill": (1,),
}


# Layers of models that passed; one that runs outside of them was never looked at.
_checked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class Refusal:
    """One thing that can't be aligned: where, and what."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


_names: dict[type, str] = {}


def qualified_name(cls: type) -> str:
    """Module and name of a class, put together once."""
    found = _names.get(cls)
    if found is None:
        found = _names[cls] = f"{cls.__module__}.{cls.__qualname__}"
    return found


def unwrap(model: Any) -> Any:
    """The model inside Megatron's data parallel and precision wrappers."""
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    return model


def refusals(model: Any, enabled: Iterable[str]) -> Iterator[Refusal]:
    """Everything in ``model`` that the enabled operations can't align, in order of the model's modules."""
    enabled = set(enabled)
    if not enabled:
        return
    config = model.config
    for field, neutral in _FIELDS.items():
        value = getattr(config, field, neutral[0])
        if field == "apply_rope_fusion" and "rope" in enabled:
            continue  # the fused kernel is chosen inside a function that is routed
        if value not in neutral:
            yield Refusal(f"TransformerConfig.{field}", f"is {value!r}; aligned is {neutral[0]!r}")
    told = config.hidden_dropout if config.hidden_dropout > 0 and model.training else None
    if told is not None:
        yield Refusal("TransformerConfig.hidden_dropout", f"is {config.hidden_dropout} in train mode; set it to 0.0 or call model.eval()")
    if shared_fp8.FP8 in enabled:
        reason = shared_fp8.problem(enabled, any(type(m).__name__ == "MoELayer" for m in model.modules()))
        if reason is not None:
            yield Refusal("fp8", reason)
        if any(qualified_name(type(m)) in te.SERVED for m in model.modules()):
            yield Refusal("fp8", "block FP8 is not there for TransformerEngine's modules; build the model with --transformer-impl local")
    for name, module in model.named_modules():  # in every forward of a training, so nothing is put into words before it is needed
        kind = qualified_name(type(module))
        if kind in _NEUTRAL:
            p = _dropout(kind, name, module)
            if p > 0 and p != told:
                yield Refusal(f"{name or type(model).__name__} ({type(module).__name__})",
                              f"its dropout is {p} in train mode; set it to 0.0 or call eval() on this module")
            continue
        for reason in _reasons(kind, module, config, enabled):
            yield Refusal(f"{name or type(model).__name__} ({type(module).__name__})", reason)


def _dropout(kind: str, name: str, module: Any) -> float:
    """Probability with which this module itself drops elements now: own mode and value may differ from model's and config's.

    That of a core attention counts as part of the operation ``attention``, which refuses it where it is on.
    """
    if not module.training:
        return 0.0
    if kind == _LAYER:
        return float(getattr(module, "hidden_dropout", 0.0))
    if kind == _DROPOUT and name.rpartition(".")[2] != "attention_dropout":
        return float(module.p)
    return 0.0


def _reasons(kind: str, module: Any, config: Any, enabled: set[str]) -> Iterator[str]:
    route = _SERVED.get(kind)
    if route is not None:
        if route.OP in enabled:
            yield from route.refusals(module, getattr(module, "config", config))
    elif kind in te.SERVED:
        yield from te.refusals(kind, module, getattr(module, "config", config), enabled)
    elif kind not in te.NEUTRAL:
        yield f"vime does not know {kind}; it can't say what it computes{_hint(kind)}"


def _hint(kind: str) -> str:
    if "transformer_engine" not in kind and "TE" not in kind.rpartition(".")[2]:
        return ""
    return (f" (of TransformerEngine {te.version()} it knows {', '.join(sorted(name.rpartition('.')[2] for name in te.SERVED))}; "
            "fused operations and other norms are not aligned: build with get_gpt_layer_with_transformer_engine_spec and its defaults)")


def prepare(model: Any, enabled: Iterable[str]) -> None:
    """Check a model (maybe wrapped) that is about to run, and note what the routes need to know of it.

    Raises:
        Refused: naming every refusal (the first few in full).
    """
    enabled, model = set(enabled), unwrap(model)
    found = list(refusals(model, enabled))
    if found:
        shown = "\n".join(f"  {refusal}" for refusal in found[:8])
        more = f"\n  ... and {len(found) - 8} more" if len(found) > 8 else ""
        raise Refused(f"vime can't align this {type(model).__name__} ({len(found)} reason(s)):\n{shown}{more}\n"
                      "Change the model or its config, or leave the operation out with exclude=... on both sides.")
    fp8.mark(model, shared_fp8.FP8 in enabled)
    for module in model.modules():
        if type(module).__name__ == "TransformerLayer":
            _checked.add(module)
        elif type(module).__name__ == "MoELayer":
            expect("moe")
        elif isinstance(module, torch.nn.RMSNorm):
            norm.adopt(module)
        elif (kind := qualified_name(type(module))) in te.SERVED:
            te.adopt(module, kind)
    if "rope" in enabled:
        parameters = rope.parameters_of(model)
        if parameters is not None:
            rope.declare(model.rotary_pos_emb, parameters)


def require_checked(layer: torch.nn.Module) -> None:
    """Raise :class:`Refused` for a layer that runs in a model whose class the guard does not see (a hybrid, T5 ...)."""
    if layer not in _checked:
        raise Refused("a TransformerLayer ran outside a GPTModel or TransformerBlock, so vime has not checked the model it "
                      "belongs to; check it with vime.enable(model=...), or call vime.disable() for it")
