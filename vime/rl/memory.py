"""Whether a run fits into the memory there is, before it is started.

An estimate, by what each part must hold; it errs on the small side, so that a run that is refused could not have
worked. The kernel's way of saying "too little memory" is to end a process in the middle of something.
"""
from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vime.errors import BadInput
from vime.rl.config import TrainConfig

GIB = 2**30
#: Where control groups lie: the second version's, and in a folder of its own the first one's.
GROUPS = Path("/sys/fs/cgroup")
#: Interpreter, torch and a framework, resident in each process that loads them.
_PROCESS_BYTES = GIB // 2
#: Of quantised weights a process keeps at most so much (``KEPT_BYTES`` of :mod:`vime.ops.cpu.fp8`).
FP8_KEPT_BYTES = 2 << 30


class NotEnoughMemory(BadInput):
    """The run needs more memory than is available; the message has both numbers and what to change."""


def available_bytes() -> int:
    """What this process and its children may still take: the machine's, or less where a control group caps it."""
    import psutil

    free = psutil.virtual_memory().available
    for limit, used, folder in (("memory.max", "memory.current", GROUPS), ("memory.limit_in_bytes", "memory.usage_in_bytes", GROUPS / "memory")):
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
            taken = int((folder / used).read_text()) - _file_cache(folder)
            free = min(free, int((folder / limit).read_text()) - taken)
    return free


def _file_cache(folder: Path) -> int:
    """Bytes of a control group that hold files, which the kernel gives back where memory is needed."""
    found = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines() if line.count(" ") == 1)
    whole = "total_" if "total_inactive_file" in found else ""  # the first version's own counters leave out what is below
    return sum(int(found.get(f"{whole}{name}", 0)) for name in ("inactive_file", "active_file"))


def parameters(hf_config: Mapping[str, Any]) -> int:
    """Number of weights of a dense decoder by its config."""
    hidden, layers, vocab = hf_config["hidden_size"], hf_config["num_hidden_layers"], hf_config["vocab_size"]
    heads = hf_config["num_attention_heads"]
    head = hf_config.get("head_dim") or hidden // heads
    kv = hf_config.get("num_key_value_heads") or heads
    layer = hidden * head * (2 * heads + 2 * kv) + 3 * hidden * hf_config["intermediate_size"]
    return layers * layer + vocab * hidden * (1 if hf_config.get("tie_word_embeddings") else 2)


def needed_bytes(config: TrainConfig, hf_config: Mapping[str, Any]) -> dict[str, int]:
    """Bytes by part: the trainer's ranks, the engine if it is started here."""
    count = parameters(hf_config)
    width = 4 if config.dtype == "float32" else 2
    gradient = 4 if config.accumulate_allreduce_grads_in_fp32 else width
    # Adam: two fp32 moments, and an fp32 master copy of bf16 weights
    states = 0 if config.optimizer == "sgd" else 8 if config.dtype == "float32" else 12
    logits = config.max_tokens_per_gpu * hf_config["vocab_size"] * (width + 4)
    quantised = min(count * (width + 4), FP8_KEPT_BYTES) if config.fp8 else 0
    trainer = count * (width + gradient + states) + logits + quantised + _PROCESS_BYTES
    parts = {"trainer": trainer * config.actor_num_gpus}
    if not config.engine_url:
        parts["engine"] = (count * width + int(config.kv_cache_gib * GIB) + quantised + _PROCESS_BYTES) * config.engine_data_parallel_size
    return parts


def require_memory(config: TrainConfig, hf_config: Mapping[str, Any]) -> None:
    """Raise :class:`NotEnoughMemory` if the parts on this machine's CPU do not fit. A GPU tells for itself."""
    if config.device != "cpu":
        return
    parts, have = needed_bytes(config, hf_config), available_bytes()
    need = sum(parts.values())
    if need > have:
        listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
        raise NotEnoughMemory(
            f"this run needs about {need / GIB:.1f} GiB of memory ({listed}), {have / GIB:.1f} GiB are available. "
            "Use --dtype bfloat16, fewer ranks (--actor-num-gpus), a smaller --max-tokens-per-gpu or --kv-cache-gib, or a smaller model.")
