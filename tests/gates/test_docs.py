"""The example of docs/gates.md works as it stands."""
from __future__ import annotations

import re
from pathlib import Path

pytest_plugins = ["pytester"]


def test_the_example(pytester):
    page = (Path(__file__).parents[2] / "docs" / "gates.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    pytester.makepyfile(test_mine=example)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--gate-require", "batch", "--gate-device", "cpu")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["batch *PASS *tokens 16/16*1/1*"])
