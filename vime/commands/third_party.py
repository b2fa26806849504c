"""Unpatched ``transformers`` beside both sides: log-probabilities within rounding, greedy tokens among the best.

Runs in the controller, where nothing of vime is ever enabled. The weights are rounded to the model's dtype first, so
that what is left is the rounding of activations.
"""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alignment.verdict import Verdict
from vime.rl.batch import Trajectory

#: Largest difference of a log-probability by model dtype. In fp32 only the order of additions differs; bfloat16 rounds
#: every activation to 8 bits, in every layer.
BOUND = {"float32": "1e-3", "bfloat16": "0.5"}


def judge(folder: Path, dtype: str, batch: Sequence[Trajectory]) -> list[Verdict]:
    """Two verdicts: the engine's log-probabilities, and the trainer's, against transformers in fp32."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from alignment.logprobs import judge as compare

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(getattr(torch, dtype)))
        expected: list[Any] = []
        for t in batch:
            lp_TV = model(torch.tensor([t.token_ids])).logits[0].log_softmax(-1)
            rows = torch.arange(t.prompt_len - 1, len(t.token_ids) - 1)
            expected.append(lp_TV[rows, torch.tensor(t.response_ids)].numpy())

    def records(values: Sequence[Any]) -> dict[str, dict[str, Any]]:
        return {t.request_id: {"token_ids": t.response_ids, "prompt_token_ids": t.token_ids[:t.prompt_len], "logprobs": np.asarray(v)}
                for t, v in zip(batch, values, strict=True)}

    sides: dict[str, list[Any]] = {"engine": [t.rollout_logprobs for t in batch], "trainer": [t.old_logprobs for t in batch]}
    verdicts = []
    for side, values in sides.items():
        verdict = compare(records(values), records(expected), name=f"{side} against transformers", tier=BOUND[dtype])
        verdict.coverage = {f"third-party {unit}": c for unit, c in verdict.coverage.items()}
        verdicts.append(verdict)
    return verdicts
