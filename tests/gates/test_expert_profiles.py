"""Which model the gates on experts take: the true widths on GPUs, never the small one there by default."""
from __future__ import annotations

import types

from alignment.verdict import Status
from gates import dryrun, experts
from gates.profiles import find
from gates.synthetic_experts import SPARSE


def test_each_device_has_a_profile_that_runs_on_it():
    for device, name in experts.PROFILES.items():
        assert device in find(name).devices
    assert "cpu" not in find(experts.PROFILES["cuda"]).devices
    assert dryrun.run("ep8").info["profile"] == experts.PROFILES["cuda"]


def test_the_markers_leave_the_profile_to_the_device():
    from gates import test_ep

    for test in (test_ep.test_ep1, test_ep.test_ep2, test_ep.test_ep8):
        assert all("profile" not in mark.kwargs for mark in test.pytestmark)


def a_step(monkeypatch, digests, without=()):
    """What the gates on experts record of one step, told by ranks that answer with these gradients."""
    harness = types.SimpleNamespace(folder="", varied=1, train=lambda *_: types.SimpleNamespace(ratio_off=0, without_gradient=list(without)))
    harness.session = types.SimpleNamespace(pool=types.SimpleNamespace(ranks=types.SimpleNamespace(call=lambda _: digests)))
    config = {**SPARSE["glm5.2-6layer-tiny"]}
    monkeypatch.setattr("vime.rl.config.read_hf_config", lambda _: config)
    recorded, happened = [], {}
    experts._step(types.SimpleNamespace(record=recorded.append, happened=happened.__setitem__), harness, [], 0)
    return recorded[-1], happened["step 0: every expert had a token"], experts._main_parameters(harness)


def test_a_parameter_that_nobody_trained_is_told(monkeypatch):
    """Also one that was frozen, of which no rank says anything."""
    _, _, names = a_step(monkeypatch, [])
    ranks = [dict.fromkeys(sorted(names)[i::2], "digest") for i in range(2)]
    verdict, tokens, _ = a_step(monkeypatch, ranks)
    assert verdict.green and tokens and verdict.coverage["tensors"].compared == 168
    router = "decoder.layers.4.mlp.router.weight"
    frozen = [{n: d for n, d in part.items() if n != router} for part in ranks]
    for digests, without in ((frozen, ()), (ranks, (router,))):
        verdict, tokens, _ = a_step(monkeypatch, digests, without)
        assert verdict.status is Status.FAIL and verdict.first_bad.tensor == router and tokens
    idle = "decoder.layers.4.mlp.experts.local_experts.3.linear_fc1.weight"
    verdict, tokens, _ = a_step(monkeypatch, ranks, (idle,))
    assert verdict.green and not tokens and verdict.coverage["tensors"].compared == 167
