"""The engine's end of a weight update, behind vLLM's own weight-transfer interface.

Two phases. First everything arrives and is checked against the manifest: names, dtypes, shapes, digests, finiteness.
Nothing of the model is touched until all of it is right. Then it is loaded with the model's own loader and read back from
the engine's parameters. The caller treats any exception as "this engine must not generate" until a full update succeeds.
"""
from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from vime.vllm import fp8
from vime.vllm.layout import EMBED, HEAD, EngineWeights
from vime.vllm.protocol import UpdateFailed
from vime.weights.folders import Spec, spec_bytes
from vime.weights.manifest import (
    Manifest,
    TensorInfo,
    arrival_problems,
    describe,
    digest_of,
    dtype_name,
    first_problems,
)
from vime.weights.raw import not_finite
from vime.weights.transports.base import open_receiver

BACKEND = "vime"
#: Device memory that an update which is kept there leaves free: buckets in flight, and what vLLM's loader takes.
_SPARE_BYTES = 4 << 30

#: name -> (dtype, shape) of every tensor an update must bring; set by the engine from its checkpoint.
Required = dict[str, Spec]


@dataclasses.dataclass
class VimeInitInfo(WeightTransferInitInfo):
    """``transport``: what the sender announced (see :func:`vime.weights.transports.open_receiver`)."""

    transport: dict[str, Any]


@dataclasses.dataclass
class VimeUpdateInfo(WeightTransferUpdateInfo):
    """``version`` to become; ``check_equal`` reads every element back; ``required`` names what has to come."""

    version: int
    check_equal: bool
    required: Required | None
    live: bool


class VimeWeightTransferEngine(WeightTransferEngine[VimeInitInfo, VimeUpdateInfo]):
    init_info_cls = VimeInitInfo
    update_info_cls = VimeUpdateInfo
    supports_draft_weight_update = False

    _transport: dict[str, Any] | None = None
    report: dict[str, Any] | None = None
    #: name -> digest of what the last update brought, whether or not it was loaded
    arrived: dict[str, str] | None = None

    def init_transfer_engine(self, init_info: VimeInitInfo) -> None:
        self._transport = init_info.transport

    def start_weight_update(self) -> None:
        self.report = self.arrived = None

    def finish_weight_update(self) -> None:
        """Nothing: vLLM only forgets a session whose ``update_weights`` raised, so all that can fail happens there."""

    def shutdown(self) -> None:
        self._transport = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """The sending side of vLLM 0.26's interface, which no trainer of vime calls."""
        raise NotImplementedError("vime's trainer sends through vime.weights.transports")

    def receive_weights(self, update_info: VimeUpdateInfo) -> None:
        """Receive, verify, load, read back. Raises UpdateFailed."""
        if self._transport is None:
            raise UpdateFailed("a weight update was started without a transport")
        started = time.perf_counter()
        receiver = open_receiver(self._transport, self.device)
        held = EngineWeights(self.model).holds
        receiver.keep_on = place({n: s for n, s in (update_info.required or {}).items() if held(n)} or None, free_bytes(self.device))
        elsewhere = Elsewhere(held)
        receiver.look = elsewhere.look
        try:
            received, manifest = receiver.receive()
        finally:
            receiver.close()
        arrived = time.perf_counter()
        self._verify(received, manifest, update_info, elsewhere)
        buffers = buffer_digests(self.model)
        names = list(received)
        self._load(received, update_info.live)
        received.clear()
        renewed = fp8.refresh(self.model, self.device)
        problems = [f"buffer {name} changed during the load" for name, digest in buffer_digests(self.model).items()
                    if buffers.get(name) != digest]
        compared = 0
        if update_info.check_equal:
            weights = EngineWeights(self.model)
            problems += weights.problems(manifest)
            problems += fp8.stale(self.model, self.device)
            compared = sum(math.prod(info.shape) for info in manifest.tensors if weights.holds(info.name))
        if problems:
            raise UpdateFailed(first_problems(f"after loading version {manifest.version} the engine does not hold what was sent", problems))
        self.report = {
            "version": manifest.version, "tensors": len(names), "digest": manifest.digest(),
            "elements": sum(math.prod(info.shape) for info in manifest.tensors), "elements_compared": compared,
            "buffers_compared": len(buffers), "fp8_renewed": renewed, "receive_s": arrived - started, "total_s": time.perf_counter() - started,
        }

    def _verify(self, received: dict[str, torch.Tensor], manifest: Manifest, info: VimeUpdateInfo, elsewhere: Elsewhere) -> None:
        found = {name: elsewhere.entries.get(name) or describe(name, tensor) for name, tensor in received.items()}
        self.arrived = {name: entry.digest for name, entry in found.items()}
        problems = arrival_problems(manifest, received, found) + elsewhere.problems
        if manifest.version != info.version:
            problems.insert(0, f"version {manifest.version} arrived where {info.version} was announced")
        if info.required is not None:
            problems += requirement_problems(received, info.required, EngineWeights(self.model).tied,
                                             next(self.model.parameters()).dtype)
        if problems:
            raise UpdateFailed(first_problems(f"weight update {info.version} is refused before anything was loaded", problems))

    def _load(self, received: dict[str, torch.Tensor], live: bool) -> None:
        load_weights: Any = self.model.load_weights
        # one at a time: they may lie on the host
        weights = ((name, tensor.to(self.device)) for name, tensor in received.items() if not tensor.is_meta)
        if live:
            loaded = load_weights(weights)
            missing = sorted(set(dict(self.model.named_parameters())) - set(loaded or ()))
            if loaded is not None and missing:
                raise UpdateFailed(first_problems("vLLM's loader left parameters as they were", missing))
            return
        # Stock layers on CPU have packed their weights away: vLLM rebuilds them layer by layer.
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        initialize_layerwise_reload(self.model)
        load_weights(weights)
        finalize_layerwise_reload(self.model, self.model_config)


class Elsewhere:
    """Tensors of an update that other ranks of this engine hold: looked at when they arrive, then let go."""

    def __init__(self, held: Callable[[str], bool]) -> None:
        self._held = held
        self.entries: dict[str, TensorInfo] = {}
        self.problems: list[str] = []

    def look(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself if this rank holds it, else one without storage; its entry and what is wrong with it are noted."""
        if self._held(name):
            return tensor
        self.entries[name] = describe(name, tensor)
        if bad := not_finite(tensor):
            self.problems.append(f"{name}: {bad} of {tensor.numel()} values are NaN or infinite")
        return torch.empty_like(tensor, device="meta")


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU; None on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if torch.device(device).type == "cuda" else None


def place(required: Required | None, free: int | None) -> torch.device | None:
    """Where an update is kept until all of it is checked: where it arrives (None), or on the host if a GPU lacks the room.

    A second copy of the largest models has no room beside the first, and digests are computed on the host anyway.
    """
    if required is None or free is None:
        return None
    need = sum(map(spec_bytes, required.values()))
    return torch.device("cpu") if need + _SPARE_BYTES > free else None


def requirement_problems(received: dict[str, torch.Tensor], required: Required, tied: bool, model_dtype: torch.dtype) -> list[str]:
    """How ``received`` falls short of a full set of weights for this model.

    A tied head may be left out, or must equal the embedding. A tensor comes in the model dtype; one that the checkpoint
    keeps in float32 beside a narrower majority (an expert bias) may keep it.
    """
    optional = {HEAD} if tied else set()
    problems = [f"{name}: missing" for name in required if name not in received and name not in optional]
    for name, tensor in received.items():
        if name not in required:
            if not (name == HEAD and tied):
                problems.append(f"{name}: not a tensor of this model")
            continue
        dtype, shape = required[name]
        if tuple(tensor.shape) != shape:
            problems.append(f"{name}: shape {list(tensor.shape)}, expected {list(shape)}")
        widest = {dtype for dtype, _ in required.values()}
        allowed = {model_dtype, dtype} if len(widest) > 1 else {model_dtype}
        if tensor.dtype not in allowed:
            problems.append(f"{name}: dtype {dtype_name(tensor.dtype)}, expected {dtype_name(model_dtype)}")
    if tied and HEAD in received and EMBED in received and digest_of(received[HEAD]) != digest_of(received[EMBED]):
        problems.append(f"{HEAD} is tied to {EMBED} in this model, but other values were sent for it")
    return problems


def buffer_digests(model: torch.nn.Module) -> dict[str, str]:
    """Digest of every buffer, the ones that no checkpoint holds (rotary tables) included."""
    return {name: digest_of(buffer) for name, buffer in model.named_buffers() if buffer.numel()}


def register() -> None:
    """Make the receiver known to vLLM under the name :data:`BACKEND`. Idempotent."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, VimeWeightTransferEngine)
