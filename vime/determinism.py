"""Makes one process deterministic, and says what it found, set and refuses.

Two runs are compared bit by bit, so everything that chooses an algorithm or a random number is pinned before the first
CUDA call: environment, torch's flags, seeds. What can't be pinned any more (a hash seed after the start) or must not be
used (FlashAttention 3's backward adds in any order) is refused by name instead of hoped for.
"""
from __future__ import annotations

import dataclasses
import importlib.util
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from vime.errors import VimeError

#: Variable -> values that keep CUDA kernels and collectives deterministic; the first is set where none is set.
ENVIRONMENT: dict[str, tuple[str, ...]] = {
    "NCCL_ALGO": ("Ring", "Tree", "^NVLS"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "CUBLAS_WORKSPACE_CONFIG": (":16:8", ":4096:8"),
}
#: Modules of FlashAttention 3. Its training kernels have a backward that adds in no fixed order.
FLASH_ATTENTION_3 = ("flash_attn_3", "flash_attn_interface", "flashattn_hopper")
_PROBE = "vime: does a fresh interpreter hash this the same way?"


class NotDeterministic(VimeError):
    """Something that can't be made deterministic any more. The message names every reason and what to do."""


@dataclasses.dataclass(frozen=True)
class Record:
    """What :func:`set_deterministic` met and did. JSON-ready through :meth:`to_dict`.

    Attributes:
        found: setting -> value before.
        set: setting -> value that was set here.
        refused: what stands against determinism, one text each; empty if all is well.
    """

    found: dict[str, Any]
    set: dict[str, Any]
    refused: list[str]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def hash_seed_fixed() -> bool:
    """True if this process hashes strings by a fixed PYTHONHASHSEED, so that a rerun iterates over sets the same way.

    Setting the variable after the start changes nothing, so the variable alone proves nothing: a fresh interpreter
    started with its value must hash as this one does.
    """
    if not sys.flags.hash_randomization:
        return True  # PYTHONHASHSEED=0 at the start
    value = os.environ.get("PYTHONHASHSEED", "")
    if not value.isdecimal():
        return False
    probe = [sys.executable, "-S", "-c", f"print(hash({_PROBE!r}))"]
    try:
        answer = subprocess.run(probe, env={**os.environ, "PYTHONHASHSEED": value}, capture_output=True, text=True, check=False)
    except OSError:  # no interpreter can be started to compare with, so nothing is proven
        return False
    return answer.stdout.strip() == str(hash(_PROBE))


def _flash_attention_3() -> list[str]:
    found = []
    for name in FLASH_ATTENTION_3:
        try:
            present = name in sys.modules or importlib.util.find_spec(name) is not None
        except ValueError:  # a module without a spec, put there by hand
            present = True
        if present:
            found.append(name)
    return found


def examine(device: str = "cpu", environment: Iterable[str] = tuple(ENVIRONMENT)) -> tuple[dict[str, Any], list[str]]:
    """What is set now, and what stands against determinism; changes nothing.

    Returns:
        ``(found, refused)`` as in :class:`Record`.
    """
    import torch

    found: dict[str, Any] = {name: os.environ.get(name) for name in environment}
    found["PYTHONHASHSEED"] = os.environ.get("PYTHONHASHSEED")
    found["PYTHONHASHSEED.fixed_at_start"] = hash_seed_fixed()
    found["torch.deterministic_algorithms"] = torch.are_deterministic_algorithms_enabled()
    found["torch.cudnn.benchmark"] = torch.backends.cudnn.benchmark
    found["torch.cudnn.deterministic"] = torch.backends.cudnn.deterministic
    found["torch.num_threads"] = torch.get_num_threads()
    found["cuda.initialized"] = torch.cuda.is_initialized()
    found["flash_attention_3"] = _flash_attention_3()

    refused = []
    if not found["PYTHONHASHSEED.fixed_at_start"]:
        refused.append("PYTHONHASHSEED was not set when the process started, so the order of sets differs between runs; start "
                       "it with PYTHONHASHSEED=0 (setting it now has no effect)")
    for name in environment:
        value, allowed = found[name], ENVIRONMENT[name]
        if value is not None and value not in allowed:
            refused.append(f"{name} is {value!r}; deterministic is {' or '.join(allowed)}")
        elif value is None and device != "cpu" and found["cuda.initialized"]:
            refused.append(f"{name} is not set and CUDA is in use already; set it to {allowed[0]} before the first CUDA call")
    if found["flash_attention_3"]:
        refused.append(f"FlashAttention 3 is installed ({', '.join(found['flash_attention_3'])}); its training kernels are not "
                       "deterministic and Megatron takes them by itself: uninstall it in the trainer's environment")
    return found, refused


def set_deterministic(seed: int, *, device: str = "cpu", megatron: bool = True, strict: bool = True) -> Record:
    """Pin environment, flags and seeds of this process. Call it before the first CUDA call.

    Args:
        seed: of python, numpy, torch and, where its parallel state is set up, Megatron's generator states.
        device: ``"cpu"`` or ``"cuda"``.
        megatron: also seed Megatron's generator states.
        strict: raise if anything is refused; otherwise only record it.

    Returns:
        The record.

    Raises:
        ValueError: a seed outside 0 to 2**32 - 1.
        NotDeterministic: something is refused (with ``strict``); nothing was changed.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}; expected 0 to {2**32 - 1}, since numpy takes 32 bits")
    found, refused = examine(device)
    if refused and strict:
        raise NotDeterministic("this process can't be made deterministic:\n" + "\n".join(f"  {reason}" for reason in refused))
    import numpy
    import torch

    done: dict[str, Any] = {}
    for name, allowed in ENVIRONMENT.items():
        if name not in os.environ:
            os.environ[name] = done[name] = allowed[0]
    torch.use_deterministic_algorithms(True)
    if device != "cpu":  # torch would fill every new tensor with NaN: one more launch for each, which kernels then overwrite
        torch.utils.deterministic.fill_uninitialized_memory = False
        done["torch.fill_uninitialized_memory"] = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    done["torch.deterministic_algorithms"] = True
    done["torch.cudnn.benchmark"] = False
    done["torch.cudnn.deterministic"] = True
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    done["seed.python"] = done["seed.numpy"] = done["seed.torch"] = seed
    if megatron and _seed_megatron(seed):
        done["seed.megatron"] = seed
    return Record(found=found, set=done, refused=refused)


def _seed_megatron(seed: int) -> bool:
    """Seed Megatron's generator states if its parallel state is set up in this process."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is None or not parallel_state.model_parallel_is_initialized():
        return False
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return True
