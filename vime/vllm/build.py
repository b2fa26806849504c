"""What vLLM is asked for when an engine is built: settings of the process, and the arguments of its own engine."""
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from vime.vllm.config import EngineConfig
from vime.vllm.eager import graph_mode

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs


def prepare_process(config: EngineConfig) -> None:
    """Set what vLLM reads from the environment. Call it before anything of vLLM is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model must be reachable in this process
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the plugin replaces parts of the first one
    if config.device == "cpu":
        # vLLM's own bf16 attention uses AMX tiles without asking Linux for them; whether another library asked
        # before decides between working and an illegal instruction.
        torch.cpu._init_amx()
    if config.data_parallel_size > 1:
        os.environ |= {"VLLM_DP_SIZE": str(config.data_parallel_size), "VLLM_DP_RANK": str(config.data_parallel_rank),
                       "VLLM_DP_RANK_LOCAL": str(config.data_parallel_rank), "VLLM_DP_MASTER_IP": "127.0.0.1",
                       "VLLM_DP_MASTER_PORT": str(config.data_parallel_port)}


def engine_arguments(config: EngineConfig, ops: Sequence[str], dummy: bool) -> EngineArgs:
    """The arguments of vLLM's engine under ``config`` with ``ops`` aligned; ``dummy``: no tensors are loaded."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    from vime.vllm import receiver

    receiver.register()
    extra: dict[str, Any] = {}
    if config.max_model_len is not None:
        extra["max_model_len"] = config.max_model_len
    if config.data_parallel_size > 1:
        extra |= {"enable_expert_parallel": True, "distributed_executor_backend": "uni"}  # the model stays in this process
    if config.kv_cache_dtype != "auto":
        extra["kv_cache_dtype"] = config.kv_cache_dtype
    if config.kv_bytes() is not None:
        extra["kv_cache_memory_bytes"] = config.kv_bytes()
    if "attention" in ops and config.device != "cpu":
        extra["attention_config"] = {"backend": "CUSTOM"}
    if "logprob" not in ops:
        # Stock log-probabilities are of the unscaled logits unless asked; the trainer's are at the temperature.
        extra["logprobs_mode"] = "processed_logprobs"
    graphs = config.graph_sizes()
    if graphs:  # no torch.compile, whose fusions round elsewhere
        extra["compilation_config"] = {"mode": 0, "cudagraph_mode": graph_mode(config.model, ops), "cudagraph_capture_sizes": graphs}
    dtype: Any = config.dtype
    return EngineArgs(
        model=config.model, dtype=dtype, skip_tokenizer_init=True, enforce_eager=not graphs, seed=0, block_size=config.block_size,
        enable_prefix_caching=config.prefix_caching, enable_chunked_prefill=True,
        async_scheduling=config.async_scheduling and config.device != "cpu" and config.data_parallel_size == 1,
        max_num_batched_tokens=config.max_num_batched_tokens, max_num_seqs=config.max_num_seqs,
        load_format="dummy" if dummy else config.load_format,
        gpu_memory_utilization=config.memory_share(), enable_sleep_mode=config.sleep_mode, disable_log_stats=True,
        weight_transfer_config=WeightTransferConfig(backend=receiver.BACKEND), generation_config="vllm", **extra)
