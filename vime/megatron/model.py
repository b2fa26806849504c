"""Builds the trainer's GPT from a Hugging Face config and loads it from Hugging Face weights.

Uses Megatron-core's local layer spec, whose every step is a plain module that the hooks can route, or on a GPU the spec of
TransformerEngine (:mod:`vime.megatron.te`), which gives the same bits. Covered: Llama, Qwen2
and Qwen3, dense; Qwen3-MoE; DeepSeek-V3 and GLM-5 with vime's latent attention in place of Megatron's. What the config asks
for and this can't build is refused by name.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from vime import latent as latents
from vime.errors import BadInput
from vime.megatron import experts as moe

COVERED = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "glm_moe_dsa")


class UnsupportedModel(BadInput):
    """The config asks for something that is not covered. The message names the field, what it says, what is covered."""


def rope_parameters(hf_config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """``(base, scaling)`` of a Hugging Face config, in the old form (``rope_theta``) and the new (``rope_parameters``)."""
    found = dict(hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {})
    base = float(found.pop("rope_theta", None) or hf_config.get("rope_theta") or 10000.0)
    kind = found.get("rope_type", found.get("type", "default"))
    return base, None if kind == "default" else found


def head_dim(hf_config: Mapping[str, Any]) -> int:
    """Width of one attention head."""
    return int(hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"])


class WeightsDoNotFit(BadInput, ValueError):
    """Weights that this model cannot take: names, a shape, or values that are not finite. Nothing was written."""


def check_config(hf_config: Mapping[str, Any]) -> None:
    """Raise :class:`UnsupportedModel` for the first field that can't be built."""
    model_type = hf_config.get("model_type")
    if model_type not in COVERED:
        raise UnsupportedModel(f"model_type is {model_type!r}; covered: {', '.join(COVERED)}")
    for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if not isinstance(hf_config.get(field), int):
            raise UnsupportedModel(f"{field} is {hf_config.get(field)!r}; the config of a {model_type} needs an integer there")

    def refuse(field: str, covered: str) -> None:
        raise UnsupportedModel(f"{field} is {hf_config.get(field)!r} in this {model_type} config; covered: {covered}")

    if hf_config.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", "silu")
    if hf_config.get("attention_bias"):
        refuse("attention_bias", "false (Qwen2's bias on query, key and value is built in)")
    if hf_config.get("mlp_bias"):
        refuse("mlp_bias", "false")
    if hf_config.get("use_sliding_window"):
        refuse("use_sliding_window", "false")
    if model_type in latents.LATENT:
        latents.latent(hf_config)
    if (found := latents.experts(hf_config)) is not None and found.kind == "sigmoid" and found.top_k > 1 and not found.normalise:
        refuse("norm_topk_prob", "true (Megatron's sigmoid router always divides by the sum)")
    attention = {"full_attention", "indexed_attention"} if model_type == "glm_moe_dsa" else {"full_attention"}
    if set(hf_config.get("layer_types") or ()) - attention:
        refuse("layer_types", f"{' or '.join(sorted(attention))} in every layer")
    if float(hf_config.get("attention_dropout") or 0.0) != 0.0:
        refuse("attention_dropout", "0.0")
    partial = (hf_config.get("rope_parameters") or {}).get("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor is {partial!r} in this {model_type} config; covered: 1.0")


def transformer_config(hf_config: Mapping[str, Any], dtype: torch.dtype, device: str = "cpu",
                       recompute: bool = False, initialize: bool = True, transformer_impl: str = "local") -> Any:
    """Megatron's ``TransformerConfig`` for a covered config: no fusions, no dropout, TP 1.

    Experts are spread over the expert-parallel ranks of Megatron's parallel state.

    Args:
        hf_config: the parsed ``config.json``.
        dtype: float32 or bfloat16, of parameters and activations.
        recompute: full recompute, layer by layer.
        initialize: draw initial weights; False leaves linear layers and embeddings undefined until they are loaded.
        transformer_impl: ``"local"`` or ``"transformer_engine"``, whose modules the layers are built of.

    Raises:
        UnsupportedModel: see :func:`check_config`, or another dtype.
    """
    check_config(hf_config)
    if dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedModel(f"dtype is {dtype}; covered: torch.float32, torch.bfloat16")
    from megatron.core.transformer.transformer_config import TransformerConfig

    recomputing = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    heads = hf_config["num_attention_heads"]
    mla, experts = latents.latent(hf_config), latents.experts(hf_config)
    return TransformerConfig(
        num_layers=hf_config["num_hidden_layers"],
        hidden_size=hf_config["hidden_size"],
        ffn_hidden_size=hf_config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=heads if mla else hf_config.get("num_key_value_heads") or heads,
        kv_channels=mla.rope if mla else head_dim(hf_config),  # the rotary table is this wide
        normalization="RMSNorm",
        layernorm_epsilon=float(hf_config.get("rms_norm_eps", 1e-6)),
        qk_layernorm=hf_config["model_type"] in ("qwen3", "qwen3_moe"),
        add_qkv_bias=hf_config["model_type"] == "qwen2",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        attention_softmax_in_fp32=True,
        apply_query_key_layer_scaling=False,
        perform_initialization=initialize,
        use_cpu_initialization=torch.device(device).type == "cpu",
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=False,
        persist_layer_norm=False,
        transformer_impl=transformer_impl,
        **(recomputing if recompute else {}),
        **(moe.config_fields(experts) if experts else {}),
    )


def build_model(hf_config: Mapping[str, Any], dtype: torch.dtype, device: str = "cpu", recompute: bool = False,
                initialize: bool = True, kv_cache_dtype: str = "auto", freeze_indexer: bool = True,
                transformer_impl: str = "local") -> Any:
    """A ``GPTModel`` in train mode, whose logits come as ``[1, T, vocab]``.

    ``vime.megatron.parallel.initialize`` must have run. Further arguments and errors as of :func:`transformer_config`.

    Args:
        kv_cache_dtype: ``"fp8_e4m3"`` rounds the rows of latent attention as the engine's FP8 cache does.
        freeze_indexer: the indexer of sparse attention gets no gradient; there is no other way yet.

    Raises:
        vime.latent.UnsupportedLatent: ``freeze_indexer`` is false for a model with an indexer.
        vime.megatron.experts.ExpertsDoNotDivide: the expert-parallel ranks don't divide the experts.
    """
    check_config(hf_config)
    check_settings(hf_config, kv_cache_dtype, freeze_indexer)
    if torch.device(device).type == "cpu":
        from vime.megatron import cpu

        cpu.apply()
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        moe.check_spread(hf_config, parallel_state.get_expert_model_parallel_world_size())
    if transformer_impl != "local":
        _check_transformer_impl(hf_config, transformer_impl, device)
    config = transformer_config(hf_config, dtype, device, recompute, initialize, transformer_impl)
    from megatron.core.models.gpt import GPTModel

    import vime
    from vime.megatron.routes.rope import RopeParameters, declare

    base, scaling = rope_parameters(hf_config)
    model = GPTModel(
        config=config,
        transformer_layer_spec=_layers(hf_config, config, kv_cache_dtype == "fp8_e4m3", transformer_impl),
        vocab_size=hf_config["vocab_size"],
        max_sequence_length=int(hf_config.get("max_position_embeddings") or 2048),
        parallel_output=False,
        share_embeddings_and_output_weights=bool(hf_config.get("tie_word_embeddings", False)),
        position_embedding_type="rope",
        rotary_base=base,
    )
    # torch's norm modules know nothing of params_dtype, so they come out in fp32.
    model.to(device=device, dtype=dtype)
    for module in model.modules():
        if getattr(module, "expert_bias", None) is not None:  # decides ties of the choice, so it is fp32 whatever the model is
            module.expert_bias = module.expert_bias.float()
    if vime.is_enabled("moe"):
        moe.use_slot_order(model)
    declare(model.rotary_pos_emb, RopeParameters(dim=config.kv_channels, base=base, scaling=scaling))
    return model


def check_settings(hf_config: Mapping[str, Any], kv_cache_dtype: str, freeze_indexer: bool) -> None:
    """Raise :class:`UnsupportedModel` or :class:`vime.latent.UnsupportedLatent` for a setting that no model of this config has."""
    if kv_cache_dtype != "auto" and hf_config["model_type"] not in latents.LATENT:
        raise UnsupportedModel(f"kv_cache_dtype is {kv_cache_dtype!r} for a {hf_config['model_type']} model; the FP8 cache is that of "
                               f"latent attention ({', '.join(latents.LATENT)}); covered here: auto")
    latents.require_frozen(hf_config, freeze_indexer)


def check_layers(hf_config: Mapping[str, Any], transformer_impl: str, device: str) -> None:
    """Raise :class:`UnsupportedModel` unless TransformerEngine has modules for this config and device. Imports nothing of it."""
    if transformer_impl != "transformer_engine":
        raise UnsupportedModel(f"transformer_impl is {transformer_impl!r}; covered: local, transformer_engine")
    if torch.device(device).type == "cpu":
        raise UnsupportedModel("transformer_impl is 'transformer_engine' with --device cpu; TransformerEngine's modules need a GPU: use "
                               "--transformer-impl local, which gives the same bits")
    if hf_config["model_type"] in latents.LATENT:
        raise UnsupportedModel(f"transformer_impl is 'transformer_engine' for a {hf_config['model_type']} model; latent attention is a "
                               "module of vime's, built of local layers: use --transformer-impl local")


def _check_transformer_impl(hf_config: Mapping[str, Any], transformer_impl: str, device: str) -> None:
    """Raise :class:`UnsupportedModel` unless TransformerEngine's modules can be built for this config, here."""
    from vime.megatron import te

    check_layers(hf_config, transformer_impl, device)
    if not te.present():
        raise UnsupportedModel(f"transformer_impl is 'transformer_engine', and the installed Megatron-core finds no TransformerEngine; "
                               f"install transformer-engine {te.COVERED}, or use --transformer-impl local, which gives the same bits")


def _engine_layers(hf_config: Mapping[str, Any], config: Any) -> Any:
    """Megatron's spec of every layer of TransformerEngine's modules."""
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    experts = latents.experts(hf_config)
    specs = [get_gpt_layer_with_transformer_engine_spec(num_experts=experts.count if experts and experts.sparse[i] else None,
                                                        moe_grouped_gemm=True, qk_layernorm=config.qk_layernorm)
             for i in range(config.num_layers)]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=TENorm)


def _layers(hf_config: Mapping[str, Any], config: Any, fp8_cache: bool, transformer_impl: str) -> Any:
    """The spec of every layer; with latent attention, vime's module in the place of self-attention."""
    if transformer_impl != "local":
        return _engine_layers(hf_config, config)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    mla, experts = latents.latent(hf_config), latents.experts(hf_config)
    specs = []
    for i in range(config.num_layers):
        spec = get_gpt_layer_local_spec(num_experts=experts.count if experts and experts.sparse[i] else None,
                                        qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
        if mla is not None:
            from vime.megatron.latent import LatentSelfAttention

            spec.submodules.self_attention = ModuleSpec(module=LatentSelfAttention, params={"latent": mla, "fp8_cache": fp8_cache})
        specs.append(spec)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=WrappedTorchNorm)


def load_weights(model: Any, hf_state: Mapping[str, torch.Tensor], hf_config: Mapping[str, Any]) -> None:
    """Copy Hugging Face weights into a model of :func:`build_model`, in the model's dtype; of the experts, those of this rank.
    Tensors that are no part of the policy are left out (:mod:`vime.weights.policy`).

    Everything is checked before the first parameter is written. One tensor is in memory at a time beside the model: each is
    converted for the check, and again to be written.

    Raises:
        WeightsDoNotFit: parameters that get no weight, weights without a parameter, a shape that does not fit, or a
            weight that is not finite. Each is named.
    """
    from vime.weights.convert import AsMegatron
    from vime.weights.families import family_for
    from vime.weights.policy import left_out

    experts, rank, local = latents.experts(hf_config), 0, 1
    if experts is not None:
        from megatron.core import parallel_state

        rank = parallel_state.get_expert_model_parallel_rank()
        local = experts.count // parallel_state.get_expert_model_parallel_world_size()
    names = hf_state.keys() - left_out(hf_config, hf_state.keys()).keys()
    plan = family_for(dict(hf_config)).plan(dict(hf_config), hf_names=names)
    mine = {name: unit for unit in plan.units if (name := moe.local_name(unit.name, rank, local)) is not None}
    load_megatron_weights(model, AsMegatron(mine, hf_state))


def load_megatron_weights(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """As :func:`load_weights`, from a mapping by the local spec's names of this rank's parameters and buffers (TP 1)."""
    from vime.weights.megatron_state import canonical, named_weights

    parameters = {canonical(name): tensor for name, tensor in named_weights(model)}
    missing, surplus = sorted(parameters.keys() - weights.keys()), sorted(weights.keys() - parameters.keys())
    if missing or surplus:
        raise WeightsDoNotFit(f"the weights do not fit this model: no weight for {missing or 'nothing'}; "
                              f"no parameter for {surplus or 'nothing'}")
    for name, parameter in parameters.items():
        weight = weights[name]
        if weight.shape != parameter.shape:
            raise WeightsDoNotFit(f"{name} has shape {tuple(weight.shape)}, the model expects {tuple(parameter.shape)}")
        # one NaN or infinity makes the sum one; the sum of finite weights may only overflow, so look again then
        if not torch.isfinite(weight.sum()) and not torch.isfinite(weight).all():
            raise WeightsDoNotFit(f"{name} holds values that are not finite; the checkpoint is damaged")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
