"""A control group's cap counts, of either version, and files that it keeps in memory do not."""
from __future__ import annotations

import psutil
import pytest

from vime.rl import memory

GIB = 2**30


def group(folder, version, limit, used, files):
    at = folder if version == 2 else folder / "memory"
    at.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, used), strict=True):
        (at / name).write_text(f"{value}\n")
    whole = "" if version == 2 else "total_"
    own = "" if version == 2 else "inactive_file 0\nactive_file 0\n"
    (at / "memory.stat").write_text(f"{own}anon 5\n{whole}inactive_file {files // 4}\n{whole}active_file {files - files // 4}\nsome thing else\n")


@pytest.mark.parametrize("version", [1, 2])
def test_a_cap_counts_and_kept_files_do_not(version, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "GROUPS", tmp_path)
    whole = psutil.virtual_memory().available
    assert abs(memory.available_bytes() - whole) < GIB
    group(tmp_path, version, 3 * GIB, 2 * GIB, GIB)
    assert memory.available_bytes() == min(2 * GIB, memory.available_bytes())
    assert memory.available_bytes() == 2 * GIB or whole < 2 * GIB
    group(tmp_path, version, 3 * GIB, 3 * GIB - 4096, 0)
    assert memory.available_bytes() == 4096
    (tmp_path / ("memory.max" if version == 2 else "memory/memory.limit_in_bytes")).write_text("max\n")
    assert abs(memory.available_bytes() - whole) < GIB
