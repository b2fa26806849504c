"""Builds the trainer's GPT from a Hugging Face config and loads it from Hugging Face weights.

Uses Megatron-core's local layer spec, whose every step is a plain module that the hooks can route. Covered: Llama,
Qwen2 and Qwen3, dense. What the config asks for and this can't build is refused by name.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from vime.errors import BadInput

COVERED = ("llama", "qwen2", "qwen3")


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
        raise UnsupportedModel(f"model_type is {model_type!r}; covered: {', '.join(COVERED)} (dense)")
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
    if any(kind != "full_attention" for kind in hf_config.get("layer_types") or ()):
        refuse("layer_types", "full_attention in every layer")
    if float(hf_config.get("attention_dropout") or 0.0) != 0.0:
        refuse("attention_dropout", "0.0")
    partial = (hf_config.get("rope_parameters") or {}).get("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor is {partial!r} in this {model_type} config; covered: 1.0")


def transformer_config(hf_config: Mapping[str, Any], dtype: torch.dtype, device: str = "cpu",
                       recompute: bool = False, initialize: bool = True) -> Any:
    """Megatron's ``TransformerConfig`` for a covered config: no fusions, no dropout, TP 1.

    Args:
        hf_config: the parsed ``config.json``.
        dtype: float32 or bfloat16, of parameters and activations.
        recompute: full recompute, layer by layer.
        initialize: draw initial weights; False leaves linear layers and embeddings undefined until they are loaded.

    Raises:
        UnsupportedModel: see :func:`check_config`, or another dtype.
    """
    check_config(hf_config)
    if dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedModel(f"dtype is {dtype}; covered: torch.float32, torch.bfloat16")
    from megatron.core.transformer.transformer_config import TransformerConfig

    recomputing = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    heads = hf_config["num_attention_heads"]
    return TransformerConfig(
        num_layers=hf_config["num_hidden_layers"],
        hidden_size=hf_config["hidden_size"],
        ffn_hidden_size=hf_config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=hf_config.get("num_key_value_heads") or heads,
        kv_channels=head_dim(hf_config),
        normalization="RMSNorm",
        layernorm_epsilon=float(hf_config.get("rms_norm_eps", 1e-6)),
        qk_layernorm=hf_config["model_type"] == "qwen3",
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
        transformer_impl="local",
        **(recomputing if recompute else {}),
    )


def build_model(hf_config: Mapping[str, Any], dtype: torch.dtype, device: str = "cpu", recompute: bool = False,
                initialize: bool = True) -> Any:
    """A ``GPTModel`` in train mode, whose logits come as ``[1, T, vocab]``.

    ``vime.megatron.parallel.initialize`` must have run. Arguments and errors as of :func:`transformer_config`.
    """
    if torch.device(device).type == "cpu":
        from vime.megatron import cpu

        cpu.apply()
    config = transformer_config(hf_config, dtype, device, recompute, initialize)
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from vime.megatron.routes.rope import RopeParameters, declare

    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    base, scaling = rope_parameters(hf_config)
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[layer] * config.num_layers, layer_norm=WrappedTorchNorm),
        vocab_size=hf_config["vocab_size"],
        max_sequence_length=int(hf_config.get("max_position_embeddings") or 2048),
        parallel_output=False,
        share_embeddings_and_output_weights=bool(hf_config.get("tie_word_embeddings", False)),
        position_embedding_type="rope",
        rotary_base=base,
    )
    # torch's norm modules know nothing of params_dtype, so they come out in fp32.
    model.to(device=device, dtype=dtype)
    declare(model.rotary_pos_emb, RopeParameters(dim=config.kv_channels, base=base, scaling=scaling))
    return model


def load_weights(model: Any, hf_state: Mapping[str, torch.Tensor], hf_config: Mapping[str, Any]) -> None:
    """Copy Hugging Face weights into a model of :func:`build_model`, in the model's dtype.

    Everything is checked before the first parameter is written.

    Raises:
        WeightsDoNotFit: parameters that get no weight, weights without a parameter, a shape that does not fit, or a
            weight that is not finite. Each is named.
    """
    from vime.weights.families import family_for

    load_megatron_weights(model, family_for(dict(hf_config)).hf_to_megatron(hf_state, dict(hf_config)))


def load_megatron_weights(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """As :func:`load_weights`, from a mapping by Megatron's own parameter names (full TP 1 tensors)."""
    parameters = dict(model.named_parameters())
    missing, surplus = sorted(parameters.keys() - weights.keys()), sorted(weights.keys() - parameters.keys())
    if missing or surplus:
        raise WeightsDoNotFit(f"the weights do not fit this model: no weight for {missing or 'nothing'}; "
                              f"no parameter for {surplus or 'nothing'}")
    for name, parameter in parameters.items():
        if weights[name].shape != parameter.shape:
            raise WeightsDoNotFit(f"{name} has shape {tuple(weights[name].shape)}, the model expects {tuple(parameter.shape)}")
        # one NaN or infinity makes the sum one; the sum of finite weights may only overflow, so look again then
        if not torch.isfinite(weights[name].sum()) and not torch.isfinite(weights[name]).all():
            raise WeightsDoNotFit(f"{name} holds values that are not finite; the checkpoint is damaged")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
