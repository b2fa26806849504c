"""Which family converts which architecture."""
from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from vime.weights.errors import UnknownArchitecture
from vime.weights.families.base import Family

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe", "glm_moe_dsa", "gemma4")


def families() -> dict[str, Family]:
    """Every family by name."""
    return {name: importlib.import_module(f"{__name__}.{name}").FAMILY for name in FAMILIES}


def family_for(hf_config: Mapping[str, Any]) -> Family:
    """The family of an HF ``config.json``, by its ``architectures``. Raises :class:`UnknownArchitecture`."""
    found = hf_config.get("architectures") or []
    if not isinstance(found, list):
        raise UnknownArchitecture(f"config.json says architectures = {found!r}; expected a list of names")
    covered = {arch: family for family in families().values() for arch in family.architectures}
    for arch in found:
        if arch in covered:
            return covered[arch]
    raise UnknownArchitecture(
        f"config.json says architectures = {found or 'nothing'}, which is not covered. Covered: {', '.join(sorted(covered))}"
    )
