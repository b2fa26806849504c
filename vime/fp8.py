"""Which linear layers run in block FP8: one decision for both sides, by the name a layer has in a Hugging Face checkpoint.

It covers every linear layer of a decoder layer, routed and shared experts included, but not: the router (FP32), the
indexer (it only chooses keys), and ``kv_b_proj``, which latent attention takes apart into query and output and never
evaluates as a layer. The embedding and the LM head lie outside of decoder layers. How a layer is evaluated:
:func:`vime.ops.linear_fp8`.
"""
from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from vime.errors import BadInput

#: The name of the switch, beside the operations that it changes.
FP8 = "fp8"
#: Values of ``--fp8``: off, or activations 1x128 and weights 128x128.
MODES = ("", "blockwise")

_ATTENTION = "q_proj|k_proj|v_proj|o_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa"
_LAYER = re.compile(rf"model\.layers\.\d+\.(?:self_attn\.(?:{_ATTENTION})|"
                    r"mlp\.(?:shared_experts\.|experts\.(?:\d+|\*)\.)?(?:gate|up|down)_proj)(?:\.weight)?")


class QuantisedCheckpoint(BadInput):
    """A checkpoint whose weights are quantised. The message says by what, and what to do."""


def applies(name: str) -> bool:
    """Whether the layer of this Hugging Face name (of the module or of its weight) is evaluated in block FP8."""
    return _LAYER.fullmatch(name) is not None


def decide(names: Iterable[str]) -> bool:
    """:func:`applies` for tensors that one side holds as one. Raises ValueError if they are not all alike."""
    names = list(names)
    found = {applies(name) for name in names}
    if len(found) != 1:
        raise ValueError(f"{', '.join(names) or 'nothing'} are one tensor here, and only some of them run in FP8")
    return found.pop()


def summary(names: Iterable[str]) -> str:
    """Count and digest of the layers in FP8, for the contract; all experts of a layer count as one."""
    kinds = sorted({re.sub(r"\.experts\.\d+\.", ".experts.*.", name) for name in names})
    return f"{len(kinds)}:{hashlib.sha256('|'.join(kinds).encode()).hexdigest()[:12]}"


def problem(ops: Iterable[str], experts: bool) -> str | None:
    """Why FP8 cannot be had with these operations aligned, or None. ``experts``: the model has expert layers."""
    missing = [op for op in ("linear", *(["moe"] if experts else [])) if op not in set(ops)]
    if not missing:
        return None
    return (f"block FP8 is on and {', '.join(missing)} is not aligned: it is a form of aligned linear layers, and of aligned experts. "
            f"Switch {', '.join(missing)} on, or FP8 off, on both sides")


def refuse_quantised(config: Mapping[str, Any], names: Iterable[str], folder: object = "the checkpoint") -> None:
    """Refuse a checkpoint with a ``quantization_config``: neither side takes FP8 bytes apart when it loads.

    Args:
        config: its ``config.json``.
        names: the names of its tensors, which tell whether scales came along.

    Raises:
        QuantisedCheckpoint: see there.
    """
    quant = config.get("quantization_config")
    if not quant:
        return
    scaled = sum(name.endswith("_scale_inv") for name in names)
    method = quant.get("quant_method", "unknown") if isinstance(quant, Mapping) else quant
    scales = f"{scaled} tensors of scales" if scaled else "no scales (*_scale_inv), without which FP8 bytes are not weights"
    raise QuantisedCheckpoint(
        f"config.json of {folder} has a quantization_config (quant_method {method!r}), with {scales}. Trainer and engine train and "
        "update weights in fp32 or bf16 and quantise them themselves. Dequantise the checkpoint to bf16 (weight times scale of its "
        "128x128 block), drop quantization_config from config.json, and run with --fp8 blockwise, which quantises in the same blocks")
