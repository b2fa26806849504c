"""The suite runs in processes of its own (see test_versions.py): Megatron's CPU support is process-wide."""
from __future__ import annotations

import os

collect_ignore = ["te_standin"] if os.environ.get("VIME_MEGATRON_SUITE") else ["suite", "te_suite", "te_standin"]
