"""How an engine is built, and what can be said to be wrong with that before vLLM is even imported."""
from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from vime.vllm.protocol import EngineError

GIB = 1 << 30
#: A step of any other size runs in the next larger graph; rows are independent, so that changes no bit.
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class EngineConfig(msgspec.Struct, kw_only=True):
    """How to build the engine. What is aligned comes from ``VIME_PLUGIN``, not from here."""

    model: str
    dtype: str = "float32"
    device: str = "cpu"
    max_model_len: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.5
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    block_size: int = 32
    prefix_caching: bool = True
    load_format: str = "auto"
    sleep_mode: bool = False
    cuda_graphs: bool = True

    def graph_sizes(self) -> list[int]:
        """Tokens of a step that a CUDA graph is captured for; none on a CPU or without graphs.

        None beyond the longest sequence: vLLM captures a step of ``n`` tokens with requests that claim ``n`` keys each, and
        a block table has room for ``max_model_len`` of them, so the kernel would read past its end.
        """
        if self.device == "cpu" or not self.cuda_graphs:
            return []
        longest = min(self.max_num_batched_tokens, self.max_model_len or self.max_num_batched_tokens)
        return [n for n in GRAPH_SIZES if n <= longest]

    def kv_bytes(self) -> int | None:
        """Bytes of the KV cache; on CPU a small fixed size unless given, on a GPU vLLM's own share."""
        return self.kv_cache_bytes if self.kv_cache_bytes or self.device != "cpu" else GIB // 2


def preflight(config: EngineConfig, aligned: bool) -> dict[str, tuple[torch.dtype, tuple[int, ...]]] | None:
    """Open the checkpoint folder and check architecture and memory.

    Returns:
        name -> (dtype, shape) of every tensor that an update has to bring; None for random weights.

    Raises:
        CheckpointError: the folder is missing, incomplete or cut short.
        UnknownArchitecture: ``aligned``, and no family covers it.
        EngineError: too little memory.
    """
    from vime.weights.checkpoint import HfCheckpoint, spec_bytes

    if config.load_format == "dummy":
        return None
    checkpoint = HfCheckpoint(Path(config.model))
    if aligned:
        from vime.weights.families import family_for

        family_for(checkpoint.config)
    if config.device == "cpu":
        itemsize = {"float32": 4, "bfloat16": 2}.get(config.dtype, 4)
        elements = sum(spec_bytes(s) // s[0].itemsize for s in checkpoint.specs.values())
        _require_memory(config, elements * itemsize)
    return {name: spec for name, spec in checkpoint.specs.items() if not name.endswith("rotary_emb.inv_freq")}


def _require_memory(config: EngineConfig, weight_bytes: int) -> None:
    import psutil

    cache_bytes = config.kv_bytes() or 0
    need = weight_bytes + cache_bytes + GIB // 2
    have = psutil.virtual_memory().available
    if need > have:
        raise EngineError(
            f"too little memory for {config.model} in {config.dtype}: about {need / GIB:.1f} GiB needed (weights "
            f"{weight_bytes / GIB:.1f}, KV cache {cache_bytes / GIB:.1f}, 0.5 for the rest), {have / GIB:.1f} GiB available. "
            "Use a smaller KV cache (--kv-cache-bytes), bfloat16, or a smaller model.")
