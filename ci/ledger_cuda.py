"""What the ledger costs an online update into a running engine on one GPU, and how fast it digests beside a plain copy.

    VIME_COMMIT=$(git rev-parse HEAD) python ci/ledger_cuda.py --out ci/evidence/h200-ledger.json --logs DIR [--profile dense-7b]

The trainer is in this process, the engine in its own; weights go by ipc (on a CPU: a gloo group, or ``--transport disk``), with
``--check-weight-update-equal``. Updates with the ledger on and off take turns; the ratio is the median over pairs. After that every
element is judged from outside: what the engine and the ledger say they hold, against digests of the checkpoint's own tensors. Then
one bit of the trainer is flipped, and both have to name that tensor and no other. The exit code is that of the worst verdict: 1
where the ratio is over its budget.
"""
from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from alignment import evidence
from alignment.verdict import Coverage, Status, Verdict, worst
from gates.costs import ratio_of, within

BUDGET = {"cuda": 1.1, "cpu": 1.5}
FLIPPED = ("decoder.final_layernorm.weight", "model.norm.weight")


def settings(args: argparse.Namespace) -> Any:
    """The run as a gate would have it on this profile."""
    from gates.harness import run_settings
    from gates.profiles import find
    from vime.rl.config import TrainConfig

    profile = find(args.profile)
    fields = run_settings(profile, args.device) | ({"update_weight_transport": args.transport} if args.transport else {})
    return TrainConfig(hf_checkpoint=str(profile.checkpoint()), dtype="bfloat16", device=args.device, ops=() if args.stock else None,
                       check_weight_update_equal=True, update_weight_disk_dir=str((args.logs / "updates").absolute()), **fields)


def start_as_a_trainer(config: Any) -> None:
    """Replace this process by one that began with the environment of a trainer's rank: some of it is read at the start only."""
    from vime.rl.config import trainer_env

    missing = {name: value for name, value in trainer_env(config).items() if os.environ.get(name) != value}
    if missing:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **missing})


class Both:
    """A trainer of one rank and an engine, both with the weights of a checkpoint. Versions count up from 1."""

    def __init__(self, config: Any, args: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        from vime.rl.config import engine_env, prepare_kernels
        from vime.rl.sync import endpoint_of
        from vime.rl.trainer import Trainer, TrainerSpec
        from vime.vllm.launch import launch_engine
        from vime.vllm.plugin import ROUTED
        from vime.weights.transports import open_sender

        self.config = config
        prepare_kernels(config)
        self.engine = stack.enter_context(launch_engine(
            self.config.hf_checkpoint, device=args.device, dtype="bfloat16", ops=() if args.stock else ROUTED, env=engine_env(self.config),
            log_path=args.logs / "engine.log", max_model_len=self.config.max_model_len, kv_cache_bytes=int(self.config.kv_cache_gib * 2**30),
            max_num_batched_tokens=self.config.max_num_batched_tokens, start_timeout=args.start_timeout))
        self.trainer = Trainer(0, 1, TrainerSpec(self.config))
        self.sender = stack.enter_context(open_sender(endpoint_of(self.config, self.engine.url, self.engine.token)))
        self.version = 0

    def update(self, ledger: Any) -> tuple[float, dict[str, Any]]:
        """Seconds of one update, and the engine's report."""
        self.version += 1
        self.trainer.exporter.ledger = ledger
        started = time.perf_counter()
        report = self.sender.send(self.trainer.hf_weights(), self.version)
        if ledger is not None:
            assert ledger.entries  # its digests are waited for here
        return time.perf_counter() - started, report

    def source(self) -> Iterator[tuple[str, Any]]:
        """The policy's tensors as the checkpoint has them, on the trainer's device."""
        from vime.weights.checkpoint import HfCheckpoint

        checkpoint = HfCheckpoint(self.config.hf_checkpoint, self.trainer.device)
        return ((name, checkpoint[name].to(self.trainer.device)) for name in sorted(self.trainer._hf_names))

    def held(self) -> dict[str, str]:
        return {t["name"]: t["digest"] for t in self.engine.client.weights_digest()["tensors"]}


def rates(device: str, pairs: int, gib: float) -> dict[str, float]:
    """GB/s of digests, of one in torch's operations and of a plain copy on that device: medians over turns."""
    import torch

    from alignment import digest as plain
    from vime.weights.lanes import device_digest
    from vime.weights.manifest import digest_of

    x = torch.randn(int(gib * 2**29), device=device).bfloat16()
    y = torch.empty_like(x)
    ways: dict[str, Callable[[], object]] = {"device_digest": lambda: device_digest(x), "copy": lambda: y.copy_(x),
                                             "device_digest_in_torch": lambda: plain.device_digest(x), "host_digest": lambda: digest_of(x)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(pairs + 1):
        for name, run in ways.items():
            started = _now(device)
            run()
            if turn:  # the first compiles
                times[name].append(_now(device) - started)
    part = x[1:1 << 22]  # off any boundary
    assert device_digest(x) == plain.device_digest(x) and device_digest(part) == plain.device_digest(part.cpu())
    return {"GB": round(x.nbytes / 1e9, 3)} | {f"{name}_GBps": round(x.nbytes / 1e9 / statistics.median(t), 2) for name, t in times.items()}


def _now(device: str) -> float:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def judge(both: Both, ledger: Any, report: dict[str, Any], name: str, bad: tuple[str, ...] = ()) -> Verdict:
    """What engine and ledger hold, tensor by tensor, against the checkpoint; tensors of ``bad`` have to differ and no other."""
    from alignment.digest import device_digest, digest
    from vime.weights.ledger import Key
    from vime.weights.manifest import digest_of

    seen, held, problems, compared = ledger.entries["stacked"], both.held(), list[str](), 0
    form = device_digest if next(iter(seen.values())).startswith("lanes:") else digest
    for tensor, value in both.source():
        for side, same in (("engine", held.get(tensor) == digest_of(value)), ("ledger", seen.get(Key(tensor)) == form(value))):
            if same == (tensor in bad):
                problems.append(f"{tensor}: the {side} holds {'what it should not' if same else 'something else'}")
        compared += value.numel()
    if report["elements_compared"] != compared:
        problems.append(f"the engine read {report['elements_compared']} elements back")
    return Verdict(name, Status.FAIL if problems else Status.PASS, "; ".join(problems[:3]),
                   coverage={"elements": Coverage(compared, compared), "tensors": Coverage(len(held), len(held))})


def measure(both: Both, args: argparse.Namespace, progress: Any, numbers: dict[str, Any]) -> list[Verdict]:
    """The cost of the ledger, then what it and the engine say they hold, with and without a flipped bit: three verdicts."""
    from vime.weights.ledger import Ledger

    def ledger() -> Ledger:
        return Ledger("device" if args.device == "cuda" else "host")

    progress.phase("updates with the ledger on and off, in turn", 2 * args.pairs + 2)
    times: dict[str, list[float]] = {"on": [], "off": []}
    for turn in range(args.pairs + 1):
        for way in ("off", "on") if turn % 2 else ("on", "off"):
            seconds, report = both.update(ledger() if way == "on" else None)
            if turn:  # the first warms up
                times[way].append(seconds)
            progress.advance()
    cost = ratio_of(times["on"], times["off"]) | {f"{way}_s": round(statistics.median(times[way]), 3) for way in ("on", "off")}
    numbers["update"] = cost | {"elements": report["elements"], "tensors": report["tensors"], "transport": both.config.update_weight_transport}
    cost_verdict = within("cost of the ledger in an update", cost, BUDGET[args.device])
    progress.note(f"the ledger costs {cost['ratio']}x ({cost['on_s']} s against {cost['off_s']} s)")
    progress.phase("every element against the checkpoint")
    last = ledger()
    equal = judge(both, last, both.update(last)[1], "every element of an update")
    progress.phase("one bit flipped in the trainer")
    both.trainer.flip_bit(FLIPPED[0])
    last = ledger()
    control = judge(both, last, both.update(last)[1], "control: one bit of the final norm is named by engine and ledger", FLIPPED[1:])
    return [cost_verdict, equal, control]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="dense-7b")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--transport", default="", choices=("", "ipc", "nccl", "disk"))
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--digest-gib", type=float, default=2.0)
    parser.add_argument("--stock", action="store_true", help="without vime's operations on either side, on a GPU: starts quicker")
    parser.add_argument("--start-timeout", type=float, default=400.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, default=Path("."))
    args = parser.parse_args()
    from vime.commands.progress import TerminalProgress

    config = settings(args)
    start_as_a_trainer(config)
    began, numbers = time.time(), dict[str, Any]()
    args.logs.mkdir(parents=True, exist_ok=True)
    with TerminalProgress() as progress:
        progress.phase("digests beside a plain copy")
        numbers["digest"] = rates(args.device, args.pairs, args.digest_gib)
        progress.note(f"{numbers['digest']}")
        progress.phase("engine and trainer start")
        with contextlib.ExitStack() as stack:
            both = Both(config, args, stack)
            progress.note(f"both sides are up after {time.time() - began:.0f} s")
            verdicts = measure(both, args, progress, numbers)
    for verdict in verdicts:
        print(verdict.name, verdict.status.value, verdict.reason, numbers["update"] if "cost" in verdict.name else "", flush=True)
    claims = [evidence.claim(v, model=args.profile, device=args.device, dtype="bfloat16", topology="one rank and one engine") for v in verdicts]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(evidence.text(evidence.build(claims, kind="bench", numbers=numbers, seconds=time.time() - began)))
    return worst(v.status for v in verdicts).exit_code


if __name__ == "__main__":
    raise SystemExit(main())
