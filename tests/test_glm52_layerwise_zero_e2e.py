"""Layers 0 to 5 of six-layer GLM-5.2: every element of every layer's output equal on both sides, by request, position and token.

The terminal position of a request is excluded: its token was sampled last and the engine never computes it. Nine planted
faults must each turn the gate red at the layer they were planted in.
"""
from __future__ import annotations

import pytest

from gates import experts


@pytest.mark.timeout(480)
@pytest.mark.gate_ep8
def test_glm52_layerwise_zero_e2e(gate, expert_harness):
    experts.layerwise_zero(gate, expert_harness(gate, 8))
