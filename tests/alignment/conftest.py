"""Two dumps on disk, compared as the command does."""
from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from alignment import Status
from alignment.compare import compare_runs


@pytest.fixture
def files(tmp_path):
    """The verdict on two dumps in files, after that on the first and its copy, which has to pass."""
    def compare(a, b, clean=True, **kwargs):
        for side, tensors in (("a", a), ("twin", a), ("b", b)):
            if any(t.is_complex() for t in tensors.values()):
                torch.save(tensors, tmp_path / f"{side}.pt")
            else:
                save_file({n: t.contiguous().clone() for n, t in tensors.items()}, tmp_path / f"{side}.safetensors")
        suffix = "pt" if any(t.is_complex() for t in a.values()) else "safetensors"
        if clean:
            assert compare_runs(tmp_path / f"a.{suffix}", tmp_path / f"twin.{suffix}", **kwargs).status is Status.PASS
        return compare_runs(tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}", **kwargs)

    return compare
