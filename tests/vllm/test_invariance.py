"""A sample depends on its request alone: not on the batch, the order, the chunks of its prompt, or the prefix cache."""
from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vllm.models import hf_state, prompts
from vime.vllm.client import EngineClient
from vime.vllm.protocol import Request, Sample

POOL = 7
_alone: dict[str, list[Sample]] = {}


def pool() -> list[Request]:
    """Requests of different length, temperature, seed and filter."""
    extras = [{}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_p": 0.8}, {"top_k": 5}, {"temperature": 1.3}, {}]
    return [Request(**{"request_id": f"r{i}", "prompt_token_ids": p, "max_tokens": 6 + i % 3, "temperature": 1.0, "seed": 100 + i,
                       **extras[i]}) for i, p in enumerate(prompts(POOL))]


def alone(client: EngineClient) -> list[Sample]:
    """Each request in a batch of one, cold, prompt in one piece."""
    if client.url not in _alone:
        client.set_chunk(None)
        samples = []
        for request in pool():
            client.reset_prefix_cache()
            samples += client.generate([request])
        assert all(s.num_cached_tokens == 0 for s in samples)
        _alone[client.url] = samples
    return _alone[client.url]


def assert_same(samples: list[Sample], expected: list[Sample]) -> None:
    for got, want in zip(samples, expected, strict=True):
        assert (got.request_id, got.token_ids) == (want.request_id, want.token_ids)
        differing = [i for i, (a, b) in enumerate(zip(got.logprobs, want.logprobs, strict=True)) if a != b]
        assert not differing, f"{got.request_id}: log-probs differ first at token {differing[0]} of {len(got.logprobs)}"


@pytest.fixture(params=["llama_engine", "qwen3_engine"])
def client(request: pytest.FixtureRequest) -> EngineClient:
    """fp32 Llama and bf16 Qwen3."""
    return request.getfixturevalue(request.param).client


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(members=st.permutations(range(POOL)), size=st.integers(1, POOL), chunk=st.sampled_from([None, 16, 33, 64, 100]),
       warm=st.booleans())
def test_any_batch_any_chunk_any_cache(client: EngineClient, members: list[int], size: int, chunk: int | None, warm: bool) -> None:
    expected = alone(client)
    client.set_chunk(chunk)
    client.reset_prefix_cache()
    batch = [pool()[i] for i in members[:size]]
    if warm:
        client.generate(batch)
    samples = client.generate(batch)
    assert_same(samples, [expected[i] for i in members[:size]])
    if warm:
        assert all(s.num_cached_tokens >= 32 for s in samples)


def test_prefix_cache_hits_are_counted(client: EngineClient) -> None:
    client.set_chunk(None)
    client.reset_prefix_cache()
    before = client.stats()["cached_tokens"]
    client.generate(pool())
    client.generate(pool())
    assert client.stats()["cached_tokens"] - before >= 32 * POOL


def test_a_seed_matters_and_a_repeat_does_not(client: EngineClient) -> None:
    first = alone(client)[0]
    other = client.generate([Request(request_id="r0", prompt_token_ids=pool()[0].prompt_token_ids, max_tokens=6, seed=999)])[0]
    assert other.token_ids != first.token_ids
    assert_same(client.generate(pool()[:1]), [first])


def test_prompt_logprobs_are_those_of_generated_tokens(client: EngineClient) -> None:
    """Prefilling a sample's own tokens gives the log-probs that decoding gave, at the request's temperature."""
    client.set_chunk(20)
    for index in (0, 1):  # temperature 1 and 0.7
        request, sample = pool()[index], alone(client)[index]
        full = [*sample.prompt_token_ids, *sample.token_ids]
        again = client.generate([Request(request_id="p", prompt_token_ids=full, max_tokens=1, temperature=request.temperature,
                                         prompt_logprobs=True)])[0]
        assert again.prompt_logprobs is not None and again.num_cached_tokens == 0
        assert again.prompt_logprobs[-len(sample.token_ids):] == sample.logprobs
    client.set_chunk(None)


def test_greedy_tokens_equal_transformers(llama_engine, llama_dir, qwen2_engine, qwen2_dir) -> None:
    import transformers

    for engine, folder in ((llama_engine, llama_dir), (qwen2_engine, qwen2_dir)):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for prompt in prompts(3, seed=5):
            sample = engine.client.generate([Request(request_id="g", prompt_token_ids=prompt, max_tokens=12, temperature=0)])[0]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + sample.token_ids])).logits[0, len(prompt) - 1:-1]
            assert logits.argmax(-1).tolist() == sample.token_ids
            expected = logits.double().log_softmax(-1).gather(-1, torch.tensor(sample.token_ids).unsqueeze(-1)).squeeze(-1)
            assert (expected - torch.tensor(sample.logprobs, dtype=torch.float64)).abs().max() < 1e-4


def test_bf16_logprobs_are_near_transformers(qwen3_engine, qwen3_dir) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(qwen3_dir, dtype=torch.float32).eval()
    rounded = {name: tensor.bfloat16().float() for name, tensor in hf_state(qwen3_dir).items()}
    model.load_state_dict(rounded)
    prompt = prompts(1, seed=8)[0]
    sample = qwen3_engine.client.generate([Request(request_id="g", prompt_token_ids=prompt, max_tokens=8, seed=4)])[0]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + sample.token_ids])).logits[0, len(prompt) - 1:-1].double()
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(sample.token_ids).unsqueeze(-1)).squeeze(-1)
    assert (expected - torch.tensor(sample.logprobs, dtype=torch.float64)).abs().max() < 0.15
