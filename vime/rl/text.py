"""Questions to token ids and token ids to text, without importing a model library.

A prompt goes to the engine as token ids, so that both sides count the same tokens. ``tokenizers`` alone loads in
milliseconds where ``transformers`` takes seconds on two cores.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vime.errors import BadInput

INSTRUCTION = "Solve it. End with #### and the number."


class TokenizerError(BadInput):
    """The checkpoint folder has no usable tokenizer."""


class Text:
    """The tokenizer of one checkpoint folder, with its chat template if it has one.

    Raises:
        TokenizerError: the folder has no ``tokenizer.json``, or it or a file beside it cannot be read; on encoding, that the
            chat template cannot be used.
    """

    def __init__(self, folder: str | Path) -> None:
        from tokenizers import Tokenizer

        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(f"{folder} has no tokenizer.json; expected the tokenizer files beside config.json")
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # what tokenizers raises has no class of its own
            raise TokenizerError(f"{file} cannot be read: {error}") from None
        self._settings = _read_json(folder / "tokenizer_config.json")
        self._template_file = folder / "tokenizer_config.json"
        if (folder / "chat_template.jinja").is_file():
            self._template_file = folder / "chat_template.jinja"
            try:
                self._template: str | None = self._template_file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise TokenizerError(f"{self._template_file} cannot be read: {error}; copy it again from where the checkpoint came from") from None
        else:
            self._template = _template_of(self._settings, self._template_file)
        self.eos_token_ids = _eos_ids(folder)

    def encode_question(self, question: str) -> list[int]:
        """Token ids of the prompt of one word problem."""
        content = f"{question} {INSTRUCTION}"
        if self._template is None:
            return self._tokenizer.encode(f"Question: {content}\nAnswer:", add_special_tokens=False).ids
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # a template comes from outside

        # a special token is its text, or an object that holds it: {"__type": "AddedToken", "content": "<s>", ...}
        tokens = {k: v.get("content") if isinstance(v, dict) else v for k, v in self._settings.items() if k.endswith("_token")}
        names = {k: v for k, v in tokens.items() if isinstance(v, str)}
        try:
            text = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(self._template).render(
                messages=[{"role": "user", "content": content}], add_generation_prompt=True, **names
            )
        except (TemplateError, TypeError) as error:  # TypeError: what a template does with a value of another type
            raise TokenizerError(f"the chat template in {self._template_file} cannot be used: {error}; expected one that needs messages, "
                                 f"add_generation_prompt and the special tokens ({', '.join(sorted(names)) or 'none here'}) alone; change it, or "
                                 "take it out to ask without a template") from None
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Text of ``ids`` without special tokens; ids outside the vocabulary are left out."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _read_json(path: Path) -> dict[str, Any]:
    """An object of settings; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} is not readable JSON: {error}; copy it again from where the checkpoint came from") from None
    if not isinstance(found, dict):
        raise TokenizerError(f"{path} holds a {type(found).__name__}; expected an object of settings")
    return found


def _template_of(settings: dict[str, Any], file: Path) -> str | None:
    """The chat template of a tokenizer's settings: a text, or of a list of named ones the default; None where there is none."""
    found = settings.get("chat_template")
    if found is None or isinstance(found, str):
        return found
    kind = type(found).__name__
    wrong = f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
    if isinstance(found, list):
        odd = [e for e in found if not (isinstance(e, dict) and isinstance(e.get("name"), str) and isinstance(e.get("template"), str))]
        named = {} if odd else {entry["name"]: entry["template"] for entry in found}
        if "default" in named:
            return named["default"]
        names = ", ".join(map(repr, named)) or "none"
        wrong = f"a list with an entry {odd[0]!r}"[:200] if odd else f"a list of templates without one named 'default' (its names: {names})"
    raise TokenizerError(f"chat_template in {file} is {wrong}; expected text, or a list of objects with name and template of which one is the "
                         "default; change it, or take it out to ask without a template")


def _eos_ids(folder: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(folder / name).get("eos_token_id")
        if eos is not None:
            return sorted(eos) if isinstance(eos, list) else [int(eos)]
    return []
