"""What one sampled sequence is on its way from the engine to the optimizer."""
from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass
class Trajectory:
    """A prompt and one response to it.

    Attributes:
        request_id: unique in the run; both sides key their records by it.
        token_ids: prompt and response, ``[N]``.
        prompt_len: number of prompt tokens ``P``; the response is ``token_ids[P:]``, ``[R]``.
        rollout_logprobs: the engine's log-probability of each response token, fp32 ``[R]``.
        old_logprobs: the trainer's own, of the same weights, fp32 ``[R]``; the ratio of the loss is taken to these.
        weight_version: the weights that sampled it.
        seed: of its random numbers in the engine.
    """

    request_id: str
    prompt_id: str
    sample_index: int
    token_ids: list[int]
    prompt_len: int
    rollout_logprobs: np.ndarray
    weight_version: int
    finish_reason: str = ""
    num_cached_tokens: int = 0
    seed: int = 0
    response: str = ""
    reward: float = 0.0
    advantage: float = 0.0
    old_logprobs: np.ndarray | None = None

    @property
    def response_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len:]

    @property
    def response_len(self) -> int:
        return len(self.token_ids) - self.prompt_len
