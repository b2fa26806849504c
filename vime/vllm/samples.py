"""A request in vLLM's words, and vLLM's answer in ours."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vime.vllm.protocol import Request, Sample

if TYPE_CHECKING:
    from vllm import SamplingParams


def sampling_params(request: Request, seeded: bool) -> SamplingParams:
    """How vLLM is to sample ``request``; ``seeded``: with its seed."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1, max_tokens=request.max_tokens, temperature=request.temperature, top_p=request.top_p, top_k=request.top_k,
        seed=request.seed if seeded else None, stop_token_ids=list(request.stop_token_ids), detokenize=False,
        logprobs=0, prompt_logprobs=0 if request.prompt_logprobs else None, ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY)


def sample_of(output: Any, request: Request, seeded: bool, version: int) -> Sample:
    """The sample in vLLM's finished ``output``, made with the weights of ``version``. Its log-probabilities are fp32 numbers
    that vLLM hands over as Python's floats."""
    completion = output.outputs[0]
    ids = list(completion.token_ids)
    prompt = None
    if output.prompt_logprobs is not None:
        pairs = zip(output.prompt_logprobs[1:], request.prompt_token_ids[1:], strict=True)
        prompt = [row[token].logprob for row, token in pairs]
    return Sample(
        request_id=request.request_id, prompt_token_ids=request.prompt_token_ids, token_ids=ids,
        logprobs=[row[token].logprob for row, token in zip(completion.logprobs, ids, strict=True)],
        finish_reason=str(completion.finish_reason), weight_version=version, num_cached_tokens=output.num_cached_tokens or 0,
        prompt_logprobs=prompt, seeded=seeded)
