"""What alignment costs in a training step on one GPU, and where the time goes.

    VIME_COMMIT=$(git rev-parse HEAD) python ci/step_cuda.py --model qwen2.5-0.5b --out ci/evidence/h200-step-qwen.json --logs DIR
    VIME_COMMIT=$(git rev-parse HEAD) python ci/step_cuda.py --gate-profile glm5.2-6layer --experts 16 --apart --out OUT --logs DIR

A step is forward, backward and AdamW over one packed batch, with random weights. Aligned: vime's operations under Megatron's
local spec, or with ``--transformer-impl transformer_engine`` under that of TransformerEngine. Against it the ordinary stack: its
TransformerEngine spec with flash attention over packed sequences and every fusion, cuBLAS with its workspace, its own clipping.
With ``--gate-profile`` the sizes are those of a model with latent attention and experts, of which ``--experts`` are kept, as many as a rank
of expert parallelism would hold (:mod:`ci.stock_latent` is its ordinary counterpart). Each runs in a process of its own, with ``--apart`` on a GPU of its own, and the two take turns; the ratio is the median over pairs. ``--profile`` prints the kernels
that took longest on both sides. The exit code is 1 where the ratio is over its budget.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: Sizes as in vime.ops.cuda.shapes; importing that would starve cuBLAS here.
MODELS: dict[str, dict[str, Any]] = {
    "smollm2-135m": dict(model_type="llama", num_hidden_layers=30, hidden_size=576, num_attention_heads=9, num_key_value_heads=3,
                         intermediate_size=1536, vocab_size=49152, tie_word_embeddings=True),
    "qwen2.5-0.5b": dict(model_type="qwen2", num_hidden_layers=24, hidden_size=896, num_attention_heads=14, num_key_value_heads=2,
                         intermediate_size=4864, vocab_size=151936, tie_word_embeddings=True),
    "dense-7b": dict(model_type="llama", num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8,
                     intermediate_size=14336, vocab_size=32000, tie_word_embeddings=False),
    "tiny": dict(model_type="llama", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
                 vocab_size=300, tie_word_embeddings=True),
}
BUDGET = 1.10


def lengths(tokens: int, count: int) -> list[int]:
    """``count`` lengths that sum up to ``tokens``, the longest about four times the shortest."""
    weights = [1 + 3 * i / max(1, count - 1) for i in range(count)]
    found = [int(tokens * w / sum(weights)) for w in weights]
    return [*found[:-1], tokens - sum(found[:-1])]


def sizes(args: argparse.Namespace) -> dict[str, Any]:
    """The config of the model that is timed."""
    if args.hf_config:
        hf = json.loads(Path(args.hf_config).read_text()) | ({"n_routed_experts": args.experts} if args.experts else {})
    else:
        hf = dict(MODELS[args.model], max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=10000.0)
    return hf | ({"num_hidden_layers": args.layers} if args.layers else {})


class Step:
    """A model, its optimizer and one batch."""

    def __init__(self, kind: str, args: argparse.Namespace) -> None:
        import torch

        import vime
        from vime.megatron import parallel

        self.torch, self.args, self.aligned = torch, args, kind != "stock"
        parallel.initialize(device=args.device, seed=1)
        if self.aligned:
            vime.enable()
        hf = sizes(args)
        impl = "transformer_engine" if kind in ("stock", "aligned-te") else "local"
        self.model = self._model(hf, impl)
        self._optimizer()
        self._batch(hf["vocab_size"])

    def _model(self, hf: dict[str, Any], impl: str) -> Any:
        from vime.megatron import model as models

        if not self.aligned and self.args.hf_config:
            from stock_latent import build

            return self._fused(build(hf, self.torch.bfloat16, self.args.device))
        if not self.aligned:
            plain = models.transformer_config

            def fused(*args: Any, **kwargs: Any) -> Any:
                config = plain(*args, **kwargs)
                for field in ("bias_dropout_fusion", "bias_activation_fusion", "apply_rope_fusion", "cross_entropy_loss_fusion", "masked_softmax_fusion"):
                    setattr(config, field, True)
                config.bias_swiglu_fusion = True
                return config

            models.transformer_config = fused  # type: ignore[assignment]
        model = models.build_model(hf, self.torch.bfloat16, self.args.device, transformer_impl=impl)
        return model if self.aligned else self._fused(model)

    def _fused(self, model: Any) -> Any:
        """Weight gradients added into Megatron's buffers: Megatron's own flag asks for Apex in the LM head as well."""
        for module in model.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True
        return model

    def _optimizer(self) -> None:
        from vime.megatron import optim

        if self.aligned:
            self.optimizer: Any = optim.Optimizer(self.model, lr=1e-5)
            self.ddp = self.optimizer.ddp
            return
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.ddp = DistributedDataParallel(self.model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), self.model)
        self.optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-5, min_lr=1e-5, weight_decay=0.0, clip_grad=1.0, bf16=True,
                                                                params_dtype=self.torch.bfloat16), [self.ddp])

    def _batch(self, vocab: int) -> None:
        from megatron.core.packed_seq_params import PackedSeqParams

        torch, device = self.torch, self.args.device
        sizes = lengths(self.args.tokens, self.args.sequences)
        generator = torch.Generator().manual_seed(3)
        self.ids_1T = torch.randint(0, vocab, (1, sum(sizes)), generator=generator).to(device)
        self.labels_1T = torch.roll(self.ids_1T, -1, 1)
        self.positions_1T = torch.cat([torch.arange(n) for n in sizes])[None].to(device)
        cu = torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32)
        self.packing = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=max(sizes), max_seqlen_kv=max(sizes))

    def wait(self) -> float:
        if self.args.device != "cpu":
            self.torch.cuda.synchronize()
        return time.perf_counter()

    def run(self) -> dict[str, float]:
        """One step: seconds of forward with backward, and of the optimizer."""
        begun = self.wait()
        if self.aligned:
            self.optimizer.zero_grad()
        else:
            self.ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
        loss_1T = self.ddp(self.ids_1T, self.positions_1T, None, labels=self.labels_1T, packed_seq_params=self.packing)
        loss_1T.float().mean().backward()
        between = self.wait()
        if self.aligned:
            self.optimizer.finish_gradients()
            self.optimizer.step()
        else:
            self.ddp.finish_grad_sync()
            self.optimizer.step()
        done = self.wait()
        return {"forward_backward": between - begun, "optimizer": done - between, "step": done - begun}

    def profile(self) -> list[list[Any]]:
        """(kernel, calls, microseconds) of one step, longest first; the last line sums up all of them."""
        torch = self.torch
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            self.run()
        rows = sorted(((e.key, e.count, float(e.self_device_time_total)) for e in profiler.key_averages()), key=lambda row: -row[2])
        return [*map(list, rows[: self.args.top]), ["all kernels", sum(r[1] for r in rows), sum(r[2] for r in rows)]]


def serve(args: argparse.Namespace) -> None:
    """The child: for each line on stdin one step and its seconds, or for ``profile`` the kernels of one."""
    step = Step(args.serve, args)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(step.profile() if line.strip() == "profile" else step.run()), flush=True)


@contextlib.contextmanager
def child(kind: str, args: argparse.Namespace) -> Iterator[Callable[[str], Any]]:
    """One side in a process of its own: what it answers to a line (:func:`serve`)."""
    starved = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "0"}  # before the first product of the process
    env = {name: value for name, value in os.environ.items() if name not in starved} | ({} if kind == "stock" else starved)
    if args.apart:
        env["CUDA_VISIBLE_DEVICES"] = (env.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")[kind == "stock"]
    flags = ["--serve", kind, *(f for name in ("model", "tokens", "sequences", "layers", "device", "top", "hf_config", "experts")
                                if getattr(args, name) != "" for f in (f"--{name.replace('_', '-')}", str(getattr(args, name))))]
    with open(args.logs / f"{kind}.log", "w") as log, subprocess.Popen([sys.executable, __file__, *flags], env=env, stdin=subprocess.PIPE,
                                                                        stdout=subprocess.PIPE, stderr=log, text=True) as process:
        def ask(line: str) -> Any:
            if line:
                process.stdin.write(line + "\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
            while answer := process.stdout.readline():  # type: ignore[union-attr]
                with contextlib.suppress(ValueError):
                    return json.loads(answer)
            raise SystemExit(f"the {kind} side ended with exit code {process.wait()}; see {args.logs}/{kind}.log")

        ask("")
        try:
            yield ask
        finally:
            process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="smollm2-135m")
    parser.add_argument("--gate-profile", default="", help="a profile of the gates with latent attention and experts instead of --model")
    parser.add_argument("--hf-config", default="", help=argparse.SUPPRESS)
    parser.add_argument("--experts", type=int, default=0, help="with --gate-profile: fewer experts than the model has (0: all)")
    parser.add_argument("--apart", action="store_true", help="aligned on the first GPU, ordinary on the second, where one does not hold both")
    parser.add_argument("--budget", type=float, default=BUDGET)
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the model has (0: all), where memory is short")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--transformer-impl", choices=("local", "transformer_engine"), default="local", help="spec of the aligned side")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path, default=Path("."))
    parser.add_argument("--serve", choices=("aligned", "aligned-te", "stock"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return 0
    # not at the top: a child imports nothing before its environment is set
    from gates.costs import ratio_of

    if args.gate_profile:
        from gates.profiles import find

        args.hf_config = str(find(args.gate_profile).checkpoint() / "config.json")
        args.model_name = args.gate_profile + (f" with {args.experts} experts" if args.experts else "")
    args.logs.mkdir(parents=True, exist_ok=True)
    began, numbers = time.time(), dict[str, Any]()
    ours = "aligned" if args.transformer_impl == "local" else "aligned-te"
    with child(ours, args) as aligned, child("stock", args) as stock:
        for _ in range(3):
            aligned("run"), stock("run")
        times = [(aligned("run"), stock("run")) for _ in range(args.pairs)]
        for part in ("step", "forward_backward", "optimizer"):
            aligned_s, stock_s = ([side[part] for side in sides] for sides in zip(*times, strict=True))
            numbers[part] = ratio_of(aligned_s, stock_s) | {"aligned_ms": round(1e3 * statistics.median(aligned_s), 2),
                                                            "stock_ms": round(1e3 * statistics.median(stock_s), 2)}
            print(part, numbers[part], flush=True)
        if args.profile:
            for name, side in (("aligned", aligned), ("stock", stock)):
                numbers[f"kernels_{name}"] = side("profile")
                print(f"--- {name}: microseconds and calls of the kernels that took longest")
                for kernel, calls, us in numbers[f"kernels_{name}"]:
                    print(f"{us:10.0f} {calls:6d}  {kernel[:110]}")
    return judge(args, numbers, time.time() - began)


def judge(args: argparse.Namespace, numbers: dict[str, Any], seconds: float) -> int:
    """The exit code of the verdict on the whole step; evidence of it, if asked for."""
    from alignment import evidence
    from gates.costs import within

    name = getattr(args, "model_name", args.model)
    verdict = within(f"cost of a training step, {name}, {args.transformer_impl} spec", numbers["step"], args.budget, "the ordinary stack")
    print(verdict.status, verdict.reason, flush=True)
    if args.out is None:
        return verdict.status.exit_code
    rows = {"tokens": args.tokens, "sequences": args.sequences, "layers": args.layers}
    claim = evidence.claim(verdict, model=name, device=args.device, dtype="bfloat16",
                           topology="one GPU for each side" if args.apart else "one GPU")
    evidence.write(args.out, evidence.build([claim], kind="bench", numbers=numbers | rows, seconds=seconds))
    return verdict.status.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
