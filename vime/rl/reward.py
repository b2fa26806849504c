"""Rewards that a program can check.

``math`` is the verifiable reward of a word problem: 1 for the right number (after ``####`` if the model wrote that,
else its last number), plus a small shaped part, since a 135M model is nearly always wrong and a group whose rewards
are all equal teaches nothing. ``gate`` adds a fixed term per sample, so that rewards vary within every group by
construction: a gate must not depend on what the model happens to say.
"""
from __future__ import annotations

import math

from vime.rl.data import Problem, final_answer, last_number
from vime.rl.seeds import kept_hash

KINDS = ("math", "gate")


def math_reward(problem: Problem, response: str) -> float:
    """1 for the right answer, plus 0.1 for ``#### N``, plus up to 0.1 for a number close to the target."""
    marked = final_answer(response)
    given = marked if marked is not None else last_number(response)
    reward = 0.1 if marked is not None else 0.0
    if given is None:
        return reward
    if given == problem.target:
        return reward + 1.1
    distance = abs(float(given) - float(problem.target)) / (abs(float(problem.target)) + 1.0)
    return reward + 0.1 * math.exp(-min(distance, 700.0))


def gate_reward(problem: Problem, response: str, sample_index: int) -> float:
    """:func:`math_reward` plus a term in [0, 1) that depends on the prompt and the sample's place alone."""
    return math_reward(problem, response) + (kept_hash("reward", problem.prompt_id, sample_index) % 1024) / 1024


def reward(kind: str, problem: Problem, response: str, sample_index: int) -> float:
    """The reward of one sample. ``kind`` is one of :data:`KINDS`."""
    if kind == "math":
        return math_reward(problem, response)
    if kind == "gate":
        return gate_reward(problem, response, sample_index)
    raise ValueError(f"unknown reward {kind!r}; expected one of {', '.join(KINDS)}")
