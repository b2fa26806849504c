"""cuBLAS without workspace: it then cannot split K, so the additions of a row keep one order at every M.

A split along K writes partial sums to a workspace. Both of torch's cuBLAS paths read the size of theirs from the
environment once, before the first GEMM of the process; this module sets them on import and refuses when it comes too
late. Starving is necessary, not sufficient: :mod:`vime.ops.cuda.gemm` proves every shape on the device it runs on.
"""
from __future__ import annotations

import os

import torch

STARVED = {"CUBLASLT_WORKSPACE_SIZE": "0", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}


class WorkspaceTooLate(RuntimeError):
    """cuBLAS may have its workspace already."""


def starve() -> None:
    """Take cuBLAS's workspace away. Call before the first GEMM of the process.

    Raises:
        WorkspaceTooLate: CUDA was initialised under other settings, so a GEMM may have run with a workspace.
    """
    found = {name: os.environ.get(name) for name in STARVED}
    if found != STARVED and torch.cuda.is_initialized() and torch.cuda.memory_allocated() > 0:
        settings = " ".join(f"{name}={value}" for name, value in STARVED.items())
        raise WorkspaceTooLate(
            f"vime.ops.cuda was loaded after CUDA had been used with {found}; cuBLAS may keep a workspace and split K. "
            f"Import vime.ops.cuda (vime.enable does) before the first CUDA tensor, or start the process with {settings}."
        )
    os.environ.update(STARVED)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_tf32 = False


def mm(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """Plain product through cuBLAS; fp32 accumulation, one rounding."""
    return torch.mm(a_MK, b_KN)
