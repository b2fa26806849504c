"""Builds tiny models with megatron-core itself and lets it name, save and load their weights, as the truth for ours.

Run as a script, in a process of its own: the answers that Megatron needs on a CPU are process-wide, and the caller
chooses the version by PYTHONPATH. ``python -m tests.weights.megatron_models names|save|load CONFIG_JSON [FOLDERS]``.
"""
from __future__ import annotations

import json
import os
import sys

import torch
import torch.nn.functional as F


def transformer_config(cfg: dict, moe: bool, mla: bool, **extra):
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    heads = cfg["num_attention_heads"]
    fields = dict(
        num_layers=cfg["num_hidden_layers"], hidden_size=cfg["hidden_size"], ffn_hidden_size=cfg["intermediate_size"],
        num_attention_heads=heads, num_query_groups=cfg.get("num_key_value_heads") or heads, normalization="RMSNorm",
        qk_layernorm=cfg["model_type"] == "qwen3" or mla or cfg["model_type"] == "qwen3_moe" or bool(cfg.get("use_qk_norm")),
        add_qkv_bias=cfg["model_type"] == "qwen2" or bool(cfg.get("attention_bias") and cfg["model_type"] == "glm4_moe"),
        add_bias_linear=bool(cfg.get("mlp_bias")), gated_linear_unit=True, activation_func=F.silu,
        layernorm_epsilon=cfg.get("rms_norm_eps", 1e-6), use_cpu_initialization=True, bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        apply_rope_fusion=False, gradient_accumulation_fusion=False, persist_layer_norm=False, transformer_impl="local")
    if moe:
        experts = cfg.get("n_routed_experts") or cfg.get("num_experts") or cfg.get("num_local_experts")
        dense = cfg.get("first_k_dense_replace", 0)
        fields |= dict(num_moe_experts=experts, moe_ffn_hidden_size=cfg["moe_intermediate_size"], moe_router_topk=2,
                       moe_layer_freq=[int(i >= dense) for i in range(cfg["num_hidden_layers"])], moe_grouped_gemm=False,
                       moe_token_dispatcher_type="alltoall")
        if cfg["model_type"] != "qwen3_moe":
            fields |= dict(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid",
                           moe_shared_expert_intermediate_size=cfg["moe_intermediate_size"] * cfg.get("n_shared_experts", 1))
    if cfg.get("mtp_layers_in_files"):  # num_nextn_predict_layers is 1 in configs whose files hold none, too
        fields |= dict(mtp_num_layers=cfg["mtp_layers_in_files"])
    if mla:
        fields |= dict(q_lora_rank=cfg["q_lora_rank"], kv_lora_rank=cfg["kv_lora_rank"], qk_head_dim=cfg["qk_nope_head_dim"],
                       qk_pos_emb_head_dim=cfg["qk_rope_head_dim"], v_head_dim=cfg["v_head_dim"], multi_latent_attention=True)
        fields.pop("num_query_groups")
    else:
        fields["kv_channels"] = cfg.get("head_dim") or cfg["hidden_size"] // heads
    return (MLATransformerConfig if mla else TransformerConfig)(**fields, **extra)


def build(cfg: dict, sizes: dict | None = None):
    """A GPTModel for an HF config: dense, MoE, MLA, and (0.19) MLA with the DSA indexer; this rank's part of it, where
    ``sizes`` (tp, pp, ep) are given and the process groups exist."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    class Attention(DotProductAttention):  # the local one takes neither of these, which MLA passes
        def __init__(self, *args, k_channels=None, v_channels=None, **kwargs):
            kwargs.pop("cp_comm_type", None)
            super().__init__(*args, **kwargs)

    kind = cfg["model_type"]
    mla, moe = kind in ("deepseek_v3", "glm_moe_dsa"), "moe" in kind or kind == "deepseek_v3"
    extra: dict = {}
    stage = {"pre_process": True, "post_process": True}
    if sizes:
        from megatron.core import parallel_state

        extra = dict(tensor_model_parallel_size=sizes["tp"], pipeline_model_parallel_size=sizes["pp"],
                     expert_model_parallel_size=sizes["ep"], expert_tensor_parallel_size=1, pipeline_dtype=torch.float32)
        stage = {"pre_process": parallel_state.is_pipeline_first_stage(), "post_process": parallel_state.is_pipeline_last_stage()}
    plain = transformer_config(cfg, moe, mla, **extra)
    if kind == "glm_moe_dsa":
        extra |= dict(experimental_attention_variant="dsa", dsa_indexer_n_heads=cfg["index_n_heads"],
                      dsa_indexer_head_dim=cfg["index_head_dim"], dsa_indexer_topk=cfg["index_topk"])
    if mla and not isinstance(multi_latent_attention.TELinear, type):  # 0.16 asks isinstance() of it
        multi_latent_attention.TELinear = type("TELinear", (), {})
    config = transformer_config(cfg, moe, mla, **extra)
    if moe:
        block = get_gpt_decoder_block_spec(plain, use_transformer_engine=False, normalization="RMSNorm")
    else:
        layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
        layers = config.num_layers // (sizes["pp"] if sizes else 1)
        block = TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=WrappedTorchNorm)
    if kind == "glm_moe_dsa":
        from megatron.core.models.backends import LocalSpecProvider
        from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
            get_dsa_module_spec_for_backend,
        )
        from megatron.core.transformer.experimental_attention_variant import absorbed_mla

        class Replicated(torch.nn.Module):  # the local backend has no plain linear
            def __init__(self, inner, out, *args, **kwargs):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.empty(out, inner))

        absorbed_mla.TELinear = Replicated

        class Backend(LocalSpecProvider):
            def linear(self):
                return Replicated

        for spec in block.layer_specs:
            spec.submodules.self_attention = get_dsa_module_spec_for_backend(config, Backend())
    elif mla:
        for spec in block.layer_specs:
            spec.submodules.self_attention.submodules.core_attention = Attention
    if config.mtp_num_layers and stage["post_process"]:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

        stage["mtp_block_spec"] = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
    return GPTModel(
        config=config, transformer_layer_spec=block, vocab_size=cfg["vocab_size"], max_sequence_length=64,
        share_embeddings_and_output_weights=bool(cfg.get("tie_word_embeddings")), position_embedding_type="rope", **stage)


def names(model, folder: str) -> dict:
    from vime.weights.megatron_state import canonical, named_weights

    del folder
    return {canonical(name): list(tensor.shape) for name, tensor in named_weights(model)}


def misread(plan, fault: str):
    """A plan with a mistake that undoes itself on the way back: both directions read the same wrong table."""
    import dataclasses

    from vime.weights.families.units import Unit

    class Transposed(Unit):
        def to_megatron(self, pieces):
            return super().to_megatron(pieces).t().contiguous()

        def to_hf(self, full):
            return super().to_hf(full.t().contiguous())

    def change(unit):
        if fault == "head-major" and unit.groups > 1:
            return dataclasses.replace(unit, groups=1)
        if fault == "up-gate" and unit.name.endswith("mlp.linear_fc1.weight"):
            return dataclasses.replace(unit, hf=unit.hf[::-1])
        if fault == "transposed" and unit.name.endswith("linear_proj.weight") and len(set(unit.shape)) == 1:
            return Transposed(**{f.name: getattr(unit, f.name) for f in dataclasses.fields(unit)})
        return unit

    return dataclasses.replace(plan, units=tuple(map(change, plan.units)))


def fill(model, hf: str, fault: str = "") -> None:
    """Load an HF folder into the model by our own way."""
    from vime.weights.checkpoint import HfCheckpoint
    from vime.weights.families import family_for
    from vime.weights.megatron_state import layers_of_chunk, load
    from vime.weights.topology import KINDS, Topology, experts_of

    source = HfCheckpoint(hf)
    plan = misread(family_for(source.config).plan(source.config, source.files), fault)
    topology = Topology(dict.fromkeys(KINDS, ((0,),)), ((layers_of_chunk(model),),), experts_of(plan))
    load([model], plan, topology, 0, source)


def export(model, hf: str) -> dict:
    """Load an HF folder, and export again as an online update does."""
    from vime.weights.checkpoint import HfCheckpoint
    from vime.weights.online import Exporter
    from vime.weights.raw import same_bits

    fill(model, hf)
    source = HfCheckpoint(hf)
    out = dict(Exporter([model], source.config, source.files).tensors())
    return {"compared": len(out), "different": [n for n in source if n not in out or not same_bits(source[n], out[n])]}


def forward(model, folder: str) -> dict:
    """Logits of an HF folder under each of the mistakes, and whether the weights come back equal under it."""
    from vime.weights.checkpoint import HfCheckpoint
    from vime.weights.convert import export
    from vime.weights.families import family_for
    from vime.weights.gather import Gatherer
    from vime.weights.groups import Groups
    from vime.weights.megatron_state import local_state
    from vime.weights.raw import same_bits

    hf, ids = folder.split(":")
    source, tokens = HfCheckpoint(hf), torch.tensor([json.loads(ids)])
    out = {}
    for fault in ("", "head-major", "transposed", "up-gate"):
        fill(model, hf, fault)
        groups = Groups.of_megatron([model], 0)
        plan = misread(family_for(source.config).plan(source.config, source.files), fault)
        back = dict(export(Gatherer(plan, groups, local_state([model], groups.topology, 0))))
        position = torch.arange(tokens.shape[1])[None]
        mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).triu(1).bool()
        with torch.no_grad():
            logits = model.eval()(tokens, position, mask)
        out[fault or "none"] = {"logits": logits[0].tolist(), "equal": all(same_bits(back[n], source[n]) for n in source)}
    return out


def save(model, folder: str) -> dict:
    """Megatron writes a torch_dist checkpoint of the HF weights, in both of its forms."""
    from megatron.core import dist_checkpointing

    hf, out = folder.split(":")
    fill(model, hf)
    for form, metadata in (("numbered", {"non_homogeneous_layers": True}), ("stacked", {})):
        os.makedirs(f"{out}/{form}")
        dist_checkpointing.save(model.sharded_state_dict(metadata=metadata or None), f"{out}/{form}")
    return {}


def load(model, folder: str) -> dict:
    """Megatron loads our torch_dist checkpoint; names of the weights that are not those of the HF folder."""
    from megatron.core import dist_checkpointing

    from vime.weights.raw import same_bits

    hf, made = folder.split(":")
    fill(model, hf)
    want = {n: t.detach().clone() for n, t in model.state_dict().items() if torch.is_tensor(t)}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    metadata = dist_checkpointing.load_content_metadata(made)
    state = dist_checkpointing.load(model.sharded_state_dict(metadata=metadata), made)
    model.load_state_dict({k: v for k, v in state.items() if k in want}, strict=False)
    got = {n: t for n, t in model.state_dict().items() if torch.is_tensor(t)}
    return {"compared": len(want), "different": [n for n in want if not same_bits(want[n], got[n])]}


def bridge(model, hf: str) -> dict:
    """What mbridge exports from the model, against the folder it was loaded from and against our own export."""
    from vime.weights.bridge import BridgeExporter
    from vime.weights.checkpoint import HfCheckpoint
    from vime.weights.online import Exporter
    from vime.weights.raw import same_bits

    fill(model, hf)
    source = HfCheckpoint(hf)
    raw = dict(Exporter([model], source.config, source.files).tensors())
    theirs = dict(BridgeExporter([model], hf).tensors())
    different = [n for n in raw if n not in theirs or not same_bits(raw[n], theirs[n]) or not same_bits(raw[n], source[n])]
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "linear_qkv.weight" in n).add_(1)
    moved = [n for n, t in BridgeExporter([model], hf).tensors() if not same_bits(raw[n], t)]
    return {"compared": len(theirs), "different": different + sorted(theirs.keys() - raw.keys()), "moved": moved}


def main() -> None:
    import megatron.core

    from vime.megatron import parallel

    command, config, *folder = sys.argv[1:]
    parallel.initialize()
    model = build(json.loads(config))
    result = {"names": names, "save": save, "load": load, "export": export, "forward": forward, "bridge": bridge}[command](model, *(folder or [""]))
    print("RESULT " + json.dumps({"version": megatron.core.__version__, "result": result}))
    parallel.destroy()


if __name__ == "__main__":
    main()
