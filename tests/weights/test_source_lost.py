"""A source that changes while several ranks read it: an error with the file, at once, and no rank left waiting for another."""
from __future__ import annotations

import os
import time

import pytest

from vime.weights.folders import CheckpointError
from vime.weights.roundtrip import RoundTrip
from vime.weights.topology import Sizes


@pytest.mark.parametrize("sizes", [Sizes(), Sizes(pp=2), Sizes(tp=2, pp=2)], ids=str)
def test_a_file_that_changes_during_the_export_is_named(sizes, checkpoint, tmp_path):
    source = checkpoint("llama")
    copy = tmp_path / "source"
    copy.mkdir()
    for file in source.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    shard = sorted(copy.glob("*.safetensors"))[0]

    def touch(phase: str, done: int, total: int) -> None:
        if phase == "local" and done >= total:
            os.utime(shard, ns=(1, 1))

    began = time.monotonic()
    with pytest.raises(CheckpointError, match=rf"{shard.name} changed while it was read"), RoundTrip(copy, sizes, report=touch) as trip:
        trip.run(out=tmp_path / "out")
    assert time.monotonic() - began < 100 and not (tmp_path / "out").exists()
