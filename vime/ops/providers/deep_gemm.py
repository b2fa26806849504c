"""DeepGEMM's block-FP8 product, from an installed ``deep_gemm`` or the copy in vLLM's wheel.

The copy in vLLM's wheel is loaded by itself: no other module of vLLM is imported, so a trainer without an engine can use it, and under
its own name, so that an engine in the same process shares it. Kernels are compiled by nvcc when a shape is first met, some seconds
each, and kept on disk by DeepGEMM.
"""
from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

_VENDORED = "vllm.third_party.deep_gemm"


class DeepGemmMissing(RuntimeError):
    """DeepGEMM is not installed, or can't be loaded. The message says what was tried."""


@cache
def library() -> Any:
    """The module. Raises :class:`DeepGemmMissing`."""
    tried = []
    try:
        return importlib.import_module("deep_gemm")
    except Exception as error:  # an extension of another torch fails in any way
        tried.append(f"deep_gemm: {error}")
    try:
        return importlib.import_module(_VENDORED) if "vllm" in sys.modules else _by_itself()
    except Exception as error:
        tried.append(f"{_VENDORED}: {error}")
        sys.modules.pop(_VENDORED, None)
    raise DeepGemmMissing(f"DeepGEMM can't be loaded ({'; '.join(tried)}); without it block-FP8 products run in Triton, "
                          "with the same bits. Install vllm==0.26.0 or sgl-deep-gemm, and nvcc")


def _by_itself() -> Any:
    if _VENDORED in sys.modules:
        return sys.modules[_VENDORED]
    found = importlib.util.find_spec("vllm")
    for root in (found.submodule_search_locations or ()) if found else ():
        folder = Path(root) / "third_party" / "deep_gemm"
        if (folder / "__init__.py").is_file():
            spec = importlib.util.spec_from_file_location(_VENDORED, folder / "__init__.py", submodule_search_locations=[str(folder)])
            assert spec is not None and spec.loader is not None
            module = sys.modules[_VENDORED] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise ImportError("vLLM's wheel does not hold it" if found else "no vllm package")


def multiply(xq_MK: torch.Tensor, sx_MB: torch.Tensor, wq_NK: torch.Tensor, sw_RB: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``y_MN``: block by block of 128 along K a product of E4M3, multiplied by its scales and added by one fused multiply-add in fp32.

    Args:
        xq_MK, wq_NK: float8_e4m3fn, contiguous; N a multiple of 64 and K one of 128.
        sx_MB: fp32, the scale of each block of a row; ``stride(0) == 1`` and ``stride(1)`` a multiple of 4.
        sw_RB: fp32, of each block of 128 rows and 128 columns, contiguous.
        dtype: bfloat16.
    """
    y_MN = torch.empty(xq_MK.shape[0], wq_NK.shape[0], dtype=dtype, device=xq_MK.device)
    library().fp8_gemm_nt((xq_MK, sx_MB), (wq_NK, sw_RB), y_MN, disable_ue8m0_cast=True)
    return y_MN
