"""How an engine is built, and what can be said to be wrong with that before vLLM is even imported."""
from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from vime.fp8 import problem, refuse_quantised
from vime.latent import experts, latent
from vime.vllm.protocol import EngineError

GIB = 1 << 30
#: A step of any other size runs in the next larger graph; rows are independent, so that changes no bit.
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


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
    kv_cache_dtype: str = "auto"
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    data_parallel_port: int = 0
    prefix_caching: bool = True
    load_format: str = "auto"
    sleep_mode: bool = False
    cuda_graphs: bool = True
    keep_fp8_weights: bool = True  # block-FP8 weights stay quantised beside the masters: half of these weights' memory again (GPU)
    async_scheduling: bool = True  # on a GPU: the next step is prepared while this one runs

    def graph_sizes(self) -> list[int]:
        """Tokens of a step that a CUDA graph is captured for; none on a CPU or without graphs. Larger steps run eager."""
        if self.device == "cpu" or not self.cuda_graphs:
            return []
        return [n for n in GRAPH_SIZES if n <= self.max_num_batched_tokens]

    def memory_share(self) -> float:
        """What vLLM wants free of the GPU's memory at its start. With a KV cache of a given size it takes no share of the memory, so
        a busy GPU is no reason to refuse."""
        return min(self.gpu_memory_utilization, 0.05) if self.kv_bytes() else self.gpu_memory_utilization

    def kv_bytes(self) -> int | None:
        """Bytes of the KV cache; on CPU a small fixed size unless given, on a GPU vLLM's own share."""
        return self.kv_cache_bytes if self.kv_cache_bytes or self.device != "cpu" else GIB // 2


#: Values of ``kv_cache_dtype``: the model dtype, or the compressed part of latent attention's rows in E4M3.
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")


def preflight(config: EngineConfig, ops: Sequence[str], fp8: str = "") -> dict[str, tuple[torch.dtype, tuple[int, ...]]] | None:
    """Open the checkpoint folder and check architecture and memory.

    Returns:
        name -> (dtype, shape) of every tensor that an update has to bring; None for random weights.

    Raises:
        CheckpointError: the folder is missing, incomplete or cut short.
        UnknownArchitecture: something is to be aligned, and no family covers it.
        UnsupportedLatent: latent attention that is not covered.
        QuantisedCheckpoint: the checkpoint is quantised.
        ConfigMismatch: the files hold prediction layers that the config does not count.
        EngineError: experts, FP8 or a cache dtype that cannot be aligned as asked, or too little memory.
    """
    if config.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise EngineError(f"kv_cache_dtype is {config.kv_cache_dtype!r}; expected {' or '.join(KV_CACHE_DTYPES)}")
    from vime.weights.checkpoint import HfCheckpoint
    from vime.weights.folders import spec_bytes
    from vime.weights.policy import describe, left_out

    if config.load_format == "dummy":
        return None
    checkpoint = HfCheckpoint(Path(config.model))
    refuse_quantised(checkpoint.config, checkpoint, config.model)
    if fp8 and (found := problem(ops, experts(checkpoint.config) is not None)) is not None:
        raise EngineError(found)
    if ops:
        from vime.weights.families import family_for

        family_for(checkpoint.config)
    _require_whole_layers(config, checkpoint.config, ops)
    if config.device == "cpu":
        itemsize = {"float32": 4, "bfloat16": 2}.get(config.dtype, 4)
        elements = sum(spec_bytes(s) // s[0].itemsize for s in checkpoint.specs.values())
        _require_memory(config, elements * itemsize)
    unused = left_out(checkpoint.config, checkpoint.specs)
    if unused:
        print(describe(unused), file=sys.stderr, flush=True)
    return {name: spec for name, spec in checkpoint.specs.items() if name not in unused and not name.endswith("rotary_emb.inv_freq")}


def _require_whole_layers(config: EngineConfig, hf_config: Mapping[str, Any], ops: Sequence[str]) -> None:
    """Latent attention and experts are evaluated as whole layers: the operations inside cannot be switched alone."""
    is_latent = "attention" in ops and latent(hf_config) is not None
    is_moe = "moe" in ops and experts(hf_config) is not None
    for found, op, what, inside in ((is_latent, "attention", "latent attention", ("linear", "norm", "rope")),
                                    (is_moe, "moe", "an expert layer", ("linear", "activation"))):
        missing = [name for name in inside if name not in ops]
        if found and missing:
            raise EngineError(f"{what} of {hf_config.get('model_type')} is aligned as a whole: {op} is on, {', '.join(missing)} off. "
                              f"Switch {', '.join(missing)} on, or {op} off, on both sides")
    size = config.data_parallel_size
    if size > 1:
        spread = experts(hf_config)
        if spread is None or not is_moe:
            raise EngineError(f"data_parallel_size is {size}: an engine of several ranks spreads the experts of a model over them, with the "
                              f"operation moe aligned; this is {hf_config.get('model_type')} on {config.device} with "
                              f"{', '.join(ops) or 'nothing'} aligned. Start one engine, or several independent ones")
        if spread.count % size or not 0 <= config.data_parallel_rank < size or not config.data_parallel_port:
            raise EngineError(f"{spread.count} experts over data_parallel_size {size} (rank {config.data_parallel_rank}, port "
                              f"{config.data_parallel_port}) does not work out; expected a divisor of the experts")
    if config.kv_cache_dtype != "auto" and not is_latent:
        raise EngineError(f"kv_cache_dtype is {config.kv_cache_dtype!r}, which vime covers for latent attention with the operation "
                          f"attention aligned; this is {hf_config.get('model_type')} with {', '.join(ops) or 'nothing'} aligned. Use auto")


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
