"""Which tensors of a checkpoint belong to the policy, and which lie in its files though neither side evaluates them.

Published checkpoints carry layers for multi-token prediction, and GLM-5 indexers of layers that take their indices from a
layer before. A conversion keeps them, bit for bit. Trainer and engine leave them out, by this one rule, and say so.
"""
from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from vime.latent import indexer_types
from vime.weights.errors import ConfigMismatch
from vime.weights.families.base import COMPUTED, Config

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
#: ``model_type`` of the families whose files may hold layers past ``num_hidden_layers``.
_MTP = ("deepseek_v3", "glm4_moe", "glm_moe_dsa")


def left_out(hf_config: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Name -> why it is left out, for the tensors of ``names`` (those of the files) that are no part of the policy.

    Raises:
        ConfigMismatch: the files hold layers past ``num_hidden_layers`` that ``num_nextn_predict_layers`` doesn't count. An
            engine that isn't told of them takes them for tensors of the model.
    """
    out = {name: "rotary frequencies, which the config gives" for name in names if name.endswith(COMPUTED)}
    family = hf_config.get("model_type")
    if family not in _MTP:
        return out
    layers, mtp = Config(hf_config).num_hidden_layers, hf_config.get("num_nextn_predict_layers") or 0
    if not isinstance(mtp, int) or mtp < 0:
        raise ConfigMismatch(f"config.json: num_nextn_predict_layers is {mtp!r}; expected the number of prediction layers, 0 for none")
    kinds = indexer_types(hf_config) if family == "glm_moe_dsa" else []
    for name in names:
        found = _LAYER.match(name)
        if not found:
            continue
        layer = int(found[1])
        if layer >= layers + mtp:
            raise ConfigMismatch(f"{name}: config.json has num_hidden_layers {layers} and num_nextn_predict_layers {mtp}, so no layer "
                                 f"{layer}; write the number of prediction layers that the files hold, or take them out")
        if layer >= layers:
            out[name] = f"layer {layer}, for multi-token prediction"
        elif kinds and ".indexer." in name and kinds[layer] == "shared":
            out[name] = f"the indexer of layer {layer}, which takes its indices from a layer before"
    return out


def describe(left: Mapping[str, str]) -> str:
    """One line on what was left out; nothing if nothing was."""
    if not left:
        return ""
    reasons = list(dict.fromkeys(left.values()))
    more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return f"{len(left)} tensors of the checkpoint are no part of the policy and left out: {'; '.join(reasons[:3])}{more}"
