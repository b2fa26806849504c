"""A tokenizer of bytes for checkpoints that exist for their shape: any text becomes tokens, 256 of them and no merges.

With it a profile of random weights can also be trained on word problems, which the gates themselves never need.
"""
from __future__ import annotations

import json
from pathlib import Path

from alignment.files import write_text

#: Bytes, whatever the vocabulary of the model is beyond them.
SIZE = 256


def ensure(folder: Path) -> None:
    """Write ``tokenizer.json`` into ``folder`` where there is none; whole or not at all."""
    target = folder / "tokenizer.json"
    if target.is_file():
        return
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    write_text(target, json.dumps(json.loads(tokenizer.to_str())))
