"""Everything of a trainer rank that a step leaves behind for the next one: tensors, numbers and random states.

Kept apart from Megatron's own nesting: a state is a tree of dictionaries, lists, numbers and tensors, written as JSON
with the tensors beside it. No pickle, so that a checkpoint from elsewhere can hold nothing but numbers.
"""
from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from vime.errors import VimeError
from vime.weights import lanes  # here, so that the ranks' launcher loads it once and no step pays for it


class StateError(VimeError):
    """A state that cannot be written down, or was not restored as it was."""


def flatten(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """``(skeleton, tensors)``: the tree with every tensor replaced by its name, and the tensors by name.

    Keys of dictionaries keep their type (an optimizer's state is keyed by integers). Raises StateError for a leaf that
    is neither a tensor, a number, text, a bool nor None.
    """
    tensors: dict[str, torch.Tensor] = {}

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, torch.Tensor):
            if path in tensors:
                raise StateError(f"two tensors of the state are both called {path}")
            tensors[path] = node.detach()
            return {"t": path}
        if isinstance(node, Mapping):
            return {"d": [[_key(k, path), walk(v, f"{path}.{k}" if path else str(k))] for k, v in node.items()]}
        if isinstance(node, list | tuple):
            kind = "l" if isinstance(node, list) else "u"
            return {kind: [walk(v, f"{path}.{i}" if path else str(i)) for i, v in enumerate(node)]}
        if node is None or isinstance(node, bool | int | float | str):
            return {"v": node}
        raise StateError(f"{path or 'the state'} is a {type(node).__name__}; only tensors, numbers and text can be kept")

    return walk(tree, ""), tensors


def unflatten(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of :func:`flatten`."""
    (kind, value), = skeleton.items()
    if kind == "t":
        return tensors[value]
    if kind == "d":
        return {key[1] if key[0] == "s" else int(key[1]): unflatten(v, tensors) for key, v in value}
    if kind in ("l", "u"):
        items = [unflatten(v, tensors) for v in value]
        return items if kind == "l" else tuple(items)
    if kind == "v":
        return value
    raise StateError(f"a state has a node of kind {kind!r}; expected one of t, d, l, u, v")


def _key(key: Any, path: str) -> list[Any]:
    if isinstance(key, str):
        return ["s", key]
    if isinstance(key, int) and not isinstance(key, bool):
        return ["i", key]
    raise StateError(f"{path or 'the state'} has a key {key!r} of type {type(key).__name__}; expected text or a whole number")


def tensor_digest(tensor: torch.Tensor) -> str:
    """As :mod:`alignment.digest`: on the host for a CPU tensor, where it is for one on a device."""
    return lanes.digests({"": tensor})[""]


def tree_digests(tree: Any) -> dict[str, str]:
    """Digest of every tensor of a tree, and under ``""`` of all that is no tensor."""
    skeleton, tensors = flatten(tree)
    rest = xxhash.xxh3_128_hexdigest(repr(skeleton).encode())
    return lanes.digests(tensors) | {"": f"xxh3:{rest}"}


# --- random states -------------------------------------------------------------------------------------------------


def _torch_states(device: str) -> Iterator[tuple[str, torch.Tensor]]:
    yield "torch", torch.get_rng_state()
    if device != "cpu":
        yield "cuda", torch.cuda.get_rng_state(device)
    tracker = sys.modules.get("megatron.core.tensor_parallel.random")
    if tracker is not None:
        for name, state in sorted(tracker.get_cuda_rng_tracker().get_states().items()):
            yield f"megatron.{name}", state


def rng_state(device: str = "cpu") -> dict[str, Any]:
    """Every random state of this process, JSON-ready: python, numpy, torch, the device's and Megatron's."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        **{name: state.cpu().numpy().tobytes().hex() for name, state in _torch_states(device)},
    }


def set_rng_state(state: Mapping[str, Any], device: str = "cpu") -> None:
    """Restore what :func:`rng_state` gave. Raises StateError where this process has other generators."""
    have = {"python", "numpy"} | {name for name, _ in _torch_states(device)}
    if set(state) != have:
        raise StateError(f"the checkpoint has the random states {', '.join(sorted(state))}; this process has {', '.join(sorted(have))}")
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))

    def tensor(hexed: str) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(hexed), dtype=torch.uint8)

    torch.set_rng_state(tensor(state["torch"]))
    if device != "cpu":
        torch.cuda.set_rng_state(tensor(state["cuda"]), device)
    tracker = sys.modules.get("megatron.core.tensor_parallel.random")
    if tracker is not None:
        states = {name.removeprefix("megatron."): tensor(value) for name, value in state.items() if name.startswith("megatron.")}
        tracker.get_cuda_rng_tracker().set_states(states)


def rng_digests(device: str = "cpu") -> dict[str, str]:
    """Digest of each random state by name."""
    return {name: "xxh3:" + xxhash.xxh3_128_hexdigest(repr(value).encode()) for name, value in rng_state(device).items()}
