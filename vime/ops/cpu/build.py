"""Compile the kernels once per machine and source, and load them.

Compiled on the user's machine, because the fastest exact kernel depends on its instruction set. The result lies in a
cache folder (``VIME_CACHE_DIR``, else ``$XDG_CACHE_HOME/vime``, else ``~/.cache/vime``) under a digest of source,
flags, torch and processor; it is built aside and renamed, so that a killed build leaves nothing behind.

``VIME_CPU_ISA`` asks for less than the processor has (``amx``, ``avx512-bf16``, ``avx512``, ``avx2``, ``portable``);
tests use it to run the narrower kernels.
"""
from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

SOURCE = Path(__file__).parent
NAME = "vime_cpu_kernels"
#: Widest first: level -> (processor flags it needs, -march).
LEVELS = {
    "amx": (("amx_tile", "amx_bf16", "avx512_bf16"), "sapphirerapids"),
    "avx512-bf16": (("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"), "cooperlake"),
    "avx512": (("avx512f", "avx512bw", "avx512dq", "avx512vl"), "skylake-avx512"),
    "avx2": (("avx2", "fma"), "haswell"),
    "portable": ((), None),
}


class BuildError(RuntimeError):
    """The kernels could not be compiled or loaded. The message says what is missing."""


def cache_dir() -> Path:
    root = os.environ.get("VIME_CACHE_DIR")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vime"


def level() -> str:
    """The widest level that processor, kernel and ``VIME_CPU_ISA`` allow."""
    wanted = os.environ.get("VIME_CPU_ISA")
    if wanted and wanted not in LEVELS:
        raise BuildError(f"VIME_CPU_ISA is {wanted!r}; known: {', '.join(LEVELS)}")
    flags = _processor_flags()
    names = list(LEVELS)
    for name in names[names.index(wanted) if wanted else 0:]:
        if all(flag in flags for flag in LEVELS[name][0]) and (name != "amx" or _amx_permitted()):
            if wanted and name != wanted:
                raise BuildError(f"VIME_CPU_ISA is {wanted!r}, which this processor does not have; it has {name!r}")
            return name
    raise AssertionError("portable needs no flags")


def _processor_flags() -> set[str]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return set(line.split(":", 1)[1].split())
    except OSError:
        pass
    return set()


def _amx_permitted() -> bool:
    """Ask Linux for the tile registers (arch_prctl ARCH_REQ_XCOMP_PERM, XTILEDATA); per process, inherited by threads."""
    try:
        return ctypes.CDLL(None, use_errno=True).syscall(158, 0x1023, 18) == 0
    except OSError:
        return False


def _flags(name: str) -> list[str]:
    march = LEVELS[name][1]
    # No contraction: a * b + c must round the same way wherever it is inlined; fused ones are written as such.
    # OpenMP makes torch's header run a loop on torch's threads (without it the loop is serial). It is not linked: the
    # calls are found in the runtime that torch brought, whatever its name, so that a process has one set of threads.
    return ["-O3", "-std=c++20", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", *([f"-march={march}"] if march else [])]


def _sources() -> list[Path]:
    return sorted(SOURCE.glob("*.cpp"))


def library() -> tuple[str, Path]:
    """Instruction set level, and where the compiled kernels of this source lie or would lie; builds nothing."""
    name = level()
    digest = hashlib.sha256()
    for path in [*_sources(), *sorted(SOURCE.glob("*.h"))]:
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(repr((_flags(name), torch.__version__, sys.version_info[:2], platform.machine())).encode())
    return name, cache_dir() / "cpu-kernels" / f"{name}-{digest.hexdigest()[:16]}" / f"{NAME}.so"


def missing_tools() -> list[str]:
    """What a build would need and does not find, one text each."""
    compiler = os.environ.get("CXX", "c++")
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    needed = {compiler: "a C++ compiler (g++ 11 or newer; or set CXX)", "ninja": "ninja (pip install ninja)"}
    return [package for tool, package in needed.items() if shutil.which(tool, path=places) is None]


def load() -> ModuleType:
    """The compiled module; builds it if this machine has none for this source.

    Raises:
        BuildError: no compiler or ninja, or the compiler failed.
    """
    name, library_path = library()
    if not library_path.exists():
        _build(library_path.parent, library_path, name)
    spec = importlib.util.spec_from_file_location(NAME, library_path)
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"vime's CPU kernels were compiled but cannot be loaded: {error}. They want a compiler whose OpenMP calls are those of "
                         f"torch's runtime (g++; CXX is {os.environ.get('CXX', 'c++')!r}); set CXX, then remove {library_path.parent}") from error
    return module


def _build(folder: Path, target: Path, name: str) -> None:
    if missing := missing_tools():
        raise BuildError(f"vime's CPU kernels are compiled on first use and need {' and '.join(missing)}, not found here.")
    from torch.utils import cpp_extension
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as aside:
            path = os.environ.get("PATH", "")
            os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{path}"
            try:
                cpp_extension.load(NAME, [str(p) for p in _sources()], extra_cflags=_flags(name), build_directory=aside,
                                   is_python_module=False, with_cuda=False)
            except Exception as error:
                raise BuildError(f"vime's CPU kernels did not compile for {name}:\n{error}") from error
            finally:
                os.environ["PATH"] = path
            done = Path(aside) / "done"
            done.mkdir()
            (Path(aside) / f"{NAME}.so").rename(done / f"{NAME}.so")
            shutil.rmtree(folder, ignore_errors=True)
            done.rename(folder)
