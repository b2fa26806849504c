"""Which implementation of an operation runs where, and what really ran.

A silent fallback is how two sides drift apart: the flag says "aligned", one shape quietly takes another kernel.
So there is exactly one implementation per (operation, device, dtype); a missing one is an error that names the way
out; every call is counted under the implementation's id, and the ids go into the contract that trainer and engine
compare before the first rollout.

A device is served by a provider module (``vime.ops.cpu``, ``vime.ops.cuda``), imported on first use. On import it
calls :func:`register` once per operation and dtype. Operations have the names of ``vime.contract.OPS``; one
operation may hold several functions that share their numerics (``attention``: packed and paged form).
"""
from __future__ import annotations

import dataclasses
import importlib
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

PROVIDERS = {"cpu": "vime.ops.cpu", "cuda": "vime.ops.cuda"}


class UnsupportedOp(RuntimeError):
    """No implementation for this operation, device, dtype or shape. There is no fallback to a stock kernel."""

    def __init__(self, op: str, device: Any, dtype: Any, shape: Any = None, hint: str = "") -> None:
        self.op, self.device, self.dtype, self.shape = op, str(device), str(dtype), shape
        where = f"{op} on {device} in {str(dtype).removeprefix('torch.')}"
        if shape is not None:
            where += f" for shape {tuple(shape)}"
        super().__init__(
            f"vime has no aligned implementation of {where}. "
            + (hint or f"Use a covered dtype (float32, bfloat16) and device ({', '.join(PROVIDERS)}), "
                       f"or switch the operation off on both sides (exclude).")
        )


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One set of numerics. ``id`` is ``device/op/kind@version``; ``functions`` maps public names to callables."""

    op: str
    device: str
    dtype: torch.dtype
    id: str
    functions: Mapping[str, Callable[..., Any]]


_table: dict[tuple[str, str, torch.dtype], Implementation] = {}
_counters: dict[str, int] = {}
_loaded: dict[str, Exception | None] = {}
_lock = threading.RLock()


def register(op: str, device: str, dtype: torch.dtype, impl_id: str, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Add an implementation. Called by provider modules; a second one for the same key is a programming error."""
    key = (op, device, dtype)
    if key in _table and _table[key].id != impl_id:
        raise ValueError(f"{op} on {device} in {dtype} already has {_table[key].id}; refusing {impl_id}")
    _table[key] = Implementation(op, device, dtype, impl_id, dict(functions))


def _load(device: str) -> None:
    with _lock:
        if device not in _loaded:
            try:
                importlib.import_module(PROVIDERS[device])
                _loaded[device] = None
            except Exception as error:  # kept, so that every later call tells the same cause
                _loaded[device] = error
        if _loaded[device] is not None:
            raise RuntimeError(f"the {device} kernels of vime.ops could not be loaded: {_loaded[device]}") from _loaded[device]


def resolve(op: str, device: torch.device | str, dtype: torch.dtype, shape: Any = None) -> Implementation:
    """The implementation of ``op``, or :class:`UnsupportedOp`."""
    kind = torch.device(device).type
    implementation = _table.get((op, kind, dtype))
    if implementation is None:
        if kind in PROVIDERS:
            _load(kind)
            implementation = _table.get((op, kind, dtype))
        if implementation is None:
            raise UnsupportedOp(op, device, dtype, shape)
    return implementation


def implementation(op: str, device: torch.device | str, dtype: torch.dtype) -> str:
    """Id of the implementation in use, for the contract."""
    return resolve(op, device, dtype).id


def contract_ids(ops: Iterable[str], aligned: Iterable[str], device: torch.device | str, dtype: torch.dtype, *,
                 experts: bool) -> dict[str, str]:
    """What the contract says of each of ``ops``: the implementation, or ``"stock"`` where it is switched off; so too for
    ``moe`` in a model without ``experts``. Raises :class:`UnsupportedOp` for an aligned one that has no implementation."""
    wanted = set(aligned) - (set() if experts else {"moe"})
    return {op: implementation(op, device, dtype) if op in wanted else "stock" for op in ops}


def call(op: str, function: str, like: torch.Tensor, *args: Any) -> Any:
    """Run ``function`` of the implementation of ``op`` for the device and dtype of ``like``, and count it."""
    chosen = _table.get((op, like.device.type, like.dtype)) or resolve(op, like.device, like.dtype, like.shape)
    run = chosen.functions.get(function)
    if run is None:
        raise UnsupportedOp(f"{op}.{function}", like.device, like.dtype, like.shape)
    result = run(*args)
    count(op, chosen.id)
    return result


def count(op: str, impl: str, n: int = 1) -> None:
    """Note that ``impl`` of ``op`` ran."""
    with _lock:
        _counters[impl] = _counters.get(impl, 0) + n


def counters() -> dict[str, int]:
    """Implementation id -> number of calls since the last :func:`reset_counters`."""
    with _lock:
        return dict(_counters)


def reset_counters() -> None:
    with _lock:
        _counters.clear()
