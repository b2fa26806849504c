"""Which device a gate runs on, decided so that a broken node never turns green.

CUDA where enough GPUs are visible. The CPU profile of the same gate only where there is **no** GPU and no driver:
a node that lost some of its GPUs, or has a driver and no GPU, must say NOT_RUN and not fall back to a run that
proves something else.
"""
from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Machine:
    """What is visible: ``gpus`` that torch can use, and whether an NVIDIA ``driver`` is installed (and what says so)."""

    gpus: int
    driver: str | None = None


@dataclasses.dataclass(frozen=True)
class Decision:
    """``device`` is None where the gate cannot run; ``reason`` says why, or why this device was taken."""

    device: str | None
    reason: str


def probe() -> Machine:
    """Look at this machine. Imports torch, so it is called only once a gate is selected."""
    import torch

    return Machine(gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0, driver=_driver())


def _driver() -> str | None:
    """The first sign of an NVIDIA driver, or None. ``libcuda`` comes with the driver, ``libcudart`` does not."""
    for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/nvidia0"):
        if Path(path).exists():
            return path
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return "libcuda.so.1"


def decide(gpus_needed: int, machine: Machine, *, forced: str | None = None, only: str | None = None) -> Decision:
    """Device for a gate that needs ``gpus_needed`` GPUs on CUDA.

    Args:
        gpus_needed: at least 1.
        machine: what :func:`probe` saw.
        forced: ``--gate-device``.
        only: the one device the gate's marker allows.
    """
    if forced and only and forced != only:
        return Decision(None, f"--gate-device {forced} is forced, and this gate runs on {only} only")
    want = forced or only
    if want == "cpu":
        return Decision("cpu", "forced" if forced else "this gate runs on cpu only")
    if machine.gpus >= gpus_needed:
        return Decision("cuda", f"{machine.gpus} GPU(s) visible, {gpus_needed} needed")
    if want == "cuda":
        how = "--gate-device cuda is forced" if forced else "this gate runs on cuda only"
        return Decision(None, f"{how}, needs {gpus_needed} GPU(s) and sees {machine.gpus}")
    if machine.gpus > 0:
        return Decision(None, f"{machine.gpus} GPU(s) visible, {gpus_needed} needed; the CPU profile is for machines "
                              "without a GPU (--gate-device cpu forces it)")
    if machine.driver:
        return Decision(None, f"an NVIDIA driver is here ({machine.driver}) and no GPU is visible to torch: a broken node, "
                              "a hidden GPU or a torch without CUDA (--gate-device cpu forces the CPU profile)")
    return Decision("cpu", "no GPU and no driver: CPU profile")
