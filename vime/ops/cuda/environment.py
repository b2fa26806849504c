"""What decides, besides a shape, which kernel of a library runs: chip, driver, libraries, our own sources, switches.

A proof of invariance holds for one such environment. Everything is read from what is loaded, not from what was asked
for at installation: the version that cuBLAS itself reports, the bytes of the FlashAttention library, the switches in effect.
"""
from __future__ import annotations

import ctypes
import hashlib
import os
from pathlib import Path

import torch

from vime.ops.providers import cublas, fa3, flashinfer

#: Variables that make cuBLAS or Triton take other kernels. Unset is what was measured.
SWITCHES = ("NVIDIA_TF32_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_EMULATE_SINGLE_PRECISION",
            "CUBLAS_EMULATION_STRATEGY", "DISABLE_PTXAS_OPT", "TRITON_F32_DEFAULT", "TRITON_DISABLE_LINE_INFO")
#: Fields in which trainer and engine must agree; the others (driver, switches that are off) decide whether a proof is valid here.
#: ``flashinfer`` is there only where its kernel was chosen.
SHARED = ("chip", "torch", "cuda", "cublas", "cublaslt", "triton", "fa3", "flashinfer", "kernels")


def current(device: int = 0) -> dict[str, str]:
    """The environment of this process on a CUDA device. Values are short texts."""
    import triton

    from vime.ops.cuda import ATTENTION_ENV

    properties = torch.cuda.get_device_properties(device)
    chosen = {"flashinfer": flashinfer.built_with()} if os.environ.get(ATTENTION_ENV) == "flashinfer" else {}
    return chosen | {
        "chip": f"{properties.name}, compute {properties.major}.{properties.minor}, {properties.multi_processor_count} multiprocessors",
        "driver": driver_version(), "torch": str(torch.__version__), "cuda": str(torch.version.cuda), "triton": str(triton.__version__),
        "cublas": library_version("libcublas.so", "cublasGetProperty"), "cublaslt": library_version("libcublasLt.so", "cublasLtGetVersion"),
        "fa3": attention_library(), "kernels": sources_digest(), "switches": switches(),
    }


def driver_version() -> str:
    """Of the kernel module, or the version of the driver's interface where that can't be read."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
        return next(word for word in line.split() if word[0].isdigit() and "." in word)
    except (OSError, IndexError, StopIteration):
        return f"interface {torch._C._cuda_getDriverVersion()}"


def loaded_library(name: str) -> str | None:
    """Path under which a library of this name is mapped into the process."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and name in fields[5].rpartition("/")[2]:
            return fields[5]
    return None


def library_version(name: str, function: str) -> str:
    """What a loaded cuBLAS library says of itself, e.g. ``"13.0.2"``. ``"not loaded"`` before the first use of CUDA."""
    path = loaded_library(name)
    if path is None:
        return "not loaded"
    library = ctypes.CDLL(path)
    if function == "cublasLtGetVersion":
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        return str(library.cublasLtGetVersion())
    parts = []
    for which in range(3):  # major, minor, patch
        value = ctypes.c_int(-1)
        library.cublasGetProperty(which, ctypes.byref(value))
        parts.append(str(value.value))
    return ".".join(parts)


def attention_library() -> str:
    """Size and digest of both ends of the FlashAttention library (a build id lies at the front), or why there is none."""
    try:
        path = fa3.library()
    except fa3.KernelMissing:
        return "missing"
    size, end = path.stat().st_size, 1 << 20
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        digest.update(file.read(end))
        file.seek(max(0, size - end))
        digest.update(file.read(end))
    return f"{size} bytes, {digest.hexdigest()}"


def sources_digest() -> str:
    """Of our own kernels and of how the libraries are called."""
    digest = hashlib.blake2b(digest_size=8)
    here = Path(__file__).parent
    for path in sorted([*here.glob("*.py"), *(here.parent / "providers").glob("*.py")]):
        if path.name not in _NO_KERNELS:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


#: Files that prove, time or keep, and hold no kernel: a change there leaves a proof valid.
_NO_KERNELS = frozenset({"__init__.py", "bench.py", "environment.py", "needs.py", "proof.py", "proof_attention.py", "prove.py", "proven.py",
                         "shapes.py", "stock_gemm.py"})


def switches() -> str:
    """Switches that are set to something else than what was measured, in words; ``"none"`` is the usual case."""
    found = [f"{name}={os.environ[name]}" for name in SWITCHES if os.environ.get(name) not in (None, "", "0")]
    if torch.backends.cuda.matmul.allow_tf32:
        found.append("torch.backends.cuda.matmul.allow_tf32")
    if torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction:
        found.append("torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction")
    preferred = str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2].lower()
    if preferred not in ("default", "cublas"):
        found.append(f"torch.backends.cuda.preferred_blas_library={preferred}")
    starved = [f"{name}={os.environ.get(name)}" for name, value in cublas.STARVED.items() if os.environ.get(name) != value]
    return ", ".join(found + starved) or "none"


def digest(environment: dict[str, str]) -> str:
    """16 hex digits over every field."""
    text = "\n".join(f"{name}={environment[name]}" for name in sorted(environment))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def changes(then: dict[str, str], now: dict[str, str]) -> list[str]:
    """Fields that differ, as ``"cublas was 13.0.1 and is 13.1.0"``."""
    return [f"{name} was {then.get(name, 'unknown')} and is {now.get(name, 'unknown')}"
            for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)]
