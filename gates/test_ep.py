"""Gates: end to end with latent and sparse attention and experts, at EP 1, 2 and 8.

On a machine without a GPU the small profile runs over as many gloo ranks as the gate names: the same code path. The gate for
eight ranks runs everything on one engine and one pool of ranks: several updates, every layer, the nine planted faults, and
the table over topologies. Unpatched ``transformers`` is the third party there, and on GPUs at every size.
"""
from __future__ import annotations

import pytest

from alignment.verdict import Place
from gates import choosing, experts
from vime.weights.counted import is_counted


def end_to_end(gate, harness):
    """Rollout, step, update, rollout, then every layer: one update on a CPU, the profile's on a GPU. Its own fault: a router in bf16."""
    if gate.control_only:
        samples, engine = experts.layers(harness)
        gate.record(experts.planted(harness, samples, engine, "router in bf16", experts.controls(harness)["router in bf16"]))
        return
    if gate.device == "cuda":
        third_party(gate, harness)
    worst = experts.rollout_and_step(gate, harness, harness.profile.updates if gate.device == "cuda" else 1)
    assert worst < 1e-6, f"train_rollout_logprob_abs_diff is {worst}"
    layer = experts.controls(harness)["router in bf16"]
    samples, engine = experts.layers(harness)
    gate.record(experts.clean_layers(gate, harness, samples, engine))
    gate.control("router in bf16", Place(layer=layer), experts.planted(harness, samples, engine, "router in bf16", layer))


def third_party(gate, harness):
    """Unpatched transformers beside the gate's own engine and, on a CPU, beside one in fp32 (kernels of attention for GPUs take bf16).

    Not of weights that lie in no file: these are the models of full width, 122 GiB in fp32 beside trainer and engine.
    """
    if is_counted(harness.folder):
        gate.describe(third_party_by=f"none: transformers in fp32 does not fit beside {harness.profile.name}")
        return
    harness.pristine()
    on_cpu = choosing.engine_in_fp32(harness) if gate.device == "cpu" else ()
    for verdict in (*choosing.verdicts(harness), *on_cpu):
        gate.third_party(verdict)
    gate.describe(third_party_by=f"transformers on {gate.device}")


@pytest.mark.gate_ep1
def test_ep1(gate, expert_harness):
    end_to_end(gate, expert_harness(gate, 1))


@pytest.mark.gate_ep2
def test_ep2(gate, expert_harness):
    """As at EP 1; and where EP 1 fits on each of the two ranks as well, the same bits at both sizes."""
    harness = expert_harness(gate, 2)
    end_to_end(gate, harness)
    if not gate.control_only and len(experts.spreads_on(harness.profile, 2)) > 1:
        experts.over_topologies(gate, harness)


@pytest.mark.gate_ep8
def test_ep8(gate, expert_harness):
    harness = expert_harness(gate, 8)
    if gate.control_only:
        end_to_end(gate, harness)
        return
    third_party(gate, harness)
    worst = experts.rollout_and_step(gate, harness, harness.profile.updates)
    assert worst < 1e-6, f"train_rollout_logprob_abs_diff is {worst}"
    experts.layerwise_zero(gate, harness)
    experts.over_topologies(gate, harness)
