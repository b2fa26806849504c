"""Every choice of a run in one place, the ones that depend on the device included.

The loop itself must not know whether it runs on a CPU or on GPUs: it asks here. Names follow the flags that the
field knows (``--rollout-batch-size``, ``--update-weight-transport`` ...).
"""
from __future__ import annotations

import dataclasses
import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vime.contract import OPS
from vime.errors import BadInput
from vime.fp8 import MODES, problem, refuse_quantised
from vime.rl.reward import KINDS

DTYPES = ("float32", "bfloat16")
OPTIMIZERS = ("adam", "sgd")
DEVICES = ("cpu", "cuda")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
TRANSFORMER_IMPLS = ("local", "transformer_engine")
TRANSPORTS = ("disk", "ipc", "nccl")
TO_HF_MODES = ("raw", "bridge")
ATTENTION_BACKENDS = ("auto", "flash_attn", "flashinfer")
#: Order in which the requests of a step reach the engine. None of them may change a bit.
ARRIVALS = ("given", "reversed", "shuffled")
#: Where the trainer's ranks meet. They share one host; the engine may be elsewhere.
STORE_HOST = "127.0.0.1"
_BOTH_SIDES = {"TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
#: cuBLAS without a workspace cannot split a sum over K; read when its first product runs.
_STARVED = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "0"}


class ConfigError(BadInput):
    """A setting that cannot work; the message names it, what was found and what is expected."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run. ``ops`` are the operations that vime aligns: None for all, ``()`` for none (stock), or some.

    ``data`` empty means generated word problems. ``engine_url`` empty means an engine started here.
    """

    hf_checkpoint: str
    data: str = ""
    dtype: str = "bfloat16"
    device: str = "cpu"
    ops: tuple[str, ...] | None = None
    fp8: str = ""  # "blockwise": linear layers inside decoder layers run their forward in block FP8
    seed: int = 1234
    # rollout
    num_rollout: int = 3
    check_last_update: bool = True
    rollout_batch_size: int = 4
    n_samples_per_prompt: int = 4
    rollout_max_response_len: int = 32
    rollout_temperature: float = 1.0
    rollout_top_p: float = 1.0
    rollout_top_k: int = -1
    reward: str = "math"
    rollout_concurrency: int = 0  # requests in flight at once; 0: all of a step
    rollout_arrival: str = "given"
    # training
    optimizer: str = "adam"
    lr: float = 1e-5
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    clip_grad: float = 1.0
    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    max_tokens_per_gpu: int = 1024
    balance_data: bool = False
    accumulate_allreduce_grads_in_fp32: bool = True  # False: gradients have the model's dtype
    recompute: bool = False
    transformer_impl: str = "local"  # or "transformer_engine": whose modules the trainer's layers are built of; the same bits
    actor_num_gpus: int = 1
    expert_model_parallel_size: int = 1
    freeze_indexer: bool = True
    deterministic_mode: bool = True
    # engine
    engine_url: str = ""
    engine_token: str = ""
    engine_data_parallel_size: int = 1
    vllm_enable_deterministic_inference: bool = True
    vllm_attention_backend: str = "auto"
    vllm_keep_fp8_weights: bool = True  # with fp8: the engine keeps these weights quantised as well, half of their memory more
    enforce_eager: bool = False  # no CUDA graphs in the engine
    offload_rollout: bool = False  # the engine sleeps while the trainer steps, and gradients exist in the step only
    max_model_len: int = 1024
    max_num_batched_tokens: int = 512
    kv_cache_gib: float = 0.5
    kv_cache_dtype: str = "auto"
    # weight update
    update_weight_transport: str = "nccl"
    update_weight_disk_dir: str = ""
    update_weight_disk_keep_files: bool = False
    check_weight_update_equal: bool = True
    megatron_to_hf_mode: str = "raw"
    trainer_host: str = "127.0.0.1"
    # where things go
    output_dir: str = ""
    save: str = ""
    save_interval: int = 1
    load: str = ""
    use_tensorboard: bool = False
    use_wandb: bool = False
    wandb_mode: str = "offline"
    wandb_project: str = "vime"
    timeout_s: float = 900.0

    def __post_init__(self) -> None:
        def need(field: str, ok: bool, expected: str) -> None:
            if not ok:
                flag = "--" + field.replace("_", "-")
                raise ConfigError(f"{flag} is {getattr(self, field)!r}; expected {expected}")

        need("dtype", self.dtype in DTYPES, " or ".join(DTYPES))
        need("device", self.device in DEVICES, " or ".join(DEVICES))
        need("kv_cache_dtype", self.kv_cache_dtype in KV_CACHE_DTYPES, " or ".join(KV_CACHE_DTYPES))
        need("reward", self.reward in KINDS, " or ".join(KINDS))
        need("transformer_impl", self.transformer_impl in TRANSFORMER_IMPLS, " or ".join(TRANSFORMER_IMPLS))
        need("transformer_impl", self.transformer_impl == "local" or self.device == "cuda",
             "local with --device cpu (TransformerEngine needs a GPU; both give the same bits)")
        need("update_weight_transport", self.update_weight_transport in TRANSPORTS, ", ".join(TRANSPORTS))
        need("vllm_attention_backend", self.vllm_attention_backend in ATTENTION_BACKENDS, ", ".join(ATTENTION_BACKENDS))
        need("rollout_arrival", self.rollout_arrival in ARRIVALS, ", ".join(ARRIVALS))
        need("offload_rollout", not self.offload_rollout or (self.device == "cuda" and not self.engine_url),
             "no --offload-rollout with --device cpu (vLLM has no sleep mode there) or with an --engine-url")
        need("optimizer", self.optimizer in OPTIMIZERS, " or ".join(OPTIMIZERS))
        need("rollout_concurrency", self.rollout_concurrency >= 0, "0 (all at once) or more")
        need("wandb_mode", self.wandb_mode in ("offline", "online"), "offline or online")
        for field in ("adam_beta1", "adam_beta2"):
            need(field, 0 <= getattr(self, field) < 1, "0 or more and less than 1")
        for field in ("use_tensorboard", "use_wandb"):
            need(field, not getattr(self, field) or bool(self.output_dir), "an --output-dir for its files with it")
        need("megatron_to_hf_mode", self.megatron_to_hf_mode in TO_HF_MODES, " or ".join(TO_HF_MODES))
        if self.megatron_to_hf_mode == "bridge":
            from vime.weights.bridge import require

            require()
        need("num_rollout", self.num_rollout >= (0 if self.check_last_update else 1), "at least 1")
        for field in ("rollout_batch_size", "n_samples_per_prompt", "rollout_max_response_len",
                      "max_tokens_per_gpu", "actor_num_gpus", "save_interval", "expert_model_parallel_size",
                      "engine_data_parallel_size", "max_model_len", "max_num_batched_tokens"):
            need(field, getattr(self, field) >= 1, "at least 1")
        for field in ("lr", "weight_decay", "clip_grad", "eps_clip", "eps_clip_high", "kv_cache_gib"):
            need(field, 0 <= getattr(self, field) < math.inf, "0 or more, and finite")
        need("timeout_s", 0 < self.timeout_s <= threading.TIMEOUT_MAX, f"seconds above 0, and no more than {threading.TIMEOUT_MAX:.0f}")
        need("seed", 0 <= self.seed < 2**32, "a whole number from 0 to 2**32 - 1 (what every random state takes)")
        need("engine_url", not self.engine_url or self.engine_url.startswith(("http://", "https://")), "an address like http://host:port")
        need("engine_data_parallel_size", self.engine_data_parallel_size == 1 or not self.engine_url,
             "1 with an --engine-url (its ranks are started with that engine)")
        need("expert_model_parallel_size", self.actor_num_gpus % self.expert_model_parallel_size == 0,
             f"a divisor of --actor-num-gpus ({self.actor_num_gpus})")
        need("rollout_temperature", 0 < self.rollout_temperature < math.inf, "more than 0 (greedy tokens have no log-probability ratio), and finite")
        need("rollout_top_p", self.rollout_top_p == 1.0, "1.0 (log-probabilities are over the full vocabulary)")
        need("rollout_top_k", self.rollout_top_k == -1, "-1 (log-probabilities are over the full vocabulary)")
        unknown = sorted(set(self.ops or ()) - set(OPS))
        if unknown:
            raise ConfigError(f"unknown operation {', '.join(unknown)}; expected some of {', '.join(OPS)}")
        need("fp8", self.fp8 in MODES, "blockwise, or nothing")
        if self.fp8 and (reason := problem(OPS if self.ops is None else self.ops, experts=False)) is not None:
            raise ConfigError(reason)
        if self.update_weight_transport == "ipc" and self.device == "cpu":
            raise ConfigError("--update-weight-transport ipc shares device memory and needs --device cuda; use nccl or disk")
        if self.update_weight_transport == "disk" and not self.update_weight_disk_dir:
            raise ConfigError("--update-weight-transport disk needs --update-weight-disk-dir, a folder that both sides reach")

    @property
    def aligned(self) -> bool:
        """True if any operation is aligned. Stock numerics depend on packing, so the trainer then packs nothing."""
        return self.ops is None or bool(self.ops)

    def replace(self, **changes: Any) -> TrainConfig:
        return dataclasses.replace(self, **changes)


def trainer_device(config: TrainConfig, rank: int) -> str:
    """Device string of a trainer rank."""
    return "cpu" if config.device == "cpu" else f"cuda:{rank}"


def engine_env(config: TrainConfig) -> dict[str, str]:
    """Variables for an engine started here."""
    if config.device == "cpu":
        return _BOTH_SIDES | {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "CUDA_VISIBLE_DEVICES": ""}
    env = _BOTH_SIDES | _STARVED | _attention_env(config)
    if config.vllm_enable_deterministic_inference and not config.aligned:
        env["VLLM_BATCH_INVARIANT"] = "1"  # vLLM's own mode; with vime's operations it has nothing left to do
    return env


def _attention_env(config: TrainConfig) -> dict[str, str]:
    """Which kernel both sides take; see ``vime.ops.cuda.ATTENTION_ENV``."""
    return {"VIME_ATTENTION": "flashinfer" if config.vllm_attention_backend == "flashinfer" else "flash_attn"}


def weight_transport(config: TrainConfig) -> tuple[str, str]:
    """``(transport, backend)``: what ``--update-weight-transport`` means on this device."""
    if config.update_weight_transport == "nccl":
        return "process_group", "gloo" if config.device == "cpu" else "nccl"
    return config.update_weight_transport, "gloo"


def kernels_missing(config: TrainConfig) -> bool:
    """True if vime's own kernels have to be compiled on this machine before the run (once)."""
    if config.device != "cpu" or not config.aligned:
        return False
    from vime.ops.cpu import build

    return not build.library()[1].exists()


def prepare_kernels(config: TrainConfig) -> None:
    """Compile them now, if they are missing, so that no process waits for a compiler inside a command with a limit.

    Raises :class:`vime.ops.cpu.build.BuildError`.
    """
    if kernels_missing(config):
        from vime.ops.cpu import build

        build.load()


def trainer_env(config: TrainConfig) -> dict[str, str]:
    """Variables that must be set before the trainer's frameworks are imported."""
    if config.device == "cpu":
        threads = max(1, len(os.sched_getaffinity(0)) // config.actor_num_gpus)
        return _BOTH_SIDES | {"OMP_NUM_THREADS": str(threads), "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return _BOTH_SIDES | _STARVED | {"NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"} | _attention_env(config)


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """The parsed ``config.json`` of a checkpoint folder, before anything is started on it. Names, shapes and dtypes of its
    tensors are held against it; their values are not read.

    Raises:
        ConfigError: the folder does not exist.
        vime.weights.folders.CheckpointError: it is incomplete; the file is named.
        vime.fp8.QuantisedCheckpoint: its weights are quantised.
        vime.weights.errors.WeightError: its tensors are not those that the config describes.
        vime.megatron.model.UnsupportedModel: its architecture is not covered.
    """
    from vime.megatron.model import UnsupportedModel, check_config
    from vime.weights.checkpoint import HfCheckpoint
    from vime.weights.policy import left_out

    if not Path(folder).is_dir():
        raise ConfigError(f"--hf-checkpoint {folder} does not exist; expected a local Hugging Face folder "
                          "with config.json and *.safetensors")
    checkpoint = HfCheckpoint(folder)
    hf_config = dict(checkpoint.config)
    refuse_quantised(hf_config, checkpoint, folder)
    try:
        check_config(hf_config)
        _check_rope(hf_config)
        family = _family(hf_config)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{Path(folder) / 'config.json'}: {error}") from None
    left = left_out(hf_config, checkpoint)
    for name, (dtype, _) in checkpoint.specs.items():
        if not dtype.is_floating_point and name not in left:
            raise ConfigError(f"{name} in {Path(folder) / checkpoint.files[name]} is {dtype}; expected weights in floating point")
    checkpoint.check(family.plan(hf_config, hf_names={name: file for name, file in checkpoint.files.items() if name not in left}))
    return hf_config


def require_fit(config: TrainConfig, hf_config: Mapping[str, Any]) -> None:
    """Refuse settings that the model cannot have, in the words of the trainer's rank that builds it, before anything is started.

    Raises:
        vime.megatron.model.UnsupportedModel, vime.latent.UnsupportedLatent: the cache's dtype, a trained indexer, TransformerEngine's modules.
    """
    from vime.megatron.model import check_layers, check_settings

    check_settings(hf_config, config.kv_cache_dtype, config.freeze_indexer)
    if config.transformer_impl != "local":
        check_layers(hf_config, config.transformer_impl, config.device)


def _check_rope(hf_config: Mapping[str, Any]) -> None:
    """Latent attention looks at its own."""
    from vime.latent import LATENT
    from vime.megatron.model import UnsupportedModel, head_dim, rope_parameters
    from vime.ops.rope import inverse_frequencies

    if hf_config["model_type"] in LATENT:
        return
    try:
        inverse_frequencies(head_dim(hf_config), *rope_parameters(hf_config))
    except KeyError as missing:
        raise UnsupportedModel(f"rope_scaling has no field {missing}, which its type needs") from None
    except ValueError as error:
        raise UnsupportedModel(str(error)) from None


def _family(hf_config: Mapping[str, Any]) -> Any:
    """The family that converts this model's weights. The engine goes by ``architectures``, the trainer by ``model_type``, so both
    have to name it."""
    from vime.megatron.model import UnsupportedModel
    from vime.weights.families import families

    family = families()[hf_config["model_type"]]
    found = hf_config.get("architectures") or []
    if not isinstance(found, list) or not set(found) & set(family.architectures):
        raise UnsupportedModel(f"architectures is {found or 'missing'}; a {family.name} model has {' or '.join(family.architectures)}")
    return family
