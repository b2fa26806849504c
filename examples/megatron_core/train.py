"""A plain Megatron-core training loop with vime switched on by three lines (marked).

Everything else is what any script on megatron-core does: set up the parallel state, build a GPT from the local layer
spec, wrap it in Megatron's data parallel, step Megatron's optimizer. Run it with

    python examples/megatron_core/train.py            # CPU
    python examples/megatron_core/train.py --device cuda
"""
from __future__ import annotations

import argparse
import json

import torch
import torch.distributed as dist
import torch.nn.functional as F

import vime  # (1)


def build(device: str, dtype: torch.dtype, vocab: int, length: int):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=2, hidden_size=64, ffn_hidden_size=160, num_attention_heads=4, num_query_groups=2,
        normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True, activation_func=F.silu,
        hidden_dropout=0.0, attention_dropout=0.0, persist_layer_norm=False, gradient_accumulation_fusion=False,
        use_cpu_initialization=device == "cpu", params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype is torch.bfloat16,
    )
    model = GPTModel(config=config, transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
                     vocab_size=vocab, max_sequence_length=length, position_embedding_type="rope", rotary_base=10000)
    return model.to(device=device, dtype=dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--stock", action="store_true", help="leave vime off, to compare")
    parser.add_argument("--json", action="store_true", help="print losses and counters as JSON")
    args = parser.parse_args()
    dtype, vocab, length, batch = getattr(torch, args.dtype), 101, 24, 4

    if args.device == "cpu":  # megatron-core itself runs on GPUs only
        from vime.megatron import cpu

        cpu.apply()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    dist.init_process_group("gloo" if args.device == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)

    if not args.stock:
        vime.enable()  # (2)

    model = build(args.device, dtype, vocab, length)
    model = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=1e-2, weight_decay=0.0, clip_grad=1.0, params_dtype=dtype,
                        bf16=dtype is torch.bfloat16), [model])

    tokens = torch.randint(0, vocab, (batch, length + 1), device=args.device)
    ids, labels = tokens[:, :-1], tokens[:, 1:].contiguous()
    positions = torch.arange(length, device=args.device).expand(batch, length)
    losses = []
    for step in range(args.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(ids, positions, None, labels=labels).float().mean()
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        losses.append(float(loss.detach()))
        if not args.json:
            print(f"step {step}: loss {losses[-1]:.6f}", flush=True)

    if not args.stock:
        vime.assert_active()  # (3) every operation really went through vime
    if args.json:
        from vime.megatron import hooks

        print(json.dumps({"losses": losses, "ran": hooks.counters()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
