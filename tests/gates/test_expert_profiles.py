"""Which model the gates on experts take: the true widths on GPUs, never the small one there by default."""
from __future__ import annotations

from gates import dryrun, experts
from gates.profiles import find


def test_each_device_has_a_profile_that_runs_on_it():
    for device, name in experts.PROFILES.items():
        assert device in find(name).devices
    assert "cpu" not in find(experts.PROFILES["cuda"]).devices
    assert dryrun.run("ep8").info["profile"] == experts.PROFILES["cuda"]


def test_the_markers_leave_the_profile_to_the_device():
    from gates import test_ep

    for test in (test_ep.test_ep1, test_ep.test_ep2, test_ep.test_ep8):
        assert all("profile" not in mark.kwargs for mark in test.pytestmark)
