"""Everything megatron-core needs before it runs on a CPU with gloo, in one place that a GPU run never meets.

Megatron-core is written for CUDA: it asks for the current CUDA device, keeps CUDA generator states, allocates small
tensors with ``device="cuda"`` and annotates with CUDA stream classes. None of that is numerics, so :func:`apply`
answers those calls for the CPU. It is done by what is present, not by version number; 0.16.1 and 0.19.2 are tested.
The answers are process-wide and stay until the process ends, therefore the trainer is a process of its own.
"""
from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch

#: Modules that spell ``device="cuda"`` (or call a CUDA generator) in their own source.
_LITERAL_CUDA = (
    "megatron.core.tensor_parallel.random",
    "megatron.core.tensor_parallel.data",
    "megatron.core.transformer.utils",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.optimizer",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.utils",
)
#: Names of ``moe_utils`` that 0.16.1 uses although they exist with TransformerEngine only.
_TE_ONLY_NAMES = ("te_general_gemm", "TELinear")
_TRITON_ONLY = "megatron.core.transformer.moe.ops.paged_stash"

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn")
_CPU = torch.device("cpu")
_applied = False


class UnsupportedOnCpu(RuntimeError):
    """Something of CUDA that has no CPU answer was called."""


class _Stream:
    """Stands for ``torch.cuda.Stream``: on a CPU everything is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def wait_stream(self, stream: Any) -> None:
        del stream

    def wait_event(self, event: Any) -> None:
        del event

    def synchronize(self) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _Event()

    def query(self) -> bool:
        return True


class _Event:
    """Stands for ``torch.cuda.Event``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def record(self, stream: Any = None) -> None:
        del stream

    def wait(self, stream: Any = None) -> None:
        del stream

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        del end
        raise UnsupportedOnCpu("CUDA event timing was asked for on a CPU; use time.perf_counter")


def _get_rng_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    del device, clone
    if graph_safe:
        raise UnsupportedOnCpu("a CUDA-graph-safe generator state was asked for on a CPU; switch CUDA graphs off")
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
    del device
    if graph_safe:
        raise UnsupportedOnCpu("a CUDA-graph-safe generator state was set on a CPU; switch CUDA graphs off")
    torch.set_rng_state(state)


class _Overlay(types.ModuleType):
    """A module that answers some names itself and leaves the others to the module it stands for."""

    def __init__(self, base: types.ModuleType, answers: dict[str, Any]) -> None:
        super().__init__(base.__name__)
        self.__dict__.update(answers)
        self.__dict__["_vime_base"] = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_vime_base"], name)


def _on_cpu(factory: Any) -> Any:
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return create


def _torch_overlay() -> types.ModuleType:
    cuda = _Overlay(
        torch.cuda,
        {
            "current_device": lambda: _CPU,
            "get_rng_state": _get_rng_state,
            "set_rng_state": _set_rng_state,
            "manual_seed": torch.manual_seed,
            "synchronize": lambda *args, **kwargs: None,
        },
    )
    return _Overlay(torch, {"cuda": cuda, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}})


def _patch_cuda_namespace() -> None:
    """Calls that raise without a driver: answer them for every module, those imported later included."""
    answers: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


_stock_type = torch.Tensor.type


def _type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Megatron's optimizer compares ``Tensor.type()`` with names such as ``torch.cuda.FloatTensor``: tell it these."""
    found = _stock_type(self, *args, **kwargs)
    if isinstance(found, str) and sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core.optimizer"):
        return found.replace("torch.", "torch.cuda.", 1)
    return found


def _stand_in_for_triton_only_module() -> None:
    """Without triton, 0.19.2 can't import its schedules because of one optional MoE submodule.

    A fake top-level ``triton`` would break ``torch._inductor``, so that one submodule is stood in for.
    """
    core = importlib.util.find_spec("megatron.core")
    if importlib.util.find_spec("triton") is not None or core is None or core.origin is None:
        return
    # by its file, since looking the module up would import its parents, which import it
    if not Path(core.origin).parent.joinpath(*_TRITON_ONLY.split(".")[2:]).with_suffix(".py").is_file():
        return

    stand_in = types.ModuleType(_TRITON_ONLY)

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise UnsupportedOnCpu(f"{_TRITON_ONLY}.{name} needs triton; leave moe_paged_stash off on a CPU")

        return refuse

    stand_in.__getattr__ = __getattr__  # type: ignore[method-assign]
    sys.modules[_TRITON_ONLY] = stand_in


def _module(name: str) -> Any:
    return importlib.import_module(name)


def apply() -> None:
    """Make megatron-core run on the CPU of this process. Idempotent; call it before Megatron is imported.

    Sets ``TORCHDYNAMO_DISABLE=1``: Megatron compiles small elementwise functions, which costs seconds on a CPU and
    rounds differently from the eager ones.
    """
    global _applied
    if _applied:
        return
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if "torch._dynamo.config" in sys.modules:  # the variable is read when dynamo is imported
        sys.modules["torch._dynamo.config"].disable = True  # type: ignore[attr-defined]
    _patch_cuda_namespace()
    torch.Tensor.type = _type  # type: ignore[method-assign,assignment]
    _stand_in_for_triton_only_module()
    overlay = _torch_overlay()
    for name in _LITERAL_CUDA:
        _module(name).torch = overlay
    rng = _module("megatron.core.tensor_parallel.random")
    rng._get_cuda_rng_state, rng._set_cuda_rng_state = _get_rng_state, _set_rng_state
    moe_utils = _module("megatron.core.transformer.moe.moe_utils")
    for name in _TE_ONLY_NAMES:
        if not hasattr(moe_utils, name):
            setattr(moe_utils, name, None)
    if hasattr(moe_utils, "maybe_move_tensor_to_cpu"):
        moe_utils.maybe_move_tensor_to_cpu = _split_sizes
        _module("megatron.core.transformer.moe.token_dispatcher").maybe_move_tensor_to_cpu = _split_sizes
    _applied = True


def applied() -> bool:
    """True once :func:`apply` has run in this process."""
    return _applied


def _split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's ``maybe_move_tensor_to_cpu`` converts only what lies on a GPU; gloo needs the numbers too."""
    del record_stream
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
