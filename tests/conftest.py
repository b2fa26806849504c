"""Fixtures for tests outside ``gates/`` that are gates themselves."""
from gates.expert_fixture import expert_harness, expert_lab

__all__ = ["expert_harness", "expert_lab"]
