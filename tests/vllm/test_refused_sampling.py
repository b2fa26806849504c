"""What vime's sampler would leave out silently is refused by name: penalties and the like, and logits processors that a request asked for."""
from __future__ import annotations

import types

import pytest

from vime.vllm.sampler import UnsupportedSampling, _refuse_unsupported


def metadata(*processors: object, **changes: object) -> types.SimpleNamespace:
    plain = {"no_penalties": True, "allowed_token_ids_mask": None, "bad_words_token_ids": {}, "logprob_token_ids": None,
             "logitsprocs": types.SimpleNamespace(all=iter(processors))}
    return types.SimpleNamespace(**plain | changes)


def builtin(name: str, **state: object) -> object:
    from vllm.v1.sample.logits_processor import builtin as theirs

    made = object.__new__(getattr(theirs, name))
    for field, value in state.items():
        setattr(made, field, value)
    return made


class Mine:
    """Somebody's own processor."""


@pytest.mark.parametrize(("name", "field", "asked", "word"), [
    ("MinPLogitsProcessor", "min_p_count", 1, "min_p"), ("LogitBiasLogitsProcessor", "biases", {0: {3: 1.0}}, "logit_bias"),
    ("MinTokensLogitsProcessor", "min_toks", {0: (1, [], set())}, "min_tokens")])
def test_logits_processors_that_a_request_asked_for_are_refused(name, field, asked, word):
    _refuse_unsupported(metadata(builtin(name, **{field: type(asked)()})))
    with pytest.raises(UnsupportedSampling, match=f"sampling with {word} is not"):
        _refuse_unsupported(metadata(builtin(name, **{field: asked})))


def test_processors_of_others_and_what_is_asked_beside_are_named_together():
    _refuse_unsupported(metadata())
    _refuse_unsupported(metadata(logitsprocs=None))
    with pytest.raises(UnsupportedSampling, match="penalties, the logits processor Mine"):
        _refuse_unsupported(metadata(Mine(), no_penalties=False))
