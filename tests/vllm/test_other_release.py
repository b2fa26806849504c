"""A vLLM without the classes of latent attention or expert layers still serves dense models."""
from __future__ import annotations

import sys

from vime.vllm import plugin


def test_what_a_release_lacks_is_left_out(monkeypatch) -> None:
    for module, needs in (("latent", "vllm.model_executor.layers.mla"),
                          ("experts", "vllm.model_executor.layers.fused_moe.runner.moe_runner")):
        assert plugin.optional(module) is not None
        monkeypatch.delitem(sys.modules, f"vime.vllm.{module}")
        monkeypatch.setitem(sys.modules, needs, None)  # an import of it fails
        assert plugin.optional(module) is None
        plugin._where_vllm_has_it(module)()  # and routes nothing
