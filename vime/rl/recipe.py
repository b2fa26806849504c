"""What makes two runs the same run, and what must not make a difference.

The **recipe** is every setting that may change a bit, with the model and the data by their content and not by their
place. The **conditions** are what a run happened under (folder, hash seed of the controller, concurrency, order of
arrival, log level); they are written down so that a comparison can show that they did differ. A setting that would
make a rerun a matter of luck is refused by name, before anything is started.
"""
from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vime.determinism import ENVIRONMENT, FLASH_ATTENTION_3, hash_seed_fixed
from vime.errors import BadInput
from vime.rl.config import TrainConfig

#: Fields of :class:`TrainConfig` that change where, how long or in which order things happen, and no bit of them.
#: ``num_rollout`` is among them because nothing of a step depends on how many follow.
CONDITIONS = frozenset({
    "num_rollout", "check_last_update", "engine_url", "engine_token", "engine_data_parallel_size", "max_model_len",
    "max_num_batched_tokens", "kv_cache_gib", "enforce_eager", "offload_rollout", "vllm_keep_fp8_weights", "transformer_impl",
    "update_weight_transport", "update_weight_disk_dir", "update_weight_disk_keep_files", "check_weight_update_equal",
    "trainer_host", "output_dir", "timeout_s", "save", "save_interval", "load", "rollout_concurrency", "rollout_arrival",
    "use_tensorboard", "use_wandb", "wandb_mode", "wandb_project"})
#: Fields that :func:`topology` holds.
_TOPOLOGY = frozenset({"device", "actor_num_gpus", "expert_model_parallel_size"})
#: Fields that name a place; their content is in the recipe instead.
PLACES = frozenset({"hf_checkpoint", "data"})


class NotReproducible(BadInput):
    """A setting, a variable or a package with which two runs need not be the same. Names it and says what to change."""


#: Flag of other trainers -> why it is refused. All of them trade the order of something for speed or memory.
REFUSED = {
    "over_sampling_batch_size": "over-sampling keeps whichever samples finish first, which is a matter of speed; sample exactly "
                                "--rollout-batch-size prompts",
    "async_rollout": "an asynchronous rollout uses weights that depend on when it was started; the loop here is synchronous",
    "optimizer_cpu_offload": "an offloaded optimizer updates parameters in the order in which copies arrive, and in the CPU's own "
                             "rounding; keep the optimizer on the device",
    "use_precision_aware_optimizer": "a precision-aware optimizer rounds its moments and master weights, so that a restart or another "
                                     "split of them gives other bits; keep fp32 moments and masters",
    "overlap_grad_reduce": "overlapped gradient reduction adds buckets in the order in which they become ready; reduce after the "
                           "backward pass",
}


def refuse_flags(**given: Any) -> None:
    """Raise NotReproducible for a flag of :data:`REFUSED` that is set."""
    for name, value in given.items():
        if value:
            raise NotReproducible(f"--{name.replace('_', '-')}: {REFUSED[name]}.")


def recipe(config: TrainConfig, weights: Mapping[str, str], problems: Sequence[Any]) -> dict[str, Any]:
    """The recipe as JSON-ready facts. ``weights`` are the digests of the initial weights, ``problems`` the data in order."""
    fields = dataclasses.asdict(config)
    facts: dict[str, Any] = {name: _plain(value) for name, value in sorted(fields.items()) if name not in CONDITIONS | PLACES | _TOPOLOGY}
    if config.ops is not None:  # what is not aligned may differ between the two specs of Megatron
        facts["transformer_impl"] = config.transformer_impl
    folded = hashlib.sha256(json.dumps(sorted(weights.items())).encode()).hexdigest()[:32]
    text = "\x1e".join(f"{p.prompt_id}\x1f{p.question}\x1f{p.answer}" for p in problems)
    return facts | {"model": folded, "data_digest": hashlib.sha256(text.encode()).hexdigest()[:32], "problems": len(problems)}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def fingerprint(facts: Mapping[str, Any]) -> str:
    """32 hex digits over a recipe."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def topology(config: TrainConfig) -> dict[str, Any]:
    """How the trainer is cut over processes; other cuts add in other places."""
    return {"device": config.device, "ranks": config.actor_num_gpus, "tensor_parallel": 1, "pipeline_parallel": 1,
            "expert_parallel": config.expert_model_parallel_size}


def versions(contract: str) -> dict[str, str]:
    """Installed versions, the contract that both sides hold (which implementation of every operation), and a digest of this code:
    a version number stays the same while the code changes."""
    import alignment
    import vime
    from alignment import machine

    code = machine.sources([Path(vime.__file__).parent, Path(alignment.__file__).parent])
    return machine.versions() | {"contract": contract, "code": code}


def hardware() -> dict[str, Any]:
    """What may choose a kernel. Cores and memory may not."""
    from alignment import machine

    found = machine.hardware()
    return {name: found[name] for name in ("cpu", "cpu_features", "gpus")}


def conditions(config: TrainConfig) -> dict[str, Any]:
    """What this run happens under and must not matter. Names no place: folders appear as digests."""
    def place(path: str) -> str:
        return hashlib.sha256(path.encode()).hexdigest()[:12]

    seed = os.environ.get("PYTHONHASHSEED")
    fixed = not sys.flags.hash_randomization or hash_seed_fixed()
    return {
        "folder": place(f"{Path.cwd()}|{Path(config.output_dir).absolute()}|{os.environ.get('TMPDIR', '')}"),
        "hash_seed": "unset" if seed is None else f"{seed}, {'in effect' if fixed else 'set too late to have an effect'}",
        "concurrency": config.rollout_concurrency, "arrival": config.rollout_arrival,
        "log_level": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"), "process": os.getpid(),
    }


def require(config: TrainConfig) -> list[str]:
    """Refuse what would make a rerun a matter of luck; returns what is worth saying.

    Raises:
        NotReproducible: a variable against the recipe, FlashAttention 3's training kernels, an attention backend that
            cannot be honoured on this device.
    """
    said = _attention_backend(config)
    if not config.deterministic_mode:
        return said
    for name, allowed in ENVIRONMENT.items():
        value = os.environ.get(name)
        if value is not None and value not in allowed:
            raise NotReproducible(f"{name} is {value!r}; the recipe needs {' or '.join(allowed)}. Set it to {allowed[0]} or unset it, "
                                  "or say --no-deterministic-mode.")
    found = [name for name in FLASH_ATTENTION_3 if _present(name)]
    if found:
        raise NotReproducible(f"FlashAttention 3 is installed ({', '.join(found)}); its training kernels add in no fixed order and "
                              "Megatron takes them by itself. Uninstall it in this environment, or say --no-deterministic-mode.")
    asked = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if config.device == "cuda" and asked not in (None, ":16:8"):
        said.append(f"CUBLAS_WORKSPACE_CONFIG={asked} is deterministic, and rows that do not depend on the batch need :16:8 (no split "
                    "along K): the trainer and the engine get :16:8")
    return said


def _attention_backend(config: TrainConfig) -> list[str]:
    backend = config.vllm_attention_backend
    if backend == "auto":
        return []
    if config.device == "cpu":
        raise NotReproducible(f"--vllm-attention-backend {backend} has no kernels for a CPU; the engine's attention is vime's own "
                              "there. Say auto.")
    if not config.aligned:
        raise NotReproducible(f"--vllm-attention-backend {backend} with --vime-off: a stock engine chooses by itself here. Say auto.")
    if backend == "flashinfer":
        if not _present("flashinfer"):
            raise NotReproducible("--vllm-attention-backend flashinfer: FlashInfer is not installed. Install flashinfer-python==0.6.14, or "
                                  "say flash_attn.")
        return ["--vllm-attention-backend flashinfer: both sides take FlashInfer's prefill kernel at one tile, for prefill, decode and "
                "training; it is compiled on first use"]
    return [f"--vllm-attention-backend {backend}: vime's attention is FlashAttention 3's forward kernel at one split"]


def _present(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except ValueError:  # a module without a spec, put there by hand
        return True
