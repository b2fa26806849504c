"""Measures what weights cost.

Digests, conversion against plain copying, an update with and without its ledger, the Gemma 4 layout on 16 ranks.

It prints one JSON line a measurement. Times are medians of alternating pairs, so that a busy machine slows both sides.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from vime.weights.checkpoint import HfCheckpoint
from vime.weights.convert import export
from vime.weights.families import family_for
from vime.weights.gather import Gatherer, ShardStore
from vime.weights.groups import Groups
from vime.weights.ledger import Ledger
from vime.weights.manifest import arrival_problems
from vime.weights.online import Proof
from vime.weights.roundtrip import RoundTrip, start_ranks
from vime.weights.topology import Sizes, Topology, layers_of
from vime.weights.torch_dist.read import TorchDist, to_hf
from vime.weights.torch_dist.write import write
from vime.weights.transports import Endpoint, open_receiver
from vime.weights.transports.process_group import ProcessGroupSender
from vime.weights.writer import HfWriter

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "tie_word_embeddings": False}
GEMMA4 = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "hidden_size": 64, "intermediate_size": 96,
          "num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "global_head_dim": 32,
          "num_global_key_value_heads": 2, "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 128,
          "moe_intermediate_size": 32, "hidden_size_per_layer_input": 0, "vocab_size": 1024}


def make(folder: Path, cfg: dict, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A random checkpoint of a config."""
    config = folder.parent / "config.json"
    config.write_text(json.dumps(cfg))
    specs = {name: (dtype, shape) for name, shape in family_for(cfg).plan(cfg).hf_tensors().items()}
    noise = torch.randn(1 << 24).to(dtype)
    with HfWriter(folder, specs, copy=[config]) as writer:
        for number, (name, (_, shape)) in enumerate(specs.items()):
            count = int(torch.tensor(shape).prod())
            repeated = noise.roll(number).repeat(-(-count // noise.numel()))[:count]
            writer.write(name, repeated.reshape(shape))
    return folder


def pairs(ours: Callable[[], None], base: Callable[[], None], count: int) -> tuple[float, float]:
    """Median seconds of both, measured in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(count):
        for run, seconds in zip((base, ours), times[::-1], strict=True):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def digest(args: argparse.Namespace) -> dict:
    from alignment.digest import digest as one

    x = torch.randn(args.mb << 18)
    y = torch.empty_like(x)
    ours, copy = pairs(lambda: one(x), lambda: y.copy_(x), args.pairs)
    return {"GB": x.nbytes / 1e9, "digest_GBps": x.nbytes / 1e9 / ours, "copy_GBps": x.nbytes / 1e9 / copy}


def convert(args: argparse.Namespace, work: Path) -> dict:
    """Both ways against reading and writing the same bytes. Memory of mapped files is not counted: the page cache owns it."""
    layers = max(1, round(args.gb * 1e9 / 2 / 45e6))
    folder = args.hf or work / "hf"
    source = HfCheckpoint(folder if folder.exists() else make(folder, {**LLAMA, "num_hidden_layers": layers}))
    plan = family_for(source.config).plan(source.config, source.files, vocab_multiple=128)
    out: dict = {"GB": source.nbytes / 1e9}

    def copy_all() -> None:
        for file in sorted(set(source.files.values())):
            with open(source.folder / file, "rb") as a, open(work / "copy", "wb") as b:
                shutil.copyfileobj(a, b, 16 << 20)
                b.flush()
                os.fsync(b.fileno())
        (work / "copy").unlink()

    def there() -> None:
        shutil.rmtree(work / "td", ignore_errors=True)
        write(source, plan, work / "td")

    def back() -> None:
        shutil.rmtree(work / "hf2", ignore_errors=True)
        to_hf(TorchDist(work / "td"), source.folder, work / "hf2")

    for name, run in (("to_torch_dist", there), ("to_hf", back)):
        if name not in args.way:
            continue
        if name == "to_hf" and not (work / "td").exists():
            there()
        with Memory() as memory:
            ours, base = pairs(run, copy_all, args.pairs)
        out[name] = {"s": ours, "read_write_s": base, "ratio": ours / base, "peak_GB": memory.peak / 1e9}
    return out


class Memory:
    """The most anonymous memory this process had while it was open, beyond what it had before, in bytes."""

    def __enter__(self) -> Memory:
        self.peak, self._before, self._done = 0, self._now(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.peak = max(self.peak, self._now() - self._before)

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


class Receiver:
    """The engine's end without an engine: receives in a thread and verifies, as an engine does before it loads."""

    def begin_update(self, version: int, transport: dict, check_equal: bool) -> None:
        self.thread = threading.Thread(target=self.run, args=(transport,))
        self.thread.start()

    def run(self, transport: dict) -> None:
        received, manifest = open_receiver(transport, torch.device("cpu")).receive()
        self.problems = arrival_problems(manifest, received)

    def finish_update(self, version: int) -> dict:
        self.thread.join()
        assert self.problems == [], self.problems
        return {}

    def close(self) -> None: ...


def ledger(args: argparse.Namespace, work: Path) -> dict:
    """One update over gloo, from the shards to verified tensors at a receiver, with the ledger on and off."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    layers = max(1, round(args.gb * 1e9 / 2 / 45e6))
    source = HfCheckpoint(make(work / "hf", {**LLAMA, "num_hidden_layers": layers}))
    plan = family_for(source.config).plan(source.config, source.files)
    topology = Topology.build(Sizes(), layers_of(plan))
    held = ShardStore(source, plan, topology, 0)
    local = {name: held[name].clone() for name in held}

    def update(tap: Ledger | None) -> None:
        gatherer = Gatherer(plan, Groups.create(topology), local, tap)
        sender = ProcessGroupSender(Endpoint(url="http://127.0.0.1:9"))
        sender.client = Receiver()  # type: ignore[assignment]
        sender.send(export(gatherer, tap, Proof(gatherer).watch()), 1)

    on, off = pairs(lambda: update(Ledger()), lambda: update(None), args.pairs)
    return {"GB": source.nbytes / 1e9, "on_s": on, "off_s": off, "ratio": on / off}


def gemma4(args: argparse.Namespace, work: Path) -> dict:
    """128 experts x 30 layers at small width, TP2/PP2/EP4 on 16 ranks, every stage judged."""
    folder = make(work / "hf", GEMMA4)
    out = {}
    with start_ranks(16, work) as ranks:
        for etp in args.etp:
            start = time.perf_counter()
            with RoundTrip(folder, Sizes(tp=2, pp=2, ep=4, etp=etp), ranks=ranks) as trip:
                verdict = trip.run()
            out[f"etp{etp}"] = {"s": time.perf_counter() - start, "verdict": verdict.status.value,
                                **{unit: str(c) for unit, c in verdict.coverage.items()}}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["digest", "convert", "ledger", "gemma4"])
    parser.add_argument("--gb", type=float, default=5.0, help="size of the checkpoint to convert or to send")
    parser.add_argument("--mb", type=int, default=512, help="size of the tensor to digest")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--etp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--hf", type=Path, help="convert: this checkpoint (made and kept, if it is not there) instead of a temporary one")
    parser.add_argument("--way", nargs="+", choices=["to_torch_dist", "to_hf"], default=["to_torch_dist", "to_hf"], help="convert: which way")
    parser.add_argument("--dir", type=Path, help="where the files go; default: the temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as work:
        result = digest(args) if args.what == "digest" else {"convert": convert, "ledger": ledger, "gemma4": gemma4}[args.what](args, Path(work))
    print(json.dumps({"bench": args.what, **result}))


if __name__ == "__main__":
    main()
