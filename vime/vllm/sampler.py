"""Sampling and log-probabilities of vLLM's model runner, routed to ``vime.ops``.

Stock sampling draws from a generator with state, so a token depends on the batch it was drawn in, and a seeded request
whose prompt is prefilled in chunks crashes on CPU (the generator has no offset to rewind). Here the random number of a
token is a function of (request seed, position, vocabulary index): there is no state to rewind.

Log-probabilities are of the logits divided by the request's temperature, over the full vocabulary, before top-k and
top-p: the number that a trainer computes. At temperature 0 (greedy) they are taken at temperature 1.
"""
from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import xxhash
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vime import ops
from vime.errors import VimeError
from vime.vllm import plugin

#: vLLM takes a temperature below this as greedy (vllm/sampling_params.py, _SAMPLING_EPS).
GREEDY_BELOW = 1e-5

_stock_prompt_logprobs = GPUModelRunner._get_prompt_logprobs_dict


class UnsupportedSampling(VimeError):
    """A request asks for sampling that is not part of the contract."""


def _on(op: str) -> bool:
    return op in (plugin.requested() or ())


def request_seed(request_id: str, params: Any) -> int:
    """The seed of a request; without one, a hash of its id, so that it still depends on nothing but itself."""
    return params.seed if params.seed is not None else xxhash.xxh64_intdigest(request_id.encode()) >> 1


def _temperature(metadata: Any, rows: int, device: torch.device) -> torch.Tensor:
    if metadata.temperature is None:  # the whole batch is greedy
        return torch.zeros(rows, dtype=torch.float32, device=device)
    return torch.where(metadata.temperature < GREEDY_BELOW, 0.0, metadata.temperature).to(device, torch.float32)


@dataclasses.dataclass
class _Batch:
    """What holds as long as the same requests run: vLLM makes new metadata whenever one comes, goes or moves."""

    requests: list[str]
    temperature_B: torch.Tensor
    logprob_temperature_B: torch.Tensor
    seed_B: torch.Tensor


def _of_batch(runner: Any, metadata: Any, rows: int, device: torch.device) -> _Batch:
    requests = runner.input_batch.req_ids[:rows]
    kept: _Batch | None = getattr(metadata, "vime_batch", None)
    if kept is None or kept.requests != requests:
        temperature_B = _temperature(metadata, rows, device)
        seeds = [request_seed(r, runner.requests[r].sampling_params) for r in requests]
        kept = _Batch(list(requests), temperature_B, torch.where(temperature_B == 0, 1.0, temperature_B), _to_device(torch.tensor(seeds), device))
        metadata.vime_batch = kept
    return kept


#: vLLM's own logits processors: what a request calls them, and what is not empty where one asked.
_PROCESSORS = {"MinPLogitsProcessor": ("min_p", "min_p_count"), "LogitBiasLogitsProcessor": ("logit_bias", "biases"),
               "MinTokensLogitsProcessor": ("min_tokens", "min_toks")}


def _refuse_unsupported(metadata: Any) -> None:
    asked = []
    if not metadata.no_penalties:
        asked.append("penalties")
    if metadata.allowed_token_ids_mask is not None:
        asked.append("allowed_token_ids")
    if metadata.bad_words_token_ids:
        asked.append("bad_words")
    if getattr(metadata, "logprob_token_ids", None):
        asked.append("logprob_token_ids")
    # vLLM's own say whether a request asked for them; one of somebody else's is taken to act always.
    for processor in getattr(getattr(metadata, "logitsprocs", None), "all", ()):
        word = _PROCESSORS.get(type(processor).__name__)
        if word is None:
            if not type(processor).__module__.startswith("vllm."):
                asked.append(f"the logits processor {type(processor).__name__}")
        elif getattr(processor, word[1], True):
            asked.append(word[0])
    if asked:
        raise UnsupportedSampling(f"sampling with {', '.join(asked)} is not in vime's contract; use temperature, top_k and top_p")


def _to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """From pinned memory and not waited for: a plain copy would make the host wait for the forward pass that is still running,
    and the next step could not be prepared beside it."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.clone()


def _draw(runner: Any, logits_BV: torch.Tensor, metadata: Any, batch: _Batch) -> torch.Tensor:
    # Position of the token being drawn. A row whose prompt is not finished draws a token that vLLM discards.
    position_B = _to_device(torch.from_numpy(runner.input_batch.num_tokens_no_spec[:logits_BV.shape[0]]).long(), logits_BV.device)
    runner.input_batch.generators.clear()  # unused, and what would be rewound after a chunk of a prompt
    return ops.sample(logits_BV, batch.seed_B, position_B, batch.temperature_B, metadata.top_k, metadata.top_p)


def sample(self: Any, logits: torch.Tensor, spec_decode_metadata: Any) -> SamplerOutput:
    """Replaces ``GPUModelRunner._sample``. Each of the two operations falls back to stock vLLM alone when it is off."""
    if spec_decode_metadata is not None:
        raise UnsupportedSampling("speculative decoding is not in vime's contract; start the engine without it")
    self.input_batch.update_async_output_token_ids()
    metadata = self.input_batch.sampling_metadata
    _refuse_unsupported(metadata)
    batch = _of_batch(self, metadata, logits.shape[0], logits.device)
    stock = None
    if _on("sampling"):
        token_B = _draw(self, logits, metadata, batch)
    else:
        stock = self.sampler(logits=logits.clone(), sampling_metadata=metadata)  # it divides the logits in place
        token_B = stock.sampled_token_ids.view(-1).long()
    k = metadata.max_num_logprobs
    if k is None:
        logprobs = None
    elif stock is not None and not _on("logprob"):
        logprobs = stock.logprobs_tensors
    else:
        logprobs = _logprobs(self.sampler, logits, token_B, batch.logprob_temperature_B, k)
    return SamplerOutput(sampled_token_ids=token_B.to(torch.int32).unsqueeze(-1), logprobs_tensors=logprobs)


def _logprobs(sampler: Any, logits_BV: torch.Tensor, token_B: torch.Tensor, temperature_B: torch.Tensor, k: int) -> LogprobsTensors:
    if not _on("logprob"):
        return sampler.gather_logprobs(sampler.compute_logprobs(logits_BV / temperature_B.unsqueeze(-1)), k, token_B)
    if k != 0:
        return sampler.gather_logprobs(ops.log_softmax(logits_BV, temperature_B), k, token_B)
    lp_B = ops.token_logprob(logits_BV, token_B, temperature_B)
    assert isinstance(lp_B, torch.Tensor)  # no entropy was asked for
    rank_B = (logits_BV >= logits_BV.gather(-1, token_B.unsqueeze(-1))).sum(-1)
    return LogprobsTensors(token_B.to(torch.int32).unsqueeze(-1), lp_B.unsqueeze(-1), rank_B)


def prompt_logprobs(self: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
    """Replaces ``_get_prompt_logprobs_dict``: stock code, one request at a time, at that request's temperature."""
    waiting, result, left = self.num_prompt_logprobs, {}, {}
    for request_id, k in waiting.items():
        temperature = self.requests[request_id].sampling_params.temperature
        scale = 1.0 if temperature < GREEDY_BELOW else temperature
        self.sampler.compute_logprobs = functools.partial(ops.log_softmax, temperature=scale)
        self.num_prompt_logprobs = {request_id: k}
        try:
            result.update(_stock_prompt_logprobs(self, hidden_states, num_scheduled_tokens))
            left.update(self.num_prompt_logprobs)
        finally:
            del self.sampler.compute_logprobs
            self.num_prompt_logprobs = waiting
    self.num_prompt_logprobs = left
    return result


def install() -> None:
    GPUModelRunner._sample = sample  # type: ignore[method-assign, assignment]
    if _on("logprob"):
        GPUModelRunner._get_prompt_logprobs_dict = prompt_logprobs  # type: ignore[method-assign]
