"""The command line. Parses, hands over to :mod:`vime.commands`, and turns errors into one message and an exit code.

Nothing heavy is imported until a command runs, so that ``vime --help`` answers at once.

Exit codes: 0 PASS, 1 FAIL, 2 wrong usage or input that cannot be used, 10 INVALID (also: something went wrong while
running, so that nothing could be judged), 11 NOT_RUN.
"""
from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from vime.commands import repro_cli as repro
from vime.commands.choices import (
    Arrival,
    Backend,
    CacheDtype,
    Device,
    Dtype,
    Fp8,
    Impl,
    OptimizerKind,
    Reward,
    Tier,
    ToHf,
    Transport,
)
from vime.errors import (
    COULD_NOT_JUDGE,
    STACK,
    exit_code_of,
    is_for_people,
    plain,
    require_device,
    require_stack,
)

# No rich markup: its boxes cut the longer flags of `vime train` off at 80 columns, several of them to the same text.
app = typer.Typer(help="The same policy, the same numbers, to the bit: in Megatron training and in vLLM generation.",
                  epilog="Exit codes: 0 PASS, 1 FAIL, 2 wrong usage or unusable input, 10 INVALID or broke off, 11 NOT_RUN.",
                  no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
weights = typer.Typer(help="Hugging Face to Megatron and back; two checkpoints bit by bit.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(weights, name="weights")
app.add_typer(repro.app, name="repro")


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a screen.")]


@app.command()
def train(
    hf_checkpoint: Annotated[Path | None, typer.Option(help="Local Hugging Face folder (Llama, Qwen2, Qwen3; on a CPU also Qwen3-MoE, DeepSeek-V3, GLM-5.2). Default: SmolLM2-135M-Instruct.")] = None,
    data: Annotated[str, typer.Option(help="GSM8K file or folder (parquet, JSON lines). Default: generated word problems.")] = "",
    dtype: Annotated[Dtype, typer.Option(help="Of parameters and activations, on both sides.")] = Dtype.bfloat16,
    device: Annotated[Device, typer.Option(help="Where both sides run.")] = Device.cpu,
    seed: Annotated[int, typer.Option(help="Run seed; each sample's own seed is derived from it.")] = 1234,
    num_rollout: Annotated[int, typer.Option(help="Turns of the loop: rollout, step, update.")] = 3,
    check_last_update: Annotated[bool, typer.Option(help="One more rollout that compares the last update.")] = True,
    rollout_batch_size: Annotated[int, typer.Option(help="Prompts a turn.")] = 4,
    n_samples_per_prompt: Annotated[int, typer.Option(help="Samples a prompt (a group).")] = 4,
    rollout_max_response_len: Annotated[int, typer.Option(help="Longest response, in tokens.")] = 32,
    rollout_temperature: Annotated[float, typer.Option(help="Sampling temperature, above 0.")] = 1.0,
    rollout_concurrency: Annotated[int, typer.Option(help="Requests in flight at once; 0: all of a turn. Changes no bit.")] = 0,
    rollout_arrival: Annotated[Arrival, typer.Option(help="Order in which requests reach the engine. Changes no bit.")] = Arrival.given,
    reward: Annotated[Reward, typer.Option(help="math, or gate: varies within every group by construction.")] = Reward.math,
    optimizer: Annotated[OptimizerKind, typer.Option(help="adam, or sgd: stateless; it updates the weights themselves.")] = OptimizerKind.adam,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-5,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of matrices.")] = 0.0,
    adam_beta1: Annotated[float, typer.Option(help="AdamW's first moment.")] = 0.9,
    adam_beta2: Annotated[float, typer.Option(help="AdamW's second moment.")] = 0.95,
    clip_grad: Annotated[float, typer.Option(help="Largest gradient norm; 0: no clipping.")] = 1.0,
    eps_clip: Annotated[float, typer.Option(help="The ratio is clipped below 1 by this.")] = 0.2,
    eps_clip_high: Annotated[float, typer.Option(help="The ratio is clipped above 1 by this.")] = 0.28,
    max_tokens_per_gpu: Annotated[int, typer.Option(help="Tokens of a packed microbatch (dynamic batching).")] = 1024,
    balance_data: Annotated[bool, typer.Option(help="Deal samples to ranks by their tokens; equal ones by place.")] = False,
    accumulate_allreduce_grads_in_fp32: Annotated[bool, typer.Option(help="Else gradients have the model's dtype.")] = True,
    recompute: Annotated[bool, typer.Option(help="Full recompute of activations in the backward pass.")] = False,
    transformer_impl: Annotated[Impl, typer.Option(help="Whose modules the trainer's layers are built of. Changes no bit.")] = Impl.local,
    actor_num_gpus: Annotated[int, typer.Option(help="Data-parallel ranks of the trainer (processes on a CPU).")] = 1,
    expert_model_parallel_size: Annotated[int, typer.Option(help="Trainer ranks that share one set of experts.")] = 1,
    freeze_indexer: Annotated[bool, typer.Option(help="No gradient for the indexer of sparse attention.")] = True,
    deterministic_mode: Annotated[bool, typer.Option(help="Pin everything that could make a rerun differ.")] = True,
    vllm_enable_deterministic_inference: Annotated[bool, typer.Option(help="vLLM's own batch-invariant mode, where vime is off.")] = True,
    vllm_attention_backend: Annotated[Backend, typer.Option(help="Of the engine. What cannot be honoured is refused.")] = Backend.auto,
    vllm_keep_fp8_weights: Annotated[bool, typer.Option(help="With --fp8 on a GPU: the engine keeps these weights quantised too, half of their memory more. Changes no bit.")] = True,
    vime_off: Annotated[bool, typer.Option("--vime-off", help="Leave both sides stock: shows what vime changes.")] = False,
    exclude: Annotated[list[str] | None, typer.Option(help="Leave this operation stock on both sides. Repeatable.")] = None,
    engine_url: Annotated[str, typer.Option(help="An engine that runs elsewhere (vime.vllm.server). Default: start one.")] = "",
    engine_token: Annotated[str, typer.Option(envvar="VIME_ENGINE_TOKEN", help="Its bearer token.")] = "",
    trainer_host: Annotated[str, typer.Option(help="Address of the trainer that the engine can reach.")] = "127.0.0.1",
    enforce_eager: Annotated[bool, typer.Option(help="No CUDA graphs in the engine. Changes no bit.")] = False,
    offload_rollout: Annotated[bool, typer.Option(help="The engine gives up its memory while the trainer steps (GPU).")] = False,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of an engine step; longer prompts are prefilled in chunks.")] = 512,
    max_model_len: Annotated[int, typer.Option(help="Longest prompt plus response of the engine.")] = 1024,
    kv_cache_gib: Annotated[float, typer.Option(help="KV cache of the engine in GiB (CPU); 0: vLLM's choice.")] = 0.5,
    engine_data_parallel_size: Annotated[int, typer.Option(help="Ranks of the engine, over which experts are spread.")] = 1,
    kv_cache_dtype: Annotated[CacheDtype, typer.Option(help="fp8_e4m3: latent attention only; the trainer rounds as the cache does.")] = CacheDtype.auto,
    fp8: Annotated[Fp8, typer.Option(help="blockwise: linear layers in decoder layers run their forward in block FP8 (1x128 by 128x128).")] = Fp8.off,
    update_weight_transport: Annotated[Transport, typer.Option(help="nccl is a process group: gloo on a CPU.")] = Transport.nccl,
    update_weight_disk_dir: Annotated[str, typer.Option(help="Folder that both sides reach, for disk.")] = "",
    update_weight_disk_keep_files: Annotated[bool, typer.Option(help="Keep the written folders.")] = False,
    check_weight_update_equal: Annotated[bool, typer.Option(help="Read every element back from the engine and compare.")] = True,
    megatron_to_hf_mode: Annotated[ToHf, typer.Option(help="raw: vime's own conversion; bridge: mbridge's.")] = ToHf.raw,
    output_dir: Annotated[str, typer.Option(help="Where ledger.jsonl, metrics.jsonl, report.json and logs go. Default: nowhere.")] = "",
    save: Annotated[str, typer.Option(help="Folder for checkpoints to go on from.")] = "",
    save_interval: Annotated[int, typer.Option(help="Turns between checkpoints.")] = 1,
    load: Annotated[str, typer.Option(help="Go on from the newest whole checkpoint in this folder.")] = "",
    use_tensorboard: Annotated[bool, typer.Option(help="Curves for TensorBoard into the output folder.")] = False,
    use_wandb: Annotated[bool, typer.Option(help="Curves for Weights & Biases.")] = False,
    wandb_mode: Annotated[str, typer.Option(help="offline or online.")] = "offline",
    wandb_project: Annotated[str, typer.Option(help="Its project.")] = "vime",
    over_sampling_batch_size: Annotated[int, typer.Option(help="Refused: keeps whichever samples finish first.", hidden=True)] = 0,
    async_rollout: Annotated[bool, typer.Option(help="Refused.", hidden=True)] = False,
    optimizer_cpu_offload: Annotated[bool, typer.Option(help="Refused.", hidden=True)] = False,
    use_precision_aware_optimizer: Annotated[bool, typer.Option(help="Refused.", hidden=True)] = False,
    overlap_grad_reduce: Annotated[bool, typer.Option(help="Refused.", hidden=True)] = False,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for any one thing.")] = 900.0,
    as_json: Json = False,
) -> None:
    """Rollout in vLLM, training in Megatron, weights back into vLLM. Every log-probability is compared."""
    require_stack(*(module for module in STACK if module != "vllm" or not engine_url))
    require_device(device.value)
    from vime import smollm2
    from vime.commands import train as command
    from vime.commands.output import finish
    from vime.contract import OPS
    from vime.rl.config import TrainConfig
    from vime.rl.recipe import refuse_flags

    refuse_flags(over_sampling_batch_size=over_sampling_batch_size, async_rollout=async_rollout,
                 optimizer_cpu_offload=optimizer_cpu_offload, use_precision_aware_optimizer=use_precision_aware_optimizer,
                 overlap_grad_reduce=overlap_grad_reduce)
    chosen: tuple[str, ...] | None = () if vime_off else None
    if exclude and vime_off:
        raise typer.BadParameter("with --vime-off every operation is stock already; leave one of the two out", param_hint="--exclude")
    if exclude:
        unknown = sorted(set(exclude) - set(OPS))
        if unknown:
            raise typer.BadParameter(f"unknown operation {', '.join(unknown)}; known: {', '.join(OPS)}", param_hint="--exclude")
        chosen = tuple(op for op in OPS if op not in exclude)
    folder = hf_checkpoint or smollm2.ensure(say=lambda text: typer.echo(text, err=True))
    config = TrainConfig(
        hf_checkpoint=str(folder), data=data, dtype=dtype.value, device=device.value, ops=chosen, seed=seed, num_rollout=num_rollout,
        check_last_update=check_last_update, rollout_batch_size=rollout_batch_size, n_samples_per_prompt=n_samples_per_prompt,
        rollout_max_response_len=rollout_max_response_len, rollout_temperature=rollout_temperature, reward=reward.value, lr=lr,
        weight_decay=weight_decay, clip_grad=clip_grad, eps_clip=eps_clip, eps_clip_high=eps_clip_high,
        max_tokens_per_gpu=max_tokens_per_gpu, recompute=recompute, transformer_impl=transformer_impl.value, actor_num_gpus=actor_num_gpus,
        optimizer=optimizer.value, accumulate_allreduce_grads_in_fp32=accumulate_allreduce_grads_in_fp32,
        deterministic_mode=deterministic_mode, engine_url=engine_url, engine_token=engine_token, trainer_host=trainer_host,
        vllm_enable_deterministic_inference=vllm_enable_deterministic_inference, max_num_batched_tokens=max_num_batched_tokens,
        expert_model_parallel_size=expert_model_parallel_size, freeze_indexer=freeze_indexer,
        enforce_eager=enforce_eager, offload_rollout=offload_rollout, max_model_len=max_model_len, kv_cache_gib=kv_cache_gib, kv_cache_dtype=kv_cache_dtype.value,
        fp8="" if fp8 is Fp8.off else fp8.value,
        engine_data_parallel_size=engine_data_parallel_size, update_weight_transport=update_weight_transport.value,
        update_weight_disk_dir=update_weight_disk_dir, update_weight_disk_keep_files=update_weight_disk_keep_files,
        check_weight_update_equal=check_weight_update_equal, megatron_to_hf_mode=megatron_to_hf_mode.value, output_dir=output_dir, timeout_s=timeout_s,
        rollout_concurrency=rollout_concurrency, rollout_arrival=rollout_arrival.value, adam_beta1=adam_beta1, adam_beta2=adam_beta2,
        balance_data=balance_data, vllm_attention_backend=vllm_attention_backend.value, vllm_keep_fp8_weights=vllm_keep_fp8_weights, save=save, save_interval=save_interval,
        load=load, use_tensorboard=use_tensorboard, use_wandb=use_wandb, wandb_mode=wandb_mode, wandb_project=wandb_project)
    verdict, extra = command.run(config)
    finish(verdict, as_json, **extra)


@app.command()
def demo(
    hf_checkpoint: Annotated[Path | None, typer.Option(help="Local Hugging Face folder. Default: SmolLM2-135M-Instruct.")] = None,
    dtype: Annotated[list[Dtype] | None, typer.Option(help="Repeatable. Default: both.")] = None,
    updates: Annotated[int, typer.Option(min=1, help="Weight updates a dtype.")] = 3,
    report: Annotated[Path | None, typer.Option(help="Write the JSON report to this file.")] = None,
    as_json: Json = False,
) -> None:
    """The main job: one model on both sides, vime off and then on. Through weight updates, in fp32 and in bf16."""
    require_stack(*STACK)
    from vime.commands import demo as command

    raise typer.Exit(command.run(hf_checkpoint, [d.value for d in dtype or list(Dtype)], updates, report, as_json))


@app.command()
def prove(
    device: Annotated[Device, typer.Option(help="Whose kernels.")] = Device.cpu,
    dtype: Annotated[list[Dtype] | None, typer.Option(help="Repeatable. Default: all that the device has.")] = None,
    ops: Annotated[str, typer.Option(help="Operations, separated by commas. Default: all.")] = "",
    quick: Annotated[bool, typer.Option(help="Seconds instead of many minutes: fewer shapes and rows, no timing.")] = False,
    stock: Annotated[bool, typer.Option("--stock", help="Sweep the stock kernels instead: the control, which must FAIL where they vary.")] = False,
    as_json: Json = False,
) -> None:
    """Prove that a row of every operation depends on itself only. On this machine; error and cost stand beside it."""
    require_device(device.value)
    from vime.commands import prove as command
    from vime.commands.output import finish

    if ops and not all(o.strip() for o in ops.split(",")):
        raise typer.BadParameter(f"{ops!r} holds an empty name; expected names separated by commas", param_hint="--ops")
    try:
        verdict, report = command.run(device.value, [d.value for d in dtype or []], [o.strip() for o in ops.split(",") if o], quick, stock)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    finish(verdict, as_json, show=command.show, geomean_ratio=report.geomean_ratio, op_ratio=report.op_ratio, report=report.to_dict())


@app.command()
def gate(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="rerun, batch, logprob, layerwise, weights, cost, ep1, ep2, "
                                                       "ep8. Default: all that a dense model has.")] = None,
    profile: Annotated[str | None, typer.Option(help="A profile, or a Hugging Face folder.")] = None,
    device: Annotated[Device | None, typer.Option(help="Force one; a missing one is NOT_RUN.")] = None,
    tier: Annotated[Tier | None, typer.Option(help="What counts as equal. Default: exact.")] = None,
    report: Annotated[Path | None, typer.Option(help="Folder for report.json, report.html and evidence.json.")] = None,
    control: Annotated[bool, typer.Option("--control", help="Plant each gate's own fault: FAIL, exit 1.")] = False,
    cost_max: Annotated[float | None, typer.Option(help="Largest cost ratio of the cost gate.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds for all of them; what is late is INVALID.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check arguments, groups, shapes, kernels and memory of the run on GPUs, "
                                                            "without one. Proves nothing about numerics.")] = False,
    gpu_gib: Annotated[float, typer.Option(help="Memory of one GPU for --dry-run.")] = 139.0,
    as_json: Json = False,
) -> None:
    """Run gates on a real trainer and a real engine."""
    from vime.commands import gate as command
    from vime.commands.output import finish

    if dry_run:
        given = [flag for flag, value in (("--tier", tier), ("--report", report), ("--control", control), ("--cost-max", cost_max),
                                          ("--timeout", timeout), ("--device cpu", device is Device.cpu)) if value not in (None, False)]
        if given:
            raise typer.BadParameter(f"it runs nothing, on no GPU, and has no use for {', '.join(given)}; leave that out", param_hint="--dry-run")
        finish(command.dry_run(names or [], profile, gpu_gib), as_json)
    finish(command.run(names or [], as_json, profile=profile, device=device.value if device else None, tier=tier.value if tier else None, report=report,
                       control=control, cost_max=cost_max, timeout=timeout), as_json, show=command.show)


@app.command()
def doctor(
    profile: Annotated[str | None, typer.Option(help="A profile of the gates, or a Hugging Face folder.")] = None,
    device: Annotated[Device | None, typer.Option(help="Default: what the gates would take.")] = None,
    as_json: Json = False,
) -> None:
    """Can this machine run this profile, and what would be refused."""
    from vime import doctor as command
    from vime.commands.output import finish

    finish(command.examine(profile, device.value if device else None), as_json, show=command.show)


@app.command()
def explain(
    profile: Annotated[str, typer.Option(help="A profile of the gates, or a Hugging Face folder.")] = "smollm2-135m",
    device: Annotated[Device, typer.Option(help="Where both sides run.")] = Device.cpu,
    dtype: Annotated[Dtype | None, typer.Option(help="Default: the profile's first.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Leave only this operation stock. Repeatable. Default: each in turn.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Prompts. Default: the profile's.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples of each prompt.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Sampled tokens of each sample.")] = None,
    pairs: Annotated[int, typer.Option(help="How often the two times of a cost alternate.")] = 3,
    as_json: Json = False,
) -> None:
    """Which operation causes how much of the mismatch, and its cost."""
    require_stack(*STACK)
    require_device(device.value)
    from vime.commands import explain as command

    raise typer.Exit(command.run(profile, device.value, dtype.value if dtype else None, as_json, only=only or (), prompts=prompts,
                                 samples=samples, tokens=tokens, pairs=pairs))


@app.command()
def compare(
    run_a: Annotated[Path, typer.Argument(help="Records, tensors or log-probabilities of one side: a folder or file.")],
    run_b: Annotated[Path, typer.Argument(help="Those of the other.")],
    tier: Annotated[str, typer.Option(help="exact or 1e-6.")] = "exact",
    kind: Annotated[str, typer.Option(help="What plain files hold: auto, layers, weights or logprobs.")] = "auto",
    map_a: Annotated[Path | None, typer.Option("--map", help="JSON file that gives foreign tensors our names.")] = None,
    map_b: Annotated[Path | None, typer.Option(help="The same for the second run, where it needs another one.")] = None,
    as_json: Json = False,
) -> None:
    """Two recorded runs: the first difference and its likely cause."""
    from vime.commands import compare as command
    from vime.commands.output import finish

    finish(command.run(run_a, run_b, tier, kind, map_a, map_b), as_json)


@weights.command()
def roundtrip(
    hf: Annotated[Path, typer.Option(help="Hugging Face folder.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline parallel.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert parallel.")] = 1,
    etp: Annotated[int | None, typer.Option(min=1, help="Expert tensor parallel.")] = None,
    vpp: Annotated[int, typer.Option(min=1, help="Virtual pipeline chunks a stage.")] = 1,
    last_stage: Annotated[int | None, typer.Option(min=1, help="Layers of the last pipeline stage, where it is uneven.")] = None,
    inject: Annotated[str | None, typer.Option(metavar="STAGE:FAULT", help="Plant a fault: FAIL at that stage.")] = None,
    out: Annotated[Path | None, typer.Option(help="Keep the resulting folder here.")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Receive and load in a running vLLM, and compare its greedy answers.")] = False,
    as_json: Json = False,
) -> None:
    """To Megatron shards and back to Hugging Face, stage by stage."""
    if vpp > 1 and pp == 1:  # which Megatron refuses as well
        raise typer.BadParameter(f"{vpp} chunks of a stage need several stages to take turns; expected --pp above 1 with it, or --vpp 1",
                                 param_hint="--vpp")
    from vime.commands import weights as command
    from vime.commands.output import finish

    finish(command.roundtrip(hf, tp, pp, ep, etp, vpp, last_stage, inject, out, serve), as_json)


@weights.command()
def diff(
    a: Annotated[Path, typer.Argument(help="Hugging Face folder.")],
    b: Annotated[Path, typer.Argument(help="Another.")],
    as_json: Json = False,
) -> None:
    """Two checkpoints, bit by bit."""
    from vime.commands import weights as command
    from vime.commands.output import finish

    finish(command.diff(a, b), as_json)


def main() -> NoReturn:
    """Entry point. An error with a message for a person is printed alone; a fault of ours keeps its traceback."""
    try:
        app()
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        sys.exit(130)
    except Exception as raised:
        error = plain(raised)
        if not is_for_people(error):
            traceback.print_exception(raised)
            sys.exit(COULD_NOT_JUDGE)  # it broke off and judged nothing; 1 would say that something differs
        typer.echo(f"error: {error}", err=True)
        sys.exit(exit_code_of(error))
    sys.exit(0)


if __name__ == "__main__":
    main()
