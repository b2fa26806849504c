"""Six layers of GLM-5.2 over eight expert-parallel ranks: rollout, online update, one step, and zero difference.

On GPUs the full profile and one step with an online update before it; on a CPU the small profile with several updates. Then
the same batch at EP 1, 2, 4 and 8: one table of digests, all equal. On a CPU unpatched transformers is asked first.
"""
from __future__ import annotations

import pytest

from gates import experts
from gates.test_ep import third_party


@pytest.mark.timeout(480)
@pytest.mark.gate_ep8
def test_glm52_6layer_deterministic_e2e(gate, expert_harness):
    harness = expert_harness(gate, 8)
    third_party(gate, harness)
    first = harness.update()  # the engine serves weights that came over the online path, not those it read from disk
    gate.happened("an online update came before the rollout", first.version)
    worst = experts.rollout_and_step(gate, harness, harness.profile.updates)
    assert worst < 1e-6, f"train_rollout_logprob_abs_diff is {worst}"
    if gate.device == "cpu":
        assert harness.version > 2, "the CPU profile runs more than one update"
    experts.over_topologies(gate, harness)
