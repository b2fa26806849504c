"""One rank of the trainer: a Megatron model, its optimizer, and the commands the pool may give.

Runs in a process of its own (:mod:`vime.rl.ranks`) and never talks to the engine except through the weight
transport it is told to use.
"""
from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from vime.rl.batch import Trajectory
from vime.rl.config import TrainConfig, trainer_device
from vime.rl.keeping import KeepsState
from vime.rl.loss import policy_loss
from vime.rl.packing import plan_microbatches

#: What a rank runs that has nothing to do while others of its expert-parallel group have: its experts are needed.
_IDLE = (0, 0)


@dataclasses.dataclass(frozen=True)
class TrainerSpec:
    """What every rank is told at the start. ``store`` is (host, port) of the rendezvous, None for one rank."""

    config: TrainConfig
    store: tuple[str, int] | None = None


@dataclasses.dataclass
class StepStats:
    """One optimizer step of one rank.

    ``ratio_off`` counts tokens whose log-probability in the training forward is not, bit for bit, that of the no-grad
    pass; ``without_gradient`` names parameters whose gradient is zero everywhere. ``composition`` are the requests of
    each microbatch in order, ``gradients`` digests of the reduced gradients, taken in ``digest_s`` seconds. Of ``updates``
    elements ``lost_updates`` were too small to change a weight (None: not with this optimizer).
    """

    loss: float
    grad_norm: float
    grad_norm_bits: str
    tokens: int
    microbatches: int
    ratio_off: int
    without_gradient: list[str]
    composition: list[list[str]] = dataclasses.field(default_factory=list)
    gradients: dict[str, str] = dataclasses.field(default_factory=dict)
    digest_s: float = 0.0
    lost_updates: int | None = None
    updates: int | None = None


class Trainer(KeepsState):
    """Built once a rank. Arguments of the methods are the same on all ranks unless said."""

    def __init__(self, rank: int, world_size: int, spec: TrainerSpec) -> None:
        import vime
        from vime.determinism import set_deterministic
        from vime.megatron import parallel
        from vime.weights.checkpoint import HfCheckpoint
        from vime.weights.policy import left_out

        self.config, self.rank, self.world_size = spec.config, rank, world_size
        config = spec.config
        self.device = trainer_device(config, rank)
        if config.device == "cuda":
            torch.cuda.set_device(self.device)
        checkpoint = HfCheckpoint(config.hf_checkpoint, self.device)
        self.hf_config: dict[str, Any] = dict(checkpoint.config)
        self._hf_names = frozenset(checkpoint) - left_out(self.hf_config, checkpoint).keys()
        store = None
        if spec.store is not None:
            store = torch.distributed.TCPStore(*spec.store, is_master=False)
        parallel.initialize(rank, world_size, store, self.device, config.seed, config.expert_model_parallel_size)
        self.determinism: dict[str, Any] = {}
        if config.deterministic_mode:
            self.determinism = set_deterministic(config.seed, device=config.device).to_dict()
        if config.aligned:
            vime.enable(config.ops, fp8=bool(config.fp8))
        self.packed = vime.is_enabled("attention")
        self._planted: list[Callable[[], None]] = []
        self._build(checkpoint)

    def _build(self, checkpoint: Any) -> None:
        from vime.megatron.model import build_model, load_weights

        config = self.config
        self.model = build_model(self.hf_config, getattr(torch, config.dtype), self.device, config.recompute,
                                 initialize=False, kv_cache_dtype=config.kv_cache_dtype, freeze_indexer=config.freeze_indexer,
                                 transformer_impl=config.transformer_impl)
        load_weights(self.model, checkpoint, self.hf_config)
        self._optimizer: Any = None
        self._exporter: Any = None

    def respread(self, expert_parallel: int) -> None:
        """Start over from the checkpoint with experts spread over that many ranks. Collective."""
        from vime.megatron import parallel
        from vime.weights.checkpoint import HfCheckpoint

        self.model = self._optimizer = self._exporter = None  # they hold the groups that are given up
        gc.collect()
        parallel.respread(expert_parallel)
        self.config = self.config.replace(expert_model_parallel_size=expert_parallel)
        self._build(HfCheckpoint(self.config.hf_checkpoint, self.device))

    def plant(self, fault: str | None, layer: int = 0) -> None:
        """Plant a fault of :mod:`vime.megatron.faults` for negative controls; None takes all back."""
        from vime.megatron import faults

        if fault is None:
            while self._planted:
                self._planted.pop()()
        else:
            self._planted.append(faults.plant(self.model, fault, layer))

    def refusals(self, stock_dispatchers: bool = False) -> list[str]:
        """What can't be aligned in the model, by name; with Megatron's own dispatchers in its layers, if asked."""
        import vime
        from vime.megatron import check, faults

        with faults.stock_dispatchers(self.model) if stock_dispatchers else contextlib.nullcontext():
            return [str(one) for one in check.refusals(self.model, vime.active_ops())]

    @property
    def optimizer(self) -> Any:
        """Made when first needed: a rank that only evaluates log-probabilities needs no gradients and moments."""
        if self._optimizer is None:
            from vime.megatron.optim import Optimizer

            config = self.config
            self._optimizer = Optimizer(self.model, config.lr, config.weight_decay, config.clip_grad,
                                        (config.adam_beta1, config.adam_beta2), kind=config.optimizer,
                                        fp32_gradients=config.accumulate_allreduce_grads_in_fp32)
        return self._optimizer

    def contract(self) -> dict[str, Any]:
        """The contract in effect, as a dictionary."""
        from vime.megatron import contract

        return contract(self.model).to_dict()

    def fp8_layers(self) -> list[str]:
        """Hugging Face names of the layers that run in block FP8, after a first forward or :meth:`contract`."""
        from vime.megatron import fp8

        return fp8.layers(self.model)

    def logprobs(self, batch: Sequence[Trajectory]) -> list[np.ndarray]:
        """Log-probabilities of the response tokens, fp32 ``[R]`` each, in order of ``batch``, without gradient."""
        self._release_gradients()
        out: list[np.ndarray] = []
        for microbatch in self._microbatches(batch):
            if not microbatch:
                self._idle(self.model, grad=False)
                continue
            out.extend(part.cpu().numpy() for part in self._response_logprobs(self.model, microbatch, grad=False))
        return out

    def train_step(self, batch: Sequence[Trajectory], total_tokens: int) -> StepStats:
        """Loss, backward and one optimizer step on this rank's ``batch``; ``total_tokens`` counts those of all ranks."""
        optimizer, config = self.optimizer, self.config
        microbatches = self._microbatches(batch)
        optimizer.zero_grad(len(microbatches))
        losses: list[torch.Tensor] = []
        off: list[torch.Tensor] = []
        tokens = 0
        composition: list[list[str]] = []
        for microbatch in microbatches:
            if not microbatch:
                self._idle(optimizer.ddp, grad=True)
                continue
            logprob_R = torch.cat(self._response_logprobs(optimizer.ddp, microbatch, grad=True))
            old_R = torch.from_numpy(np.concatenate([t.old_logprobs for t in microbatch])).to(logprob_R.device)
            advantage_R = torch.tensor([t.advantage for t in microbatch for _ in t.response_ids], dtype=torch.float32,
                                       device=logprob_R.device)
            loss = policy_loss(logprob_R, old_R, advantage_R, total_tokens, config.eps_clip, config.eps_clip_high)
            (loss * self.world_size).backward()  # Megatron's data parallel divides the sum of gradients by the ranks
            losses.append(loss.detach())  # read once all are under way: a wait here would leave the device without work
            off.append((logprob_R.detach().view(torch.int32) != old_R.view(torch.int32)).sum())
            tokens += logprob_R.numel()
            composition.append([t.request_id for t in microbatch])
        optimizer.finish_gradients()
        loss_sum = sum(torch.stack(losses).tolist()) if losses else 0.0
        ratio_off = int(torch.stack(off).sum()) if off else 0
        without_gradient = optimizer.parameters_without_gradient()
        started = time.perf_counter()
        gradients = optimizer.gradient_digests() if config.output_dir and self._owns_state else {}
        digest_s = time.perf_counter() - started
        result = optimizer.step()
        if config.offload_rollout:
            torch.cuda.empty_cache()  # the engine wakes up next, and takes its memory back
        return StepStats(loss_sum, result.grad_norm, result.grad_norm_bits, tokens, len(composition), ratio_off, without_gradient,
                         composition, gradients, digest_s, result.lost_updates, result.updates)

    def record_layers(self, batch: Sequence[Trajectory]) -> Any:
        """Outputs at Megatron's module boundaries for every token of ``batch`` (:class:`vime.megatron.forward.Recording`)."""
        from vime.megatron.forward import record_layers

        recording = record_layers(self.model, [t.token_ids for t in batch] or [_IDLE])
        recording.outputs.pop("logits")  # a vocabulary wide; judged as log-probabilities
        return recording if batch else recording.empty()

    def hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under their Hugging Face names, in the model's dtype, gathered from all ranks bucket by bucket.

        Collective: every rank must iterate to the end. Raises :class:`vime.weights.errors.WeightError` where the
        ranks hold or are about to send what they should not (:mod:`vime.weights.online`).
        """
        return self.exporter.tensors()

    @property
    def exporter(self) -> Any:
        """Made when first needed. Collective."""
        if self._exporter is None:
            from vime.weights.bridge import BridgeExporter
            from vime.weights.online import Exporter

            if self.config.megatron_to_hf_mode == "bridge":
                self._exporter = BridgeExporter([self.model], self.config.hf_checkpoint)
            else:
                self._exporter = Exporter([self.model], self.hf_config, self._hf_names)
        return self._exporter

    def inject(self, fault: str | None) -> None:
        """Plant ``STAGE:FAULT`` into the gather of every weight update from now on, for negative controls."""
        self.exporter.inject(fault)

    def named_weights_digest(self) -> dict[str, str]:
        """HF name -> digest of its bytes, on rank 0. Collective."""
        from vime.weights.manifest import digest_of

        return {name: digest_of(tensor) for name, tensor in self.hf_weights() if self.rank == 0}

    def send_weights(self, endpoints: Sequence[Any], version: int) -> dict[str, Any] | None:
        """Replace the weights of every rank of the engine by ours, as ``version``. All ranks gather, rank 0 sends and returns
        the report of the engine's first rank.

        Raises:
            vime.weights.errors.WeightError: as :meth:`hf_weights`; the engine does not load what was sent.
            vime.vllm.protocol.UpdateFailed: see :class:`vime.weights.transports.Sender`.
        """
        self._release_gradients()
        from vime.weights.transports import fanout

        reports: list[dict[str, Any]] = []
        for together in fanout.rounds(endpoints):
            tensors = self.hf_weights()  # ownership and agreement are checked here, before the engine hears of an update
            if self.rank == 0:
                reports += fanout.send(together, tensors, version)
            else:
                for _ in tensors:
                    pass
        return reports[0] if reports else None

    def flip_bit(self, name: str, index: int = 0, bit: int = 0) -> None:
        """Flip one bit of one weight in place: a planted fault for negative controls, ``name`` as Megatron's."""
        with torch.no_grad():
            flat = self._parameter(name).data.view(-1)
            as_int = flat.view(torch.int32 if flat.dtype is torch.float32 else torch.int16)
            as_int[index] ^= 1 << bit

    def set_value(self, name: str, index: int, value: float) -> None:
        """Overwrite one element of one weight: a planted fault for tests of what NaN does, ``name`` as Megatron's."""
        with torch.no_grad():
            self._parameter(name).data.view(-1)[index] = value

    def _parameter(self, name: str) -> Any:
        """A parameter by the local spec's name, whichever spec the model was built by."""
        from vime.weights.megatron_state import canonical

        return {canonical(found): parameter for found, parameter in self.model.named_parameters()}[name]

    def gradient_digests(self) -> dict[str, str]:
        """Digest of every gradient of the last step that this rank owns, reduced; with Adam also clipped."""
        return self.optimizer.gradient_digests() if self._owns_state else {}

    def counters(self) -> dict[str, int]:
        """Calls per implementation in this process since the start."""
        from vime.ops import registry

        return registry.counters()

    def _release_gradients(self) -> None:
        if not self.config.offload_rollout:
            return
        if self._optimizer is not None:
            self._optimizer.release_gradients()
        torch.cuda.empty_cache()  # what lies unused here, an update of the engine has room for

    def _response_logprobs(self, model: Any, batch: Sequence[Trajectory], grad: bool) -> list[torch.Tensor]:
        from vime.megatron.forward import token_logprobs_of

        return token_logprobs_of(model, [t.token_ids for t in batch], self.config.rollout_temperature, grad=grad,
                                 first=[t.prompt_len for t in batch])

    def _microbatches(self, batch: Sequence[Trajectory]) -> list[list[Trajectory]]:
        """The microbatches of this rank; with expert parallelism as many on every rank, the last ones empty where needed."""
        plan = plan_microbatches([len(t.token_ids) for t in batch], self.config.max_tokens_per_gpu)
        if self.config.expert_model_parallel_size > 1:
            most = torch.tensor(len(plan), device=self.device)
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
            plan += [[]] * (int(most) - len(plan))
        return [[batch[i] for i in indices] for indices in plan]

    def _idle(self, model: Any, grad: bool) -> None:
        """Take part in a forward (and backward) of the other ranks. Adds exactly nothing to any gradient."""
        from vime.megatron.forward import token_logprobs_of

        (logprob_1,) = token_logprobs_of(model, [_IDLE], grad=grad)
        if grad:
            (logprob_1.sum() * 0.0).backward()
