"""What controller and engine say to each other: requests, samples, errors. Imports neither vLLM nor torch."""
from __future__ import annotations

import msgspec

from vime.errors import VimeError


class EngineError(VimeError):
    """The engine answered that it will not or cannot do what was asked. The message is the engine's."""


class EngineDied(EngineError):
    """The engine process is gone or no longer answers. The message has the last lines of its log where there is one."""


class EngineStartError(EngineError):
    """The engine process ended, or gave an error, before it was ready."""


class EnginePoisoned(EngineError):
    """A weight update failed; the engine refuses to generate until a full update succeeds."""


class UpdateFailed(EngineError):
    """A weight update did not end with the weights that were announced."""


ERRORS = {cls.__name__: cls for cls in (EngineError, EngineDied, EngineStartError, EnginePoisoned, UpdateFailed)}


class Request(msgspec.Struct, kw_only=True):
    """One sample to draw. ``seed`` in ``[0, 2**63)``; temperature 0 is greedy; ``top_k`` -1 keeps all."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 0
    stop_token_ids: list[int] = []
    prompt_logprobs: bool = False

    def problem(self, vocab_size: int, max_model_len: int) -> str | None:
        """Why an engine cannot serve this request, or None."""
        found = self.prompt_token_ids
        checks = (
            (bool(self.request_id), "request_id is empty"),
            (bool(found), "prompt_token_ids is empty"),
            (all(0 <= t < vocab_size for t in found), f"prompt has a token id outside [0, {vocab_size})"),
            (self.max_tokens >= 1, f"max_tokens is {self.max_tokens}, expected at least 1"),
            (len(found) + self.max_tokens <= max_model_len,
             f"prompt {len(found)} + max_tokens {self.max_tokens} tokens exceed the engine's max_model_len {max_model_len}"),
            (self.temperature >= 0, f"temperature is {self.temperature}, expected >= 0"),
            (0 < self.top_p <= 1, f"top_p is {self.top_p}, expected in (0, 1]"),
            (self.top_k == -1 or self.top_k >= 1, f"top_k is {self.top_k}, expected -1 or >= 1"),
            (0 <= self.seed < 2**63, f"seed is {self.seed}, expected in [0, 2**63)"),
        )
        return next((text for good, text in checks if not good), None)


class Sample(msgspec.Struct, kw_only=True):
    """One drawn sample.

    ``logprobs[i]`` belongs to ``token_ids[i]``; fp32 values, carried exactly as doubles. ``prompt_logprobs[i]`` belongs to
    ``prompt_token_ids[i + 1]``. ``weight_version`` is the version of all its tokens. ``num_cached_tokens`` prompt tokens came
    from the prefix cache. ``seeded`` is False where a stock engine on CPU had to drop the seed (see ``Engine.add``).
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    weight_version: int
    num_cached_tokens: int
    prompt_logprobs: list[float] | None = None
    seeded: bool = True


class RecordOptions(msgspec.Struct, kw_only=True):
    """What to record from now on. ``layers``: indices, None for all, empty for none. ``routing``: which experts and which
    keys each layer chose."""

    enabled: bool = True
    layers: list[int] | None = None
    embedding: bool = True
    final_norm: bool = True
    logits: bool = False
    routing: bool = False
