"""Trainer and engine, up together and down together.

They are separate processes that share no storage, on one machine or two: with ``engine_url`` the engine runs
elsewhere and only its address is known. Whatever fails, both sides are ended.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vime.megatron.experts import check_spread
from vime.rl.config import TrainConfig, engine_env, prepare_kernels, read_hf_config, require_fit
from vime.rl.memory import require_memory
from vime.rl.pool import TrainerPool
from vime.rl.ranks import TrainerFailed
from vime.rl.sync import fill
from vime.vllm.protocol import EngineError
from vime.weights.checkpoint import HfCheckpoint
from vime.weights.policy import describe, left_out


class Session:
    """A context manager. Inside it ``pool`` and ``client`` answer, and both hold the same contract; ``left_out`` says which
    tensors of the checkpoint neither uses.

    Args:
        config: the run.
        log_dir: logs of all processes go there.

    Raises (on entering), before anything is started:
        ConfigError, CheckpointError, UnsupportedModel, UnknownArchitecture: the checkpoint cannot be used.
        UnsupportedModel, UnsupportedLatent, ExpertsDoNotDivide: its model cannot have these settings.
        NotEnoughMemory: see :mod:`vime.rl.memory`.
        BuildError: the CPU kernels cannot be compiled.
    or, with both sides ended:
        WeightsDoNotFit: a weight of the checkpoint is not finite. Values are read where a side could not start only.
        EngineStartError, TrainerFailed, TrainerDied, ContractMismatch.
    """

    def __init__(self, config: TrainConfig, log_dir: str | Path) -> None:
        self.config, self.log_dir = config, Path(log_dir)
        self.pool: TrainerPool
        self.client: Any
        self.engine: Any = None
        self.engine_address: tuple[str, str | None] = ("", None)
        self.fingerprint = self.left_out = ""
        self.num_layers = 0
        self._asleep = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Session:
        config = self.config
        hf_config = read_hf_config(config.hf_checkpoint)
        self.num_layers = int(hf_config["num_hidden_layers"])
        self.left_out = describe(left_out(hf_config, HfCheckpoint(config.hf_checkpoint)))
        check_spread(hf_config, config.expert_model_parallel_size)
        require_fit(config, hf_config)
        require_memory(config, hf_config)
        prepare_kernels(config)
        with contextlib.ExitStack() as stack:
            # the trainer's ranks import and load while this process waits for the engine
            self.pool = stack.enter_context(TrainerPool(config, self.log_dir))
            with self._blaming_the_weights():
                self._connect(stack, hf_config)
                self.pool.wait_ready()
            contract = self.pool.contract()
            if config.aligned:
                self.fingerprint = self.client.handshake(contract)
            fill(config, self.pool, self.client, self.engine_address)
            self._stack = stack.pop_all()
        return self

    @contextlib.contextmanager
    def _blaming_the_weights(self) -> Iterator[None]:
        """Whichever side meets a NaN first fails in words of its own; the tensor and its file are what helps."""
        try:
            yield
        except (EngineError, TrainerFailed) as error:
            from vime.megatron.model import WeightsDoNotFit

            found = _not_finite(HfCheckpoint(self.config.hf_checkpoint))
            if found is None:
                raise
            raise WeightsDoNotFit(f"{found} values are NaN or infinite; the checkpoint is damaged: copy it again, or look at the run that wrote "
                                  "it") from error

    @contextlib.contextmanager
    def trainer_alone(self) -> Iterator[None]:
        """With ``--offload-rollout`` the engine sleeps meanwhile and gives its memory up. May be nested.

        Raises:
            vime.vllm.protocol.EnginePoisoned: it woke up with other weights.
        """
        if not self.config.offload_rollout or self._asleep:
            yield
            return
        self.client.sleep()
        self._asleep = True
        try:
            yield
        finally:
            self._asleep = False
            self.client.wake()

    def _connect(self, stack: contextlib.ExitStack, hf_config: dict[str, Any]) -> None:
        config = self.config
        if config.engine_url:
            from vime.vllm.client import EngineClient

            self.engine_address = (config.engine_url, config.engine_token or None)
            self.client = stack.enter_context(EngineClient(*self.engine_address, timeout=config.timeout_s))
            return
        from vime.vllm.launch import launch_engine
        from vime.vllm.plugin import ROUTED

        self.engine = stack.enter_context(launch_engine(
            config.hf_checkpoint, device=config.device, dtype=config.dtype, ops=ROUTED if config.ops is None else config.ops,
            log_path=self.log_dir / "engine.log", env=engine_env(config), start_timeout=config.timeout_s,
            client_timeout=config.timeout_s, max_num_batched_tokens=config.max_num_batched_tokens,
            fp8=config.fp8, kv_cache_dtype=config.kv_cache_dtype, data_parallel_size=config.engine_data_parallel_size,
            max_model_len=min(config.max_model_len, hf_config.get("max_position_embeddings") or config.max_model_len),
            kv_cache_bytes=int(config.kv_cache_gib * 2**30) or None, sleep_mode=config.offload_rollout, cuda_graphs=not config.enforce_eager,
            keep_fp8_weights=config.vllm_keep_fp8_weights))
        self.client, self.engine_address = self.engine.client, (self.engine.url, self.engine.token)

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _not_finite(checkpoint: HfCheckpoint) -> str | None:
    """The first tensor that holds a NaN or an infinity, with its file and how many; None if there is none."""
    import torch

    if checkpoint.counted is not None:  # made of a counter, which makes none
        return None
    for name, file in checkpoint.files.items():
        tensor = checkpoint[name]
        if tensor.is_floating_point() and (bad := int((~torch.isfinite(tensor.float())).sum())):
            return f"{name} in {checkpoint.folder / file}: {bad} of {tensor.numel()}"
    return None
