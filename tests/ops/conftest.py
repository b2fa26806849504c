"""Fixtures of the operation tests: threads restored, both dtypes."""
from __future__ import annotations

import pytest
import torch
from hypothesis import settings

settings.register_profile("ops", deadline=None, max_examples=25, derandomize=True)


@pytest.fixture(autouse=True)
def _ops_profile():
    before = settings.get_current_profile_name() if hasattr(settings, "get_current_profile_name") else "default"
    settings.load_profile("ops")
    yield
    settings.load_profile(before)


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request):
    return request.param
