"""docs/alignment.md names every kind of cause that the code can give, and no other."""
from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_kind_of_cause_is_documented():
    text = "\n".join(path.read_text() for path in (ROOT / "alignment").rglob("*.py"))
    given = set(re.findall(r'Cause\(\s*"([a-z_]+)"', text)) | set(re.findall(r'"(rotary_[a-z]+|parts_(?:moved|repeated)|cos_sin_swapped)"', text))
    table = (ROOT / "docs" / "alignment.md").read_text().split("### Likely causes")[1].split("## Records")[0]
    named = set(re.findall(r"`([a-z_]+)`", "\n".join(line for line in table.splitlines() if line.startswith("|"))))
    assert len(given) > 40 and not given - named, sorted(given - named)
    gone = named - given - set(re.findall(r'"([a-z_]+)"', text))  # a kind that is chosen on the way stands for itself
    assert not gone, sorted(gone)
