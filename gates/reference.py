"""The third party: unpatched ``transformers`` in fp32. Two sides that share an operation can share its mistake.

Runs in the controller, where nothing of vime is ever enabled. The weights are rounded to the model's dtype first, so
that what is left is the rounding of activations: the bound says how much of that is allowed.
"""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Largest difference of a log-probability from fp32 transformers, by model dtype. fp32 has only another order of
#: additions; bf16 rounds every activation to 8 bits, over all layers. Of models that choose experts or keys
#: :mod:`gates.choosing` judges more closely.
BOUND = {"float32": "1e-4", "bfloat16": "0.5"}


def chooses(folder: Path) -> bool:
    """Whether the model of a folder chooses experts (or keys)."""
    from vime.latent import experts
    from vime.rl.config import read_hf_config

    return experts(read_hf_config(folder)) is not None


def load(folder: Path) -> Any:
    """The folder's model in fp32. Where its weights are made of a counter there is no file for ``transformers`` to read, and the
    model is large: it is built from its config, on the GPU if there is one, and takes the tensors by name."""
    import torch
    import transformers

    from vime.weights.checkpoint import HfCheckpoint

    checkpoint = HfCheckpoint(folder)
    if checkpoint.counted is None:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    checkpoint = HfCheckpoint(folder, device)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    places = model.state_dict()
    if missing := sorted({name for name in places if name not in checkpoint} - set(getattr(model, "_tied_weights_keys", None) or ())):
        raise ValueError(f"{folder} makes no tensor {missing[0]} ({len(missing)} in all), which transformers' model needs")
    with torch.no_grad():
        for name, place in places.items():
            if name in checkpoint:
                place.copy_(checkpoint[name])
    return model


class Reference:
    """A ``transformers`` model of ``folder``."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import torch

        self.model = load(folder).eval()
        self.device = next(self.model.parameters()).device
        self.bound = BOUND[dtype]
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.to(getattr(torch, dtype)))

    def records(self, samples: Sequence[Any]) -> list[dict[str, Any]]:
        """Log-probability of every sampled token at temperature 1, as records."""
        from gates.harness import record

        return [record(s, self._logprobs(s)[0]) for s in samples]

    def greedy(self, samples: Sequence[Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """For greedy samples: the log-probability of the sampled token, and of this model's own best token.

        Equal within the bound means that the other side chose the best token, or one that rounding can put first.
        """
        from gates.harness import record

        both = [self._logprobs(s) for s in samples]
        return [record(s, b[0]) for s, b in zip(samples, both, strict=True)], [
            record(s, b[1]) for s, b in zip(samples, both, strict=True)]

    def _logprobs(self, sample: Any) -> tuple[Any, Any]:
        import torch

        ids = torch.tensor([sample.prompt_token_ids + sample.token_ids], device=self.device)
        with torch.no_grad():
            logits_RV = self.model(ids).logits[0, len(sample.prompt_token_ids) - 1:-1].float()
        logprobs_RV = logits_RV.cpu().log_softmax(-1)
        chosen_R = logprobs_RV.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        return chosen_R.numpy(), logprobs_RV.max(-1).values.numpy()
